"""Reshapes of nested shards: kept where they can be, given up no more than must be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtensor import (
    BlockCyclic,
    DTensor,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    count_collectives,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from dtensor.costs import CostTable, set_costs
from dtensor.placement import Placements, normal, show
from dtensor.rules.reshapes import carried, groups_of
from dtensor.spec import block_of
from dtensor.tensor import local_of

F64 = torch.float64
R = Replicate()
S0, S1, S2 = Shard(0), Shard(1), Shard(2)
SWAPPED = (Shard(0, depth=1), Shard(0, depth=0))


# ---- which cuts go with a reshape: against trying every layout ------------------------
def every_cut(dims: int, axes: int) -> list[Placements]:
    """All layouts of shards and copies, in every nesting order."""
    found: dict[Placements, None] = {}
    kinds: list[Placement] = [R, *(Shard(d) for d in range(dims))]
    for places in itertools.product(kinds, repeat=axes):
        for depths in itertools.permutations(range(axes)):
            found[
                normal(
                    tuple(
                        Shard(p.dim, d) if isinstance(p, Shard) else p
                        for p, d in zip(places, depths, strict=True)
                    )
                )
            ] = None
    return list(found)


def shards(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], places: Placements
) -> tuple[Any, ...]:
    """The row-major indices that each coordinate holds."""
    full = torch.arange(math.prod(shape)).view(shape)
    found = []
    for at in itertools.product(*(range(n) for n in mesh_shape)):
        part = full
        for d, n in enumerate(shape):
            part = part.narrow(d, *block_of(n, d, places, mesh_shape, at))
        found.append(tuple(part.flatten().tolist()))
    return tuple(found)


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2), (2, 3), (2, 1), (2, 2, 2)])
def test_a_cut_is_kept_exactly_where_some_layout_has_the_same_shards(
    mesh_shape: tuple[int, ...],
) -> None:
    """Where ranks are idle, what one axis cuts off may be found nowhere: gathered."""
    lots = [(12,), (2, 6), (6, 2), (3, 4), (2, 2, 3), (4, 1, 3), (1, 12), (12, 1)]
    odd = [(5, 2), (10,), (2, 5), (1, 5, 2), (5, 1, 2)]
    few = [(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8)]
    empty = [(0, 3), (3, 0), (0,)]
    families = [few] if len(mesh_shape) == 3 else [lots, odd, few, empty]
    kept = lost = 0
    for family in families:
        for before, after in itertools.permutations(family, 2):
            goals: dict[Any, None] = {}
            for places in every_cut(len(after), len(mesh_shape)):
                goals[shards(after, mesh_shape, places)] = None
            for places in every_cut(len(before), len(mesh_shape)):
                what = f"{before} {show(places)} -> {after} on {mesh_shape}"
                there = carried(before, after, mesh_shape, places)
                held = shards(before, mesh_shape, places)
                idle = any(not part for part in held)
                assert idle or (there is not None) == (held in goals), what
                if there is not None:
                    assert shards(after, mesh_shape, there) == held, what
                    kept += 1
                else:
                    lost += 1
    assert kept and lost


def test_groups_of_dims() -> None:
    assert groups_of((4, 1, 3), (12,)) == [(range(0, 3), range(0, 1))]
    assert groups_of((8, 1, 6), (8, 6)) == [
        (range(0, 1), range(0, 1)),
        (range(1, 3), range(1, 2)),
    ]
    assert groups_of((), (1, 1)) == [(range(0, 0), range(0, 2))]
    assert groups_of((2, 0, 3), (0, 6))[-1] == (range(0, 3), range(0, 2))


# ---- on ranks: values, two derivatives, and what is sent ------------------------------
Program = Callable[[Any], Any]
GRID = (2, 2)
CUBE = (2, 2, 2)
FREE: list[
    tuple[str, tuple[int, ...], tuple[int, ...], Placements, Program, Placements]
] = [
    ("flatten", GRID, (2, 6), (S0, S1), lambda x: x.flatten(), (S0, S0)),
    ("flatten, swapped", GRID, (2, 6), (S1, S0), lambda x: x.flatten(), SWAPPED),
    ("view -1", GRID, (2, 6), (S0, S1), lambda x: x.view(-1), (S0, S0)),
    ("reshape", GRID, (2, 6), (S0, S1), lambda x: x.reshape(4, 3), (S0, S0)),
    ("reshape -1", GRID, (2, 6), (S1, S0), lambda x: x.reshape(-1, 3), SWAPPED),
    ("ravel", GRID, (2, 6), (S0, S1), lambda x: x.ravel(), (S0, S0)),
    ("unflatten", GRID, (8, 3), (S0, S0), lambda x: x.unflatten(0, (2, 4)), (S0, S1)),
    (
        "unflatten swapped",
        GRID,
        (8, 3),
        SWAPPED,
        lambda x: x.unflatten(0, (2, -1)),
        (S1, S0),
    ),
    ("split in one", GRID, (8, 3), SWAPPED, lambda x: x.view(4, 2, 3), SWAPPED),
    ("inner dims", GRID, (3, 2, 4), (S1, S2), lambda x: x.flatten(1), (S1, S1)),
    (
        "outer cut, inner merge",
        GRID,
        (2, 2, 4),
        (S0, S1),
        lambda x: x.flatten(1),
        (S0, S1),
    ),
    ("ones", GRID, (2, 1, 6), (S0, S2), lambda x: x.reshape(1, 12, 1), (S1, S1)),
    ("to ones", GRID, (8,), (S0, S0), lambda x: x.view(1, 2, 1, 4), (S1, Shard(3))),
    ("outer pieces", GRID, (4, 5), (S0, S0), lambda x: x.view(20), (S0, S0)),
    (
        "after transpose",
        GRID,
        (6, 2),
        (S1, S0),
        lambda x: x.t().reshape(12),
        (S0, S0),
    ),
    (
        "heads",
        GRID,
        (2, 3, 8),
        (S0, S2),
        lambda x: x.view(2, 3, 4, 2).transpose(1, 2),
        (S0, S1),
    ),
    (
        "three",
        CUBE,
        (2, 2, 4),
        (S0, S1, S2),
        lambda x: x.flatten(),
        (S0, S0, S0),
    ),
    (
        "three, turned",
        CUBE,
        (2, 2, 4),
        (S2, S0, S1),
        lambda x: x.reshape(-1),
        (Shard(0, depth=2), Shard(0, depth=0), Shard(0, depth=1)),
    ),
    (
        "three apart",
        CUBE,
        (8, 3),
        (Shard(0, depth=2), Shard(0, depth=0), Shard(0, depth=1)),
        lambda x: x.reshape(2, 2, 2, 3),
        (S2, S0, S1),
    ),
    ("two of three", CUBE, (4, 4), (S0, R, S0), lambda x: x.view(2, 8), (S0, R, S1)),
    (
        "addends stay",
        CUBE,
        (2, 4),
        (S0, Partial(), S1),
        torch.ravel,
        (S0, Partial(), S0),
    ),
]


def check(
    mesh_shape: tuple[int, ...],
    shape: tuple[int, ...],
    places: Placements,
    call: Program,
    grad: bool = True,
) -> tuple[Placements, int]:
    """Value and two derivatives against plain torch; placements and collectives."""
    mesh = init_device_mesh("cpu", mesh_shape)
    full = torch.arange(1.0, 1 + math.prod(shape), dtype=F64).view(shape) / 8
    x = distribute_tensor(full, mesh, places).requires_grad_()
    before = local_of(x).detach().clone()
    plain = full.clone().requires_grad_()
    with count_collectives() as c:
        y = call(x)
    want = call(plain)
    assert y.shape == want.shape
    assert local_of(y).shape == y._spec.local_shape
    assert torch.equal(y.full_tensor().detach(), want.detach())
    weight = torch.arange(1.0, 1 + want.numel(), dtype=F64).view(want.shape)
    w = DTensor.from_local(weight, mesh, [R] * mesh.ndim, run_check=False)
    (g,) = torch.autograd.grad((y.pow(3) * w).sum(), x, create_graph=True)
    (p,) = torch.autograd.grad((want.pow(3) * weight).sum(), plain, create_graph=True)
    torch.testing.assert_close(g.full_tensor().detach(), p.detach())
    (gg,) = torch.autograd.grad(g.pow(2).sum(), x)
    (pp,) = torch.autograd.grad(p.pow(2).sum(), plain)
    torch.testing.assert_close(gg.full_tensor(), pp)
    assert torch.equal(local_of(x), before)
    return y.placements, c.calls()


@pytest.mark.parametrize("case", FREE, ids=lambda c: c[0])
def test_kept_without_communication(case: Any) -> None:
    _, mesh_shape, shape, places, call, there = case
    found = simulate(
        check, math.prod(mesh_shape), args=(mesh_shape, shape, places, call)
    )
    assert set(found) == {(normal(there), 0)}


@pytest.mark.parametrize(
    ("shape", "places", "call", "there", "calls"),
    [
        # the inner dim is cut behind what the outer one has left
        ((8, 6), (S0, S1), lambda x: x.flatten(), (S0, R), 1),
        ((8, 6), (S1, S0), lambda x: x.flatten(), (R, S0), 1),
        # uneven pieces of the outer dim go with it only where the inner one is whole
        ((3, 4), (S0, S1), lambda x: x.flatten(), (R, R), 2),
        ((5, 4), (R, S0), lambda x: x.flatten(), (R, R), 1),
        ((5, 4, 2), (S0, S1), lambda x: x.flatten(1), (S0, S1), 0),
        ((4, 3, 2), (S0, S1), lambda x: x.flatten(1), (S0, R), 1),
        ((6, 4), (S0, S0), lambda x: x.unflatten(0, (2, 3)), (S0, S1), 0),
        ((6, 4), (S0, S0), lambda x: x.unflatten(0, (3, 2)), (R, R), 1),
        ((1, 4), (S0, S1), lambda x: x.view(4), (R, S0), 1),
    ],
)
def test_no_more_is_gathered_than_must_be(
    shape: tuple[int, ...],
    places: Placements,
    call: Program,
    there: Placements,
    calls: int,
) -> None:
    found = simulate(check, 4, args=((2, 2), shape, places, call))
    assert set(found) == {(normal(there), calls)}


def test_of_two_cuts_the_one_that_is_cheaper_to_gather_goes() -> None:
    """(12,) by S(0) twice as (6, 2): either axis alone could stay, but not both."""

    def program() -> list[Placements]:
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(torch.arange(12.0), mesh, (S0, S0))
        found = []
        for slow in ((1e-3, 1e-6), (1e-6, 1e-3)):
            set_costs(mesh, CostTable(slow, (1e-9, 1e-9)))
            y = x.view(6, 2)
            assert torch.equal(y.full_tensor(), torch.arange(12.0).view(6, 2))
            found.append(y.placements)
        set_costs(mesh, None)
        return found

    assert all(found == [(S0, R), (S0, R)] for found in simulate(program, 4))


def test_the_other_operand_only_lends_its_shape() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        full = torch.arange(12.0).view(2, 6)
        x = distribute_tensor(full, mesh, (S0, S1))
        like = distribute_tensor(torch.ones(12), mesh, (S0, Partial()))
        row = distribute_tensor(torch.ones(1, 6), mesh, (R, S1))
        tall = distribute_tensor(torch.ones(4, 6), mesh, (S0, S1))
        with count_collectives() as c:
            a, b = x.view_as(like), x.reshape_as(like)
            e = row.expand_as(tall)
        assert c.calls() == 0
        assert a.placements == b.placements == (S0, S0)
        assert e.placements == (R, S1)
        assert torch.equal(a.full_tensor(), full.flatten())
        assert torch.equal(e.full_tensor(), torch.ones(4, 6))

    simulate(program, 4)


def test_slices_of_whole_dims_keep_the_nesting() -> None:
    calls: list[Program] = [
        lambda x: x[:, 1:3],
        lambda x: x[:, 2],
        lambda x: x[..., None, 0],
        lambda x: x[:, [0, 3]],
        lambda x: x.narrow(1, 1, 2),
        lambda x: x.select(1, -1),
        lambda x: x.unbind(1)[2],
        lambda x: x.split(2, 1)[1],
        lambda x: x.chunk(2, 1)[0],
        lambda x: x.unsqueeze(1)[:, 0],
        lambda x: x.expand(2, 7, 4)[1],
    ]
    three = (Shard(0, depth=2), Shard(0, depth=0), Shard(0, depth=1))

    def program(mesh_shape: tuple[int, ...], places: Placements) -> None:
        for i, call in enumerate(calls):
            there, sent = check(mesh_shape, (7, 4), places, call)
            assert (there, sent) == (places, 0), i

    simulate(program, 4, args=(GRID, SWAPPED))
    simulate(program, 4, args=(GRID, (S0, S0)))
    simulate(program, 8, args=(CUBE, three))


def test_a_view_is_a_view() -> None:
    """A write through a kept reshape reaches the base."""

    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        full = torch.arange(12.0).view(2, 6)
        x = distribute_tensor(full, mesh, (S0, S1))
        x.view(-1).mul_(2.0)
        assert torch.equal(x.full_tensor(), full * 2)
        x.flatten().unflatten(0, (2, 6)).add_(1.0)
        assert torch.equal(x.full_tensor(), full * 2 + 1)

    simulate(program, 4)


def test_placements_of_ones_own_stay_where_their_dim_does() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        full = torch.arange(24.0, dtype=F64).view(8, 3)
        for p in (BlockCyclic(0, 1), RaggedShard(0, (3, 5))):
            x = distribute_tensor(full, mesh, [p])
            for call, there in [
                (lambda x: x.view(8, 3, 1), p),
                (lambda x: x.reshape(1, 8, 3), p.at_dim(1)),
                (lambda x: x.unflatten(1, (3, 1)), p),
                (lambda x: x.expand(2, 8, 3), p.at_dim(1)),
                (lambda x: x.flatten(), R),
                (lambda x: x.view(-1), R),
                (lambda x: x.view(2, 4, 3), R),
            ]:
                y = call(x)
                assert y.placements == (there,), (p, there)
                assert torch.equal(y.full_tensor(), call(full)), (p, there)

    simulate(program, 2)
