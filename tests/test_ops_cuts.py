"""Cuts, flips, rolls and scatters along sharded dims: right, and no more moved than must.

Lengths are uneven, some shards are empty, and two axes may cut one dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_harness import GRID, LINE, Case, T, assert_right, booleans, eighths, integers

A, B, C = eighths(7, 5), eighths(3, 6), eighths(5, 3, 4)
ONE, SEVEN = eighths(1, 4), eighths(7)
t = torch


def cuts() -> list[Case]:
    cases = []
    for name, x in {"a": A, "b": B, "c": C, "one": ONE, "row": SEVEN}.items():
        for d in range(x.ndim):
            n = x.shape[d]
            cases += [
                Case(
                    f"{name} narrow {d}",
                    lambda x, d=d, n=n: x.narrow(d, n // 3, n // 2),
                    [x],
                ),
                Case(f"{name} select {d}", lambda x, d=d: x.select(d, -1), [x]),
                Case(f"{name} unbind {d}", lambda x, d=d: x.unbind(d), [x]),
                Case(f"{name} split {d}", lambda x, d=d: x.split(2, d), [x]),
                Case(f"{name} chunk {d}", lambda x, d=d: x.chunk(3, d), [x]),
                Case(
                    f"{name} tensor_split {d}", lambda x, d=d: x.tensor_split(2, d), [x]
                ),
                Case(
                    f"{name} sizes {d}",
                    lambda x, d=d, n=n: x.split([n - 1, 0, 1], d),
                    [x],
                ),
                Case(f"{name} uses one {d}", lambda x, d=d: x.chunk(2, d)[-1] * 2, [x]),
                Case(f"{name} flip {d}", lambda x, d=d: x.flip(d), [x]),
                Case(f"{name} roll {d}", lambda x, d=d: x.roll(2, d), [x]),
                Case(f"{name} roll back {d}", lambda x, d=d: x.roll(-1, d), [x]),
                Case(f"{name} diff {d}", lambda x, d=d: x.diff(dim=d), [x]),
                Case(f"{name} step {d}", lambda x, d=d: x.transpose(0, d)[::2], [x]),
                Case(f"{name} step 3 {d}", lambda x, d=d: x.transpose(0, d)[1::3], [x]),
            ]
    return [
        *cases,
        Case("flip both", lambda x: x.flip(0, 1), [A]),
        Case("flip none", lambda x: x.flip(()), [A]),
        Case("fliplr", lambda x: t.fliplr(x), [A]),
        Case("flipud", lambda x: t.flipud(x), [A]),
        Case("roll both", lambda x: x.roll((1, 2), (0, 1)), [A]),
        Case("roll twice", lambda x: x.roll((1, 2), (0, 0)), [A]),
        Case("roll flat", lambda x: x.roll(3), [A]),
        Case("roll row", lambda x: x.roll(3), [SEVEN]),
        Case("tensor_split at", lambda x: x.tensor_split((1, 3)), [A]),
        Case("tensor_split back", lambda x: x.tensor_split((4, 2)), [A]),
        Case("differences", lambda x: x[1:] - x[:-1], [A]),
        Case("shifted product", lambda x: (x[2:] * x[1:-1] + x[:-2]).sum(), [A]),
        Case("corner", lambda x: x[2:6, 1:4], [A]),
        Case("strides", lambda x: x[1::2, ::3], [A]),
        Case("slice, number", lambda x: x[2:6, 1], [A]),
        Case("number, slice", lambda x: x[4, 1:], [A]),
        Case("numbers", lambda x: x[4, 2], [A]),
        Case("slice, list", lambda x: x[1:5, :, [0, 3, 3]], [C]),
        Case("list, slice", lambda x: x[[4, 0], 1:], [C]),
        Case("slices of slices", lambda x: x[1:6][1:4][:, 2:], [A]),
        Case("rows", lambda x: [2 * row for row in x], [A]),
        Case("rows of ints", lambda x: [row + 1 for row in x], [integers(7, 5)]),
        Case("bools", lambda x: (x[1:5], x[2], x[[0, 3]], x.flip(0)), [booleans(7, 3)]),
        Case("second derivative", second_derivative, [A], grad=False),
    ]


def second_derivative(x: T) -> Any:
    x = x.detach().requires_grad_()
    y = (x[1:6] ** 3).sum() + (x.flip(0)[2] ** 3).sum() + (x.roll(1, 0) ** 3 * x).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    return torch.autograd.grad((g * g).sum(), x)[0]


ROWS = t.tensor([6, 0, 3, 0])
PLACES = integers(4, 5, high=7, seed=1)
FEW = integers(2, 3, high=7, seed=2)


def picks() -> list[Case]:
    flat = t.tensor([[0, 34], [7, -1]])
    return [
        Case("x[I]", lambda x, i: x[i], [A, ROWS]),
        Case("x[I, J]", lambda x, i, j: x[i, j], [A, ROWS, t.tensor([0, 1, 4, -1])]),
        Case(
            "x[I, None, J]",
            lambda x, i, j: x[i, :, j],
            [C, t.tensor([0, 4]), t.tensor([3, -1])],
        ),
        Case("x[i] of a tensor", lambda x, i: x[i], [A, t.tensor(5)]),
        Case("x[:, i] of a tensor", lambda x, i: x[:, i], [A, t.tensor(-2)]),
        Case("ints", lambda x, i: x[i], [integers(9, 2), ROWS]),
        Case("many", lambda x, i: x[i], [ONE, t.zeros(9, dtype=t.int64)]),
        Case("select", lambda x, i: x.index_select(0, i), [A, ROWS]),
        Case("select 1", lambda x, i: x.index_select(1, i), [A, t.tensor([4, 0])]),
        Case("select named", lambda x, i: t.index_select(x, dim=0, index=i), [A, ROWS]),
        Case("gather", lambda x, i: x.gather(0, i), [A, PLACES]),
        Case("gather few", lambda x, i: x.gather(0, i), [A, FEW]),
        Case("gather named", lambda x, i: t.gather(x, dim=0, index=i), [A, PLACES]),
        Case("gather 1", lambda x, i: x.gather(1, i), [A, integers(7, 2, high=5)]),
        Case("take", lambda x, i: x.take(i), [A, flat]),
        Case("take of a row", lambda x, i: x.take(i), [SEVEN, ROWS]),
        Case("along", lambda x, i: t.take_along_dim(x, i, 0), [A, PLACES]),
        Case("along, wide", lambda x, i: t.take_along_dim(x, i, 0), [A, PLACES[:, :1]]),
        Case(
            "along 1",
            lambda x, i: t.take_along_dim(x, i, 1),
            [A, integers(7, 2, high=5)],
        ),
        Case("sorted", lambda x: t.take_along_dim(x, x.argsort(0), 0), [A]),
    ]


def scatters() -> list[Case]:
    src, rows, few = eighths(4, 5), eighths(4, 5, seed=3), eighths(2, 3)
    once = t.tensor([[0, 1, 2, 3, 4], [6, 5, 4, 2, 1]])
    cases = [
        Case("scatter", lambda x, i, y: x.scatter(0, i, y), [A, once, eighths(2, 5)]),
        Case("scatter number", lambda x, i: x.scatter(0, i, 2.0), [A, PLACES]),
        Case("scatter few", lambda x, i, y: x.scatter(0, i, y), [A, FEW[:1], few]),
        Case(
            "scatter 1",
            lambda x, i, y: x.scatter(1, i, y),
            [A, integers(7, 1), eighths(7, 1)],
        ),
        Case(
            "scatter add",
            lambda x, i, y: x.scatter(0, i, y, reduce="add"),
            [A, PLACES, src],
            grad=False,
        ),
        Case("scatter_add", lambda x, i, y: x.scatter_add(0, i, y), [A, PLACES, src]),
        Case(
            "scatter_add few",
            lambda x, i, y: x.scatter_add(0, i, y),
            [A, FEW, eighths(4, 5)],
        ),
        Case("index_add", lambda x, i, y: x.index_add(0, i, y), [A, ROWS, rows]),
        Case(
            "index_add alpha",
            lambda x, i, y: x.index_add(0, i, y, alpha=3),
            [A, ROWS, rows],
        ),
        Case(
            "index_add 1",
            lambda x, i, y: x.index_add(1, i, y),
            [A, t.tensor([4, 4]), eighths(7, 2)],
        ),
        Case(
            "index_copy",
            lambda x, i, y: x.index_copy(0, i, y),
            [A, t.tensor([5, 1]), eighths(2, 5)],
        ),
        Case("index_fill", lambda x, i: x.index_fill(0, i, 2.0), [A, ROWS]),
        Case(
            "index_fill tensor",
            lambda x, i, v: x.index_fill(1, i, v),
            [A, t.tensor([1, 3]), t.tensor(4.0, dtype=t.float64)],
        ),
        Case(
            "put",
            lambda x, i, y: x.put(i, y),
            [A, t.tensor([[0, 34], [7, -2]]), eighths(4)],
        ),
        Case(
            "put adds",
            lambda x, i, y: x.put(i, y, accumulate=True),
            [A, ROWS, eighths(4)],
        ),
        Case(
            "index_put",
            lambda x, i, y: x.index_put((i,), y),
            [A, t.tensor([5, 1]), eighths(2, 5)],
        ),
        Case(
            "index_put adds",
            lambda x, i, y: x.index_put((i,), y, accumulate=True),
            [A, ROWS, rows],
        ),
        Case(
            "index_put 1",
            lambda x, i, y: x.index_put((None, i), y),
            [C, t.tensor([2, 0]), eighths(4)],
        ),
        Case(
            "index_put mask",
            lambda x, m, y: x.index_put((m,), y),
            [A, booleans(7, 5), eighths()],
        ),
        Case(
            "masked_scatter",
            lambda x, m, y: x.masked_scatter(m, y),
            [A, booleans(7, 5), eighths(7, 5)],
        ),
        Case(
            "select_scatter", lambda x, y: t.select_scatter(x, y, 0, 4), [A, eighths(5)]
        ),
        Case(
            "slice_scatter",
            lambda x, y: t.slice_scatter(x, y, 0, 1, 6, 2),
            [A, eighths(3, 5)],
        ),
        Case(
            "ints",
            lambda x, i, y: x.scatter_add(0, i, y),
            [integers(7, 5), PLACES, integers(4, 5)],
        ),
    ]
    for how in ("sum", "prod", "mean", "amax", "amin"):
        for own in (True, False):
            cases.append(
                Case(
                    f"scatter_reduce {how} {own}",
                    lambda x, i, y, how=how, own=own: x.scatter_reduce(
                        0, i, y, how, include_self=own
                    ),
                    [A, PLACES, src],
                )
            )
    return cases


FAMILIES: dict[str, Callable[[], list[Case]]] = {
    "cuts": cuts,
    "picks": picks,
    "scatters": scatters,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_on_one_axis(family: str) -> None:
    assert_right(FAMILIES[family](), LINE, limit=12)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_two_axes(family: str) -> None:
    assert_right(FAMILIES[family](), GRID, limit=6)
