"""Writes into views: every one reaches the base or is refused, reads see all writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from guard_helpers import gen, lay, line, ranks, refused, same
from op_harness import GRID, LINE, Case, T, assert_right, eighths

from dtensor import (
    Partial,
    Replicate,
    Shard,
    count_collectives,
    distribute_tensor,
    init_device_mesh,
    redistribution,
)

RANDOM: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda v: v.normal_(),
    "uniform_": lambda v: v.detach().uniform_(),
    "init": lambda v: torch.nn.init.normal_(v),
    "dropout_": lambda v: torch.dropout_(v, 0.5, True),
    "F.dropout": lambda v: F.dropout(v, 0.5, True, inplace=True),
}


@pytest.mark.parametrize("name", RANDOM)
@ranks(2)
def test_random_writes_into_a_moved_view_reach_the_base(name: str) -> None:
    """They filled the moved copy; the base kept its values, without an error."""
    with redistribution("allow"):
        base = lay(gen(4, 4), Shard(0))
        RANDOM[name](base[1])
        full = base.full_tensor()
        assert not torch.equal(full[1], gen(4, 4)[1])
        assert torch.equal(full[[0, 2, 3]], gen(4, 4)[[0, 2, 3]])
        RANDOM[name](base[:, 1])  # a view of the shard: reaches the base
        assert not torch.equal(base.full_tensor()[:, 1], full[:, 1])


def two(y: T) -> None:
    """Views that overlap."""
    a, b = y[:4], y[2:]
    a.mul_(2)
    b.mul_(3)
    a.mul_(5)


def chain(y: T) -> None:
    """A view of a view."""
    v = y[1:6]
    u = v[1:3]
    u.mul_(2)
    v.mul_(3)
    u.mul_(5)


def augmented(y: T) -> None:
    y[1:3] += 1
    y[4] *= 2
    y[:, 1:3] -= y[:, 2:4] * 1


def in_row(y: T) -> None:
    for row in y:
        row.mul_(row.detach())


def chunks(y: T) -> None:
    a, b = y.chunk(2)
    a.mul_(2)
    b.mul_(a[:3])


WRITES: dict[str, Callable[[Any], Any]] = {
    "slice zero": lambda y: y[:2].zero_(),
    "slice mul": lambda y: y[1:5].mul_(2),
    "stepped": lambda y: y[1::2].mul_(2),
    "number": lambda y: y.select(0, 1).fill_(3),
    "column": lambda y: y.select(1, 1).fill_(3),
    "element": lambda y: y[3, 2].mul_(3),
    "view of a row": lambda y: y[3].view(-1).mul_(3),
    "diagonal": lambda y: y.diagonal().zero_(),
    "flat": lambda y: y.view(-1).add_(1),
    "transposed": lambda y: y.t()[1:3].mul_(2),
    "narrow": lambda y: y.narrow(0, 2, 3).mul_(y.narrow(0, 1, 3) * 1),
    "corner": lambda y: y[1:4, 1:3].zero_(),
    "copy_": lambda y: y[1:4].copy_(y[2:5] * 1),
    "setitem of a view": lambda y: y[1:6].__setitem__(slice(0, 2), 7.0),
    "two": two,
    "chain": chain,
    "augmented": augmented,
}
# Torch refuses these where gradients are recorded.
UNRECORDED: dict[str, Callable[[Any], Any]] = {
    "chunks": chunks,
    "rows": in_row,
    "split": lambda y: y.split(3)[1].zero_(),
    "unbind": lambda y: y.unbind(1)[2].mul_(2),
    "detached": lambda y: y[1:4].detach().mul_(3),
    "foreach": lambda y: torch._foreach_mul_([y[1:3], y[4:6]], 2.0),
    "out": lambda y: torch.mul(y[2:5] * 1, 2, out=y[1:4]),
}


def written(write: Callable[[Any], Any]) -> Callable[[T], T]:
    def program(x: T) -> T:
        y = x * 1
        write(y)
        return y

    return program


def unrecorded(write: Callable[[Any], Any]) -> Callable[[T], T]:
    @torch.no_grad()
    def program(x: T) -> T:
        return written(write)(x)

    return program


def stale(x: T) -> Any:
    """A view that is read after its base was written."""
    y = x * 1
    v, u = y[1:4], y[4]
    y.mul_(2)
    y[2:6] *= x[2:6]
    return v + 1, v.sum(), u, y


def read_and_written(x: T) -> Any:
    y = x * 1
    v = y[1:4]
    v.mul_(x[2:5])
    return y, v, (v * v).sum()


def cases() -> list[Case]:
    x = eighths(7, 5)
    found = [Case(n, written(f), [x], may_refuse=True) for n, f in WRITES.items()]
    found += [
        Case(n, unrecorded(f), [x], grad=False, may_refuse=True)
        for n, f in UNRECORDED.items()
    ]
    found += [
        Case("stale", stale, [x]),
        Case("read and written", read_and_written, [x], may_refuse=True),
        Case("value", lambda x, v: _copied(x, v), [x, eighths(3, 5)], may_refuse=True),
    ]
    return found


def _copied(x: T, v: T) -> T:
    y = x * 1
    y[1:4].copy_(v)
    y[5].mul_(v[0])
    return y


@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["line", "grid"])
def test_writes_through_views(mesh: Any) -> None:
    """All placements; addends may refuse what is not linear."""
    assert_right(cases(), mesh, limit=20)


@pytest.mark.parametrize("place", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("name", [*WRITES, *UNRECORDED])
@ranks(3)
def test_no_write_into_shards_is_refused(name: str, place: Any) -> None:
    """Whatever is no addend is written."""
    write = {**WRITES, **UNRECORDED}[name]
    with redistribution("allow"), torch.no_grad():
        x, want = lay(gen(7, 5), place, mesh=line(3)), gen(7, 5)
        write(x)
        write(want)
        same(x, want, name)


@ranks(4)
def test_numbers_and_slices_are_written_where_they_are() -> None:
    """No communication for numbers and replicated values; shards go where they belong."""
    mesh = line(4)
    x = lay(gen(16, 8), Shard(0), mesh=mesh)
    row = lay(gen(8), Replicate(), mesh=mesh)
    rows = lay(gen(5, 8), Replicate(), mesh=mesh)
    picks = torch.tensor([1, 15, 6, 7, 2])
    with count_collectives() as c, redistribution("error"):
        x[3:9] = 7.0
        x[4] = row
        x[10:15] = rows
        x[picks] = rows
        x[:, 2:4] = 1.0
        x[x > 2] = 0.0
    assert c.calls() == 0
    with count_collectives() as c:
        x[0:4] = x[12:16]  # (4, 8) in one block, cut into rows: three of them move
    assert c.calls("all_to_all") == c.calls() == 2


@ranks(2)
def test_a_number_is_written_into_addends_once() -> None:
    x = lay(gen(4, 4), Replicate()).redistribute(Partial())
    x[1] = 2.0
    x[2:] = lay(gen(4), Replicate())
    want = gen(4, 4)
    want[1], want[2:] = 2.0, gen(4)
    assert x.placements == (Partial(),)
    same(x, want)


@ranks(2)
def test_a_leaf_is_not_written_through_a_view() -> None:
    """As in torch, which says the same of a view of a leaf."""
    x = lay(gen(4, 4), Shard(0)).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        x[1].zero_()
    with torch.no_grad():
        x[1].zero_()
    assert not x.full_tensor()[1].any()


@ranks(2)
def test_data_of_a_moved_view_is_refused() -> None:
    """It counts no versions: nothing would tell that it was written."""
    x = lay(gen(4, 4), Shard(0))
    refused("cannot reach the base", lambda: x[1].data.zero_())


@ranks(4)
def test_nested_axes_and_empty_shards_write_back() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for n in (1, 2, 3, 5, 9):
        x = distribute_tensor(gen(n, 2), mesh, [Shard(0), Shard(0)])
        want = gen(n, 2)
        for t in (x, want):
            v = t[n // 2 :]
            t.mul_(2)
            v.add_(1)
            t[0].mul_(3)
        same(x, want)


@ranks(3)
def test_results_of_a_split_are_written_by_themselves() -> None:
    """Some ranks join a result of two parts, others have it in one buffer with another."""
    x, want = lay(gen(10, 2), Shard(0), mesh=line(3)), gen(10, 2)
    for t in (x, want):
        a, b = t.chunk(2)
        b.mul_(a)
        a.add_(b)
    same(x, want)
