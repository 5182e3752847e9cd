"""Several axes on one dim, in any order: kept, shown, moved, differentiated."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardingError,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from dtensor.placement import Placements, normal, show
from dtensor.tensor import local_of

F64 = torch.float64
R = Replicate()
SWAPPED = (Shard(0, depth=1), Shard(0, depth=0))


def values(*shape: int) -> torch.Tensor:
    """The same numbers on every rank."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=F64).view(shape)


def test_the_second_axis_may_cut_first() -> None:
    def program() -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        full = values(8)
        x = distribute_tensor(full, mesh, SWAPPED)
        by_name = distribute_tensor(
            full, mesh, [Shard(0), Shard(0)], shard_order={0: ("tp", "dp")}
        )
        assert by_name._spec is x._spec
        assert x.placements == SWAPPED
        assert "(S(0)[1], S(0)[0])" in repr(x)
        assert torch.equal(x.full_tensor(), full)
        back = DTensor.from_local(local_of(x).clone(), mesh, SWAPPED)
        assert back._spec is x._spec
        again = DTensor.from_local(
            local_of(x).clone(),
            mesh,
            [Shard(0), Shard(0)],
            shard_order={0: ("tp", "dp")},
        )
        assert again._spec is x._spec
        usual = x.redistribute([Shard(0), Shard(0)])
        assert usual.placements == (Shard(0), Shard(0))
        assert torch.equal(usual.full_tensor(), full)
        other = usual.redistribute([Shard(0), Shard(0)], shard_order={0: (1, 0)})
        assert other._spec is x._spec
        return local_of(x).tolist()

    # ranks (0,0) (0,1) (1,0) (1,1): tp cuts first
    assert simulate(program, 4) == [[1, 2], [5, 6], [3, 4], [7, 8]]


def test_a_depth_that_says_nothing_is_dropped() -> None:
    assert normal((Shard(0, depth=3), R)) == (Shard(0), R)
    assert normal((Shard(0, depth=0), Shard(0, depth=1))) == (Shard(0), Shard(0))
    assert show(normal((Shard(1, depth=9), Shard(1, depth=2)))) == "(S(1)[1], S(1)[0])"
    assert repr(Shard(0)) == "Shard(dim=0)"
    assert repr(Shard(0, depth=1)) == "Shard(dim=0, depth=1)"
    with pytest.raises(TypeError, match="the depth must be an int"):
        Shard(0, depth="1")  # type: ignore[arg-type]


def layouts() -> list[Placements]:
    """All layouts of a matrix on two axes, in both nesting orders."""
    kinds: list[Placement] = [R, Shard(0), Shard(1), Partial()]
    found = [tuple(p) for p in itertools.product(kinds, repeat=2)]
    found += [(Shard(d, depth=1), Shard(d, depth=0)) for d in (0, 1)]
    return found


SWEEP = bool(os.environ.get("DTENSOR_SWEEP"))  # make sweep-placements


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "every"),
    [((2, 2), (8, 4), 13), ((2, 3), (7, 5), 29), ((2, 2), (1, 3), 31)],
)
def test_every_pair_with_orders(
    mesh_shape: tuple[int, int], shape: tuple[int, int], every: int
) -> None:
    """Values and gradients of all pairs, even, uneven and empty shards."""

    def program() -> None:
        mesh = init_device_mesh("cpu", mesh_shape)
        full = values(*shape)
        weight = values(*shape).sqrt()
        pairs = list(itertools.product(layouts(), repeat=2))
        for src, dst in pairs if SWEEP else pairs[::every]:
            what = f"{show(src)} -> {show(dst)}"
            x = distribute_tensor(full, mesh, src).requires_grad_()
            y = x.redistribute(dst)
            assert y.placements == dst, what
            assert local_of(y).shape == y._spec.local_shape, what
            assert torch.equal(y.full_tensor(), full), what
            w = distribute_tensor(weight, mesh, dst)
            (g,) = torch.autograd.grad((y.pow(3) * w).sum(), x, create_graph=True)
            want = 3 * full.pow(2) * weight
            torch.testing.assert_close(g.full_tensor(), want, msg=what)
            (gg,) = torch.autograd.grad(g.sum(), x)
            torch.testing.assert_close(gg.full_tensor(), 6 * full * weight, msg=what)

    simulate(program, mesh_shape[0] * mesh_shape[1], timeout=200)


def test_three_axes_in_all_orders() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2))
        full = values(9, 2)
        orders = list(itertools.permutations(range(3)))
        for a, b in list(itertools.product(orders, repeat=2))[:: 1 if SWEEP else 5]:
            src = tuple(Shard(0, depth=d) for d in a)
            dst = tuple(Shard(0, depth=d) for d in b)
            x = distribute_tensor(full, mesh, src)
            y = x.redistribute(dst)
            assert y.placements == normal(dst)
            assert torch.equal(y.full_tensor(), full), (src, dst)

    simulate(program, 8, timeout=200)


def test_ops_keep_the_order() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        full, weight = values(8, 6), values(6, 4)
        x = distribute_tensor(full, mesh, SWAPPED)
        w = distribute_tensor(weight, mesh, [R, R])
        usual = distribute_tensor(full, mesh, [Shard(0), Shard(0)])
        for call in (
            lambda x, w, u: x * 2 + 1,
            lambda x, w, u: x.relu(),
            lambda x, w, u: x @ w,
            lambda x, w, u: x.sum(1),
            lambda x, w, u: x.softmax(-1),
            lambda x, w, u: x.reshape(8, 2, 3),
            lambda x, w, u: x.clone().mul_(u),
        ):
            got, want = call(x, w, usual), call(full, weight, full)
            assert got.placements == SWAPPED
            torch.testing.assert_close(got.full_tensor(), want)
        turned = x.t()
        assert turned.placements == (Shard(1, depth=1), Shard(1, depth=0))
        assert torch.equal(turned.full_tensor(), full.t())
        torch.testing.assert_close((x + usual).full_tensor(), full + full)
        torch.testing.assert_close((usual * x).full_tensor(), full * full)
        total = x.sum(0)
        torch.testing.assert_close(total.full_tensor(), full.sum(0))

    simulate(program, 4)


def test_an_order_that_does_not_fit() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        full = values(8)
        for order in ({0: ("dp",)}, {0: ("dp", "dp")}, {1: ("dp", "tp")}):
            with pytest.raises(ShardingError, match="shard_order does not fit"):
                distribute_tensor(full, mesh, [Shard(0), Shard(0)], shard_order=order)

    simulate(program, 4)
