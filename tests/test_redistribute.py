"""Redistribution: every pair of placements keeps the value; adjoints; plans."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardingError,
    count_collectives,
    distribute_tensor,
    get_rank,
    init_device_mesh,
    simulate,
)
from dtensor.redistribute import plan_steps
from dtensor.tensor import local_of

F64 = torch.float64


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same random tensor on every rank."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=F64)


def addends(
    full: torch.Tensor, mesh: DeviceMesh, places: tuple[Placement, ...]
) -> DTensor:
    """A DTensor of value ``full`` whose addends differ from rank to rank."""
    x = distribute_tensor(full, mesh, places)
    coordinate = mesh.coordinate
    assert coordinate is not None
    local = local_of(x).clone()
    for axis, p in enumerate(places):
        if isinstance(p, Partial):
            n, at = mesh.shape[axis], coordinate[axis]
            # Noise that cancels over the axis and is alike on the other axes.
            noise = values(*local.shape, seed=7 + axis)
            local += noise * (n - 1 if at == 0 else -1)
    return DTensor.from_local(local, mesh, places, shape=full.shape)


def choices(ndim: int) -> list[Placement]:
    """All placements of one axis for a tensor of ``ndim`` dims."""
    shards: list[Placement] = [Shard(d) for d in range(ndim)]
    return [*shards, Replicate(), Partial(), Partial("avg")]


def every_pair(mesh_shape: tuple[int, ...], shapes: list[tuple[int, ...]]) -> int:
    """Check all pairs on one simulated mesh; returns how many."""
    mesh = init_device_mesh("cpu", mesh_shape)
    count = 0
    for shape in shapes:
        full = values(*shape)
        states = list(itertools.product(choices(len(shape)), repeat=len(mesh_shape)))
        for src in states:
            x = addends(full, mesh, src)
            before = local_of(x).clone()
            for dst in states:
                y = x.redistribute(dst)
                what = f"{shape} {src} -> {dst} on {mesh_shape}"
                assert y.placements == dst, what
                assert local_of(y).shape == y._spec.local_shape, what
                torch.testing.assert_close(y.full_tensor(), full, msg=what)
                assert torch.equal(local_of(x), before), f"{what}: the input changed"
                count += 1
    return count


@pytest.mark.parametrize(
    ("mesh_shape", "shapes"),
    [
        ((1,), [(3, 2), ()]),
        ((2,), [(4, 6), (5, 3), (1, 2), (0, 3), ()]),
        ((3,), [(7, 4), (2, 5)]),
        ((4,), [(8, 4), (5, 3), (2, 1)]),
        ((2, 2), [(5, 3), ()]),
        ((2, 3), [(7, 1)]),
    ],
)
def test_every_pair_keeps_the_value(
    mesh_shape: tuple[int, ...], shapes: list[tuple[int, ...]]
) -> None:
    ranks = 1
    for n in mesh_shape:
        ranks *= n
    counts = simulate(every_pair, ranks, args=(mesh_shape, shapes), timeout=100)
    states = [(len(s) + 3) ** len(mesh_shape) for s in shapes]
    assert set(counts) == {sum(n * n for n in states)}


def test_three_axes_sampled() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2))
        full = values(6, 5)
        states = list(itertools.product(choices(2), repeat=3))
        g = torch.Generator().manual_seed(3)
        for _ in range(60):
            i, j = torch.randint(len(states), (2,), generator=g).tolist()
            y = addends(full, mesh, states[i]).redistribute(states[j])
            torch.testing.assert_close(y.full_tensor(), full, msg=f"{i} {j}")

    simulate(program, 8, timeout=100)


def inner_products(ranks: int, shape: tuple[int, ...]) -> None:
    """<A x, y> = <x, A* y> for the local map of every pair, summed over the ranks.

    The shards of a Replicate are alike on the ranks, and so are the cotangents of a
    Partial; everything else differs from rank to rank.
    """
    mesh = init_device_mesh("cpu", (ranks,))
    for src, dst in itertools.product(choices(len(shape)), choices(len(shape))):
        what = f"{src} -> {dst}"
        model = distribute_tensor(torch.zeros(shape, dtype=F64), mesh, src)
        own = 1 if src.is_replicate() else 1 + get_rank()
        leaf = (values(*local_of(model).shape, seed=11) * own).requires_grad_()
        x = DTensor.from_local(
            leaf,
            mesh,
            src,
            shape=shape,
            grad_placements=Partial() if src.is_replicate() else src,
        )
        y = local_of(x.redistribute(dst))
        own = 1 if dst.is_partial() else 1 + get_rank()
        cotangent = values(*y.shape, seed=13) * own
        (back,) = torch.autograd.grad(y, leaf, cotangent)
        left, right = (
            DTensor.from_local(z.sum(), mesh, Partial()).full_tensor()
            for z in (y.detach() * cotangent, leaf.detach() * back)
        )
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12, msg=what)


@pytest.mark.parametrize(("ranks", "shape"), [(2, (3, 2)), (3, (4, 2))])
def test_adjoints_by_inner_product(ranks: int, shape: tuple[int, ...]) -> None:
    simulate(inner_products, ranks, args=(ranks, shape))


def second_derivatives() -> None:
    """Double backward through every pair equals plain torch."""
    mesh = init_device_mesh("cpu", (2,))
    full = values(3, 2)
    plain = full.clone().requires_grad_()
    (first,) = torch.autograd.grad(plain.pow(3).sum(), plain, create_graph=True)
    (want,) = torch.autograd.grad(first.pow(2).sum(), plain)
    for src, dst in itertools.product(choices(2), choices(2)):
        x = addends(full, mesh, (src,)).requires_grad_()
        y = x.redistribute(dst)
        (g,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        assert isinstance(g, DTensor) and g.placements == x.placements
        torch.testing.assert_close(g.full_tensor(), first.detach(), msg=f"{src}->{dst}")
        (gg,) = torch.autograd.grad(g.pow(2).sum(), x)
        torch.testing.assert_close(gg.full_tensor(), want, msg=f"{src} -> {dst}")


def test_double_backward() -> None:
    simulate(second_derivatives, 2)


def test_dtypes_and_strided_shards() -> None:
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for dtype in dtypes:
            full = torch.arange(20).reshape(4, 5).remainder(2).to(dtype)
            for src, dst in itertools.product(choices(2), choices(2)):
                integral = not dtype.is_floating_point
                if integral and Partial("avg") in (src, dst):
                    continue
                if dtype is torch.bool and Partial() in (src, dst):
                    continue
                y = distribute_tensor(full, mesh, [src]).redistribute([dst])
                assert torch.equal(y.full_tensor(), full), (dtype, src, dst)
        strided = values(5, 4).t()  # (4, 5), column-major
        x = DTensor.from_local(strided, mesh, [Shard(0)])
        whole = torch.cat([strided, strided])
        for dst in (Shard(1), Replicate(), Partial()):
            assert torch.equal(x.redistribute([dst]).full_tensor(), whole)

    simulate(program, 2)


def test_one_step_where_one_step_will_do() -> None:
    def program() -> list[dict[Any, Any]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        out = []
        for src, dst in [
            ((Shard(0), Shard(0)), (Shard(0), Replicate())),
            ((Partial(), Shard(1)), (Shard(0), Shard(1))),
            ((Replicate(), Shard(1)), (Replicate(), Shard(0))),
            ((Replicate(), Replicate()), (Shard(1), Partial())),
        ]:
            x = distribute_tensor(values(8, 8), mesh, src)
            with count_collectives() as c:
                x.redistribute(dst)
            out.append(c.rows())
        return out

    tp_gather, dp_scatter, tp_exchange, nothing = simulate(program, 4)[0]
    assert [*tp_gather] == [("all_gather", "tp")]
    assert [*dp_scatter] == [("reduce_scatter", "dp")]
    assert [*tp_exchange] == [("all_to_all", "tp")]
    assert nothing == {}


def test_the_outer_axis_of_a_twice_cut_dim_is_given_up_after_a_swap() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    both = (Shard(0), Shard(0))
    steps = plan_steps(mesh, both, (Replicate(), Shard(0)), (8, 8))
    assert [s.axes for s in steps] == [(0, 1), (0,)]
    assert [s.verb for s in steps] == ["all_to_all", "all_gather"]
    for step in steps:
        assert step.seconds > 0


def test_redistribute_accepts_one_placement_a_list_and_a_mesh() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(values(4, 4), mesh, [Shard(0)])
        for y in (
            x.redistribute(Shard(1)),
            x.redistribute([Shard(-1)]),
            x.redistribute(mesh, [Shard(1)]),
            x.redistribute(placements=[Shard(1)]),
            x.redistribute(device_mesh=mesh, placements=Shard(1)),
        ):
            assert y.placements == (Shard(1),)
        grid = init_device_mesh("cpu", (1, 2))
        z = distribute_tensor(values(4), grid, [Shard(0), Partial()])
        assert z.redistribute(Replicate()).placements == (Replicate(), Replicate())

    simulate(program, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, m: x.redistribute([Shard(0), Shard(1)]), "one placement per mesh"),
        (lambda x, m: x.redistribute(Shard(2)), "shards a dim that is not there"),
        (lambda x, m: x.redistribute(Shard(-3)), "shards a dim that is not there"),
        (lambda x, m: x.redistribute(), "no placements given"),
        (lambda x, m: x.redistribute(m), "no placements given"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_moves(call: Any, words: str) -> None:
    def program() -> int:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(values(4, 4), mesh, [Shard(0)])
        with count_collectives() as c:
            with pytest.raises(ShardingError, match=words):
                call(x, mesh)
        return c.calls()

    assert simulate(program, 2) == [0, 0]


def test_partial_of_an_unknown_reduction() -> None:
    with pytest.raises(ShardingError, match=r"expected one of sum, avg"):
        Partial("median")
    with pytest.raises(TypeError, match="the dim must be an int"):
        Shard("0")  # type: ignore[arg-type]
