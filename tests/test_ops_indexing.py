"""Indexing: reads and writes, of every kind of index."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from op_harness import GRID, LINE, Case, T, assert_right, booleans, eighths, integers

A, C = eighths(5, 3), eighths(4, 5, 3)
ROWS = torch.tensor([0, 2, 4, 2])
COLUMNS = torch.tensor([1, 0, 2, 1])
s = slice

INDICES: dict[str, Any] = {
    "0": 0,
    "-1": -1,
    "1:4": s(1, 4),
    ":": s(None),
    "::2": s(None, None, 2),
    "3:": s(3, None),
    "-2:": s(-2, None),
    "2:2": s(2, 2),
    "0:99": s(0, 99),
    "None": None,
    "...": ...,
    "..., 0": (..., 0),
    "0, ...": (0, ...),
    ":, 1": (s(None), 1),
    ":, 1:": (s(None), s(1, None)),
    "1, 2": (1, 2),
    "None, :, 1": (None, s(None), 1),
    ":, None": (s(None), None),
    "..., None": (..., None),
    "list": [0, 2],
    "list, :": ([0, 2], s(None)),
    ":, list": (s(None), [0, 2]),
    "list, list": ([0, 1], [2, 0]),
    "int tensor": ROWS,
    ":, int tensor": (s(None), torch.tensor([0, 2])),
    "int tensor 2-d": ROWS.view(2, 2),
    "int tensor, int tensor": (ROWS, COLUMNS),
    "int tensor, 1": (ROWS, 1),
    "1, int tensor": (1, torch.tensor([0, 2])),
    "broadcast tensors": (torch.tensor([[0], [3]]), torch.tensor([0, 1, 2])),
    "0-d tensor": torch.tensor(2),
    "bool tensor": booleans(5, 3),
    "bool rows": booleans(5),
    ":, bool": (s(None), torch.tensor([True, False, True])),
    "bool list": [True, False, True, True, False],
    "True": True,
    "numpy": np.array([0, 2]),
    "numpy int": np.int64(2),
    "()": (),
}
DEEP: dict[str, Any] = {
    "0, :, 1": (0, s(None), 1),
    ":, 0": (s(None), 0),
    ":, :, 1:": (s(None), s(None), s(1, None)),
    "..., 0": (..., 0),
    ":, list": (s(None), [0, 2]),
    "list, :, list": ([0, 1], s(None), [0, 2]),
    "0, :, list": (0, s(None), [0, 2]),
    ":, list, list": (s(None), [0, 4], [0, 2]),
    "None, list": (None, [0, 3]),
    "list, None, list": ([0, 1], None, [0, 2]),
    "0, None, list": (0, None, [0, 2]),
    "tensor 2-d": (s(None), torch.tensor([[0, 1], [2, 3]])),
    ":, None, 1:3": (s(None), None, s(1, 3)),
    "list, 1": ([0, 1], 1),
    ":, 1, list": (s(None), 1, [0, 1]),
    "bool 2-d": booleans(4, 5),
    "..., bool": (..., torch.tensor([True, False, True])),
    "0, bool": (0, booleans(5)),
    "bool, 0": (booleans(4), 0),
}


def reads() -> list[Case]:
    cases = [Case(f"x[{n}]", lambda x, i=i: x[i], [A]) for n, i in INDICES.items()]
    cases += [Case(f"c[{n}]", lambda x, i=i: x[i], [C]) for n, i in DEEP.items()]
    t = torch
    i = torch.tensor([[0, 2, 1], [1, 0, 3]])
    cases += [
        Case("x[I] typed", lambda x, i: x[i], [A, ROWS]),
        Case("x[:, I] typed", lambda x, i: x[:, i], [A, torch.tensor([0, 2])]),
        Case("x[I, J] typed", lambda x, i, j: x[i, j], [A, ROWS, COLUMNS]),
        Case("x[mask] typed", lambda x, m: x[m], [A, booleans(5, 3)]),
        Case("x[x > 0]", lambda x: x[x > 0], [A]),
        Case("index_select", lambda x: x.index_select(0, ROWS), [A]),
        Case("index_select 1", lambda x, j: t.index_select(x, 1, j), [A, COLUMNS]),
        Case("gather", lambda x: x.gather(0, i), [A]),
        Case("gather typed", lambda x, i: t.gather(x, 0, i), [A, i]),
        Case("gather 1", lambda x, i: x.gather(1, i), [A, integers(5, 2, high=3)]),
        Case("take", lambda x: x.take(ROWS), [A]),
        Case(
            "take_along_dim", lambda x: t.take_along_dim(x, x.argmax(1, True), 1), [A]
        ),
        Case("masked_select", lambda x: x.masked_select(x > 0), [A]),
        Case("nonzero", lambda x: (x > 0).nonzero(), [A]),
        Case("nonzero tuple", lambda x: (x > 0).nonzero(as_tuple=True), [A]),
        Case("where one", lambda x: t.where(x > 0), [A]),
        Case("argwhere", lambda x: t.argwhere(x > 0), [A]),
        Case("item", lambda x: x.sum().item(), [A]),
        Case("tolist", lambda x: x.tolist(), [A]),
        Case("float", lambda x: float(x.max()), [A]),
        Case("bool", lambda x: bool((x > 0).any()), [A]),
        Case("index", lambda x: [1, 2, 3, 4, 5][x.sum()], [torch.tensor([1, 1])]),
        Case("equal", lambda x, y: t.equal(x, y), [A, A.clone()]),
        Case("allclose", lambda x, y: t.allclose(x, y), [A, A + 1]),
        Case("len", lambda x: len(x), [A]),
        Case("contains", lambda x: 0.125 in x, [A]),
        Case("scatter", lambda x, y: x.scatter(0, i, y), [A, eighths(2, 3)]),
        Case("scatter_add", lambda x, y: x.scatter_add(0, i, y), [A, eighths(2, 3)]),
        Case("index_add", lambda x, y: x.index_add(0, ROWS, y), [A, eighths(4, 3)]),
        Case("index_fill", lambda x: x.index_fill(0, ROWS, 2.0), [A]),
        Case(
            "index_copy",
            lambda x, y: x.index_copy(0, t.tensor([3, 1]), y),
            [A, eighths(2, 3)],
        ),
        Case(
            "index_put",
            lambda x, y: x.index_put((ROWS,), y, accumulate=True),
            [A, eighths(4, 3)],
        ),
        Case(
            "masked_scatter",
            lambda x, y: x.masked_scatter(x > 0, y),
            [A, eighths(5, 3)],
        ),
        Case(
            "select_scatter", lambda x, y: t.select_scatter(x, y, 0, 1), [A, eighths(3)]
        ),
        Case(
            "slice_scatter",
            lambda x, y: t.slice_scatter(x, y, 0, 1, 3),
            [A, eighths(2, 3)],
        ),
    ]
    return cases


def write(name: str, index: Any, value: Any, x: T = A) -> Case:
    def program(x: T, *v: T) -> T:
        y = x * 1
        y[index] = v[0] if v else value
        return y

    args = [x, value] if isinstance(value, T) else [x]
    return Case(
        f"{name} = {'tensor' if len(args) > 1 else value}",
        program,
        args,
        may_refuse=True,
    )


def writes() -> list[Case]:
    cases = []
    for name, index in INDICES.items():
        part = A[index]
        cases.append(write(f"x[{name}]", index, 2.0))
        repeated = isinstance(index, T) and not index.is_floating_point()
        if part.numel() and not (repeated and index.dtype != torch.bool):
            if "int tensor" not in name:
                cases.append(write(f"x[{name}]", index, eighths(*part.shape)))
        if part.ndim > 1 and "tensor" not in name:
            cases.append(write(f"x[{name}] row", index, eighths(*part.shape[1:])))
    for name, index in DEEP.items():
        cases.append(write(f"c[{name}]", index, 2.0, C))
        cases.append(write(f"c[{name}]", index, eighths(*C[index].shape), C))
    cases += [
        write("x[0] int", 0, 2),
        write("x[:, 0] int", (s(None), 0), 2),
        write("x[:] ints", s(None), integers(5, 3)),
        write("x[1] 0-d", 1, eighths()),
        write("x[1:] ones", s(1, None), eighths(1, 3)),
    ]

    def augmented(x: T, y: T) -> T:
        z = x * 1
        z[:, 1] += y
        z[1:3] *= 2
        return z

    cases.append(Case("augmented", augmented, [A, eighths(5)], may_refuse=True))
    return cases


FAMILIES = {"reads": reads, "writes": writes}


@pytest.mark.parametrize("family", FAMILIES)
def test_on_one_axis(family: str) -> None:
    assert_right(FAMILIES[family](), LINE, limit=6)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_two_axes(family: str) -> None:
    assert_right(FAMILIES[family](), GRID, limit=3)
