"""Cuts, flips, rolls and scatters along sharded dims: right, and no more moved than must.

Lengths are uneven, some shards are empty, and two axes may cut one dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from guard_helpers import gen, lay, line, ranks, refused, same
from op_harness import GRID, LINE, Case, T, assert_right, booleans, eighths, integers

from dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    count_collectives,
    distribute_tensor,
    init_device_mesh,
    redistribution,
)
from dtensor.tensor import local_of

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


# ---- what stays where it is, and what is sent ------------------------------------------
P, R, S = Partial(), Replicate(), Shard(0)
ROW = 8 * 8  # bytes of a row of x
# name: the call on x (16, 8) by S(0) over 4 ranks, placement of the results, collectives,
# and the bytes that all ranks together send.
COUNTED: dict[str, tuple[Callable[[Any], Any], Any, dict[str, int], int]] = {
    "all": (lambda x: x[0:16], S, {}, 0),
    "another dim": (lambda x: x[:, 3], S, {}, 0),
    "every other": (lambda x: x[::2], S, {}, 0),
    "middle": (lambda x: x[2:10], S, {"all_to_all": 1}, 4 * ROW),
    "but one": (lambda x: x[1:], S, {"all_to_all": 1}, 3 * ROW),
    "differences": (lambda x: x[1:] - x[:-1], S, {"all_to_all": 1}, 3 * ROW),
    "diff": (lambda x: x.diff(dim=0), S, {"all_to_all": 1}, 3 * ROW),
    "halves": (lambda x: x.chunk(2), S, {"all_to_all": 1}, 12 * ROW),
    "roll": (lambda x: x.roll(1, 0), S, {"all_to_all": 1}, 4 * ROW),
    "flip": (lambda x: x.flip(0), S, {"all_to_all": 1}, 16 * ROW),
    "rows": (lambda x: x.unbind(0), S, {"all_to_all": 1}, 12 * ROW),
    "row": (lambda x: x[5], R, {"broadcast": 1}, 3 * ROW),
    "element": (lambda x: x[5, 2], R, {"broadcast": 1}, 3 * 8),
    "list": (lambda x: x[[3, 9]], P, {}, 0),
    "index_select": (lambda x: x.index_select(0, t.tensor([3, 9])), P, {}, 0),
    "gather": (lambda x: x.gather(0, t.zeros(2, 8, dtype=t.int64)), P, {}, 0),
    "take": (lambda x: x.take(t.tensor([3, 90])), P, {}, 0),
    "index_fill": (lambda x: x.index_fill(0, t.tensor([1, 9]), 2.0), S, {}, 0),
    "scatter": (lambda x: x.scatter(0, t.ones(1, 8, dtype=t.int64), 2.0), S, {}, 0),
}


@pytest.mark.parametrize("name", COUNTED)
@ranks(4)
def test_only_what_changes_owner_is_sent(name: str) -> None:
    call, place, verbs, sent = COUNTED[name]
    x = lay(gen(16, 8), S, mesh=line(4))
    with count_collectives() as c:
        got = call(x)
    assert {verb: c.calls(verb) for verb, _ in c.rows()} == verbs
    bytes_sent = torch.tensor(c.bytes())
    total = DTensor.from_local(bytes_sent, line(4), [P], run_check=False).full_tensor()
    assert int(total) == sent, (int(total), sent)
    want = call(gen(16, 8))
    many = isinstance(want, tuple)
    for g, w in zip(got if many else [got], want if many else [want], strict=True):
        assert g.placements == (place,)
        same(g, w, name)
    if verbs:
        with redistribution("error"):
            refused("redistributes its operands", lambda: call(x))


@ranks(4)
def test_the_backward_moves_the_same_elements_back() -> None:
    x = lay(gen(16, 8), S, mesh=line(4)).requires_grad_()
    y = x[2:10]
    with count_collectives() as c:
        y.backward(lay(gen(8, 8), S, mesh=line(4)))
    assert c.calls() == c.calls("all_to_all") == 1
    assert x.grad is not None
    assert not x.grad.full_tensor()[:2].any()


@ranks(4)
def test_adds_of_alike_shards_are_addends() -> None:
    """Sources and indices cut alike: each rank adds up what it has, nothing moves."""
    base = lay(gen(5, 8), R, mesh=line(4))
    rows = lay(gen(16, 8), S, mesh=line(4))
    index = lay(t.arange(16) % 5, S, mesh=line(4))
    wide = lay((t.arange(128) % 5).view(16, 8), S, mesh=line(4))
    with count_collectives() as c, redistribution("error"):
        a = base.index_add(0, index, rows)
        b = base.scatter_add(0, wide, rows)
        d = base[index]  # each rank reads by its own indices
    assert c.calls() == 0
    assert a.placements == b.placements == (P,) and d.placements == (S,)
    same(a, gen(5, 8).index_add(0, t.arange(16) % 5, gen(16, 8)))
    same(b, gen(5, 8).scatter_add(0, (t.arange(128) % 5).view(16, 8), gen(16, 8)))
    same(d, gen(5, 8)[t.arange(16) % 5])


@ranks(4)
def test_a_dim_is_gathered_where_that_costs_less() -> None:
    """What is picked travels twice, in an all-reduce to come; a small table once."""
    x = lay(gen(4, 2), S, mesh=line(4))
    assert x[t.zeros(100, dtype=t.int64)].placements == (R,)
    assert lay(gen(400, 2), S, mesh=line(4))[[1, 2]].placements == (P,)
    assert lay(gen(400, 2) > 0, S, mesh=line(4))[[1, 2]].placements == (R,)


@ranks(4)
def test_no_rank_holds_more_than_its_share() -> None:
    """Shards of the results follow the law of ``torch.chunk``, of nested axes, too."""
    mesh = init_device_mesh("cpu", (2, 2))
    for n, m in ((9, 5), (5, 3), (3, 1), (4, 4), (1, 0)):
        x = distribute_tensor(gen(n, 2), mesh, [S, S])
        for y, want in (
            (x[n - m :], gen(n, 2)[n - m :]),
            (x[:m], gen(n, 2)[:m]),
            (x.flip(0)[:m], gen(n, 2).flip(0)[:m]),
            (x.roll(m, 0), gen(n, 2).roll(m, 0)),
        ):
            assert y.placements == (S, S)
            assert local_of(y).shape == y._spec.local_shape
            same(y, want, (n, m))


@ranks(2)
def test_an_index_out_of_range_is_an_error() -> None:
    x = lay(gen(6, 2), S)
    for bad in (t.tensor([6]), t.tensor([-7]), t.tensor([0, 99])):
        with pytest.raises(IndexError, match="out of range"):
            x[bad]
    with pytest.raises(IndexError, match="out of range"):
        x.index_select(0, t.tensor([-1]))
    with pytest.raises(IndexError):
        x[6]
    with pytest.raises(IndexError):
        x[t.tensor(6)]
    with pytest.raises(IndexError):
        x.select(0, -7)
    with pytest.raises(ValueError, match="step must be greater than zero"):
        x[::-1]


@ranks(3)
def test_questions_over_a_sharded_dim() -> None:
    x, want = lay(gen(7, 2), S, mesh=line(3)), gen(7, 2)
    assert len(x) == 7 and x.tolist() == want.tolist()
    for row, plain in zip(x, want, strict=True):
        same(row, plain)
    assert [row.sum().item() for row in x] == [row.sum().item() for row in want]
    assert torch.equal(x, lay(gen(7, 2), R, mesh=line(3)))
    assert not torch.equal(x, x * 2) and torch.allclose(x[1:], x[1:] + 1e-12)
    a, b = lay(gen(2, 7), Shard(1), mesh=line(3))
    same(a - b, gen(2, 7)[0] - gen(2, 7)[1])
