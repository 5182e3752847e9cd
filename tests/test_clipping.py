"""Clipping over parameters on several meshes, in any placements, plain ones beside."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from op_harness import place

import dtensor
from dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    ShardingError,
    count_collectives,
    init_device_mesh,
    no_grad_sync,
    simulate,
)

T = torch.Tensor
utils = torch.nn.utils
torch.set_num_threads(1)
R, P = Replicate(), Partial()
INF = float("inf")
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
CUBE = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
# (shape, axes of the mesh, placements): whole mesh, slices, odd shapes, empty shards
LAYOUTS: list[tuple[tuple[int, ...], tuple[str, ...], tuple[Any, ...]]] = [
    ((4, 4), ("dp", "tp"), (Shard(0), Shard(1))),
    ((5, 3), ("dp", "tp"), (Shard(0), Shard(0))),
    ((3,), ("dp", "tp"), (R, R)),
    ((6, 2), ("tp",), (Shard(0),)),
    ((1, 3), ("tp",), (Shard(0),)),
    ((2, 5), ("dp",), (Shard(1),)),
    ((4,), ("dp",), (R,)),
    ((3, 2), ("dp", "tp"), (P, Shard(1))),
    ((5,), ("dp", "tp"), (P, P)),
    ((2, 2), ("tp",), (P,)),
    ((2, 3), ("dp", "tp"), (Partial("avg"), R)),
    ((3, 3), (), ()),
    ((), ("dp", "tp"), (R, R)),
]


def normal(shape: tuple[int, ...], seed: int) -> T:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


def on(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    return mesh if axes == mesh.mesh_dim_names else mesh[axes]


def whole(places: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(R if p.is_partial() else p for p in places)


def parameters(kinds: Any = LAYOUTS, mesh: DeviceMesh = GRID) -> list[Any]:
    out: list[Any] = []
    for i, (shape, axes, places) in enumerate(kinds):
        p, g = normal(shape, i), normal(shape, 100 + i)
        if not axes:
            leaf = torch.nn.Parameter(p)
            leaf.grad = g
        else:
            leaf = torch.nn.Parameter(place(p, on(mesh, axes), whole(places)))
            leaf.grad = place(g, on(mesh, axes), places)
        out.append(leaf)
    return out


def serial(kinds: Any = LAYOUTS) -> list[Any]:
    return parameters([(shape, (), ()) for shape, _, _ in kinds])


def full(x: Any) -> T:
    return x.full_tensor() if isinstance(x, DTensor) else x


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(full(got), full(want), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, INF])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clips_by_the_norm_of_all(order: float, foreach: bool | None) -> None:
    reference = serial()
    want = utils.clip_grad_norm_(reference, 0.5, order, foreach=foreach)

    def program() -> None:
        for clip in (utils.clip_grad_norm_, dtensor.clip_grad_norm_):
            mine = parameters()
            placed = [getattr(p.grad, "placements", None) for p in mine]
            got = clip(mine, 0.5, order, foreach=foreach)
            assert isinstance(got, DTensor) and got.placements == (R, R)
            same(got, want)
            for p, w, before in zip(mine, reference, placed, strict=True):
                same(p.grad, w.grad)
                assert getattr(p.grad, "placements", None) == before

    simulate(program, ranks=4)


def test_every_choice_of_layouts() -> None:
    """Each element counts once, whatever else is in the list."""
    pairs = list(itertools.permutations(LAYOUTS, 2))
    wants = [utils.clip_grad_norm_(serial(k), 1.0) for k in pairs]

    def program() -> None:
        for kinds, want in zip(pairs, wants, strict=True):
            same(utils.clip_grad_norm_(parameters(kinds), 1.0), want)

    simulate(program, ranks=4)


def test_three_axes() -> None:
    kinds: Any = [
        ((4, 5), ("pp", "dp", "tp"), (Shard(0), Shard(1), Shard(0))),
        ((4, 5), ("dp", "tp"), (Shard(0), Shard(0))),
        ((3,), ("pp", "tp"), (R, Shard(0))),
        ((6,), ("pp", "dp", "tp"), (P, R, Shard(0))),
        ((6,), ("pp",), (Shard(0),)),
    ]
    reference = serial(kinds)
    want = utils.clip_grad_norm_(reference, 0.5)

    def program() -> None:
        mine = parameters(kinds, CUBE)
        with count_collectives() as c:
            got = utils.clip_grad_norm_(mine, 0.5)
        same(got, want)
        assert c.calls("all_reduce") == 3 and c.calls("reduce_scatter") == 1
        for p, w in zip(mine, reference, strict=True):
            same(p.grad, w.grad)

    simulate(program, ranks=8)


def test_one_all_reduce_per_axis() -> None:
    kinds = [k for k in LAYOUTS if not any(p.is_partial() for p in k[2])] * 5

    def program() -> dict[Any, Any]:
        mine = parameters(kinds)
        with count_collectives() as c:
            utils.clip_grad_norm_(mine, 0.5)
        return c.rows()

    for rows in simulate(program, ranks=4):
        # cut by both, by tp alone, by dp alone: two sums per axis
        assert rows == {("all_reduce", "dp"): (1, 16), ("all_reduce", "tp"): (1, 16)}


def test_addends_are_reduced_together() -> None:
    """Once per axis for all of them, and each rank keeps a part."""
    kinds: Any = [((4, 4), ("dp", "tp"), (P, R)), ((8,), ("dp", "tp"), (P, R))]

    def program() -> dict[Any, Any]:
        mine = parameters(kinds)
        with count_collectives() as c:
            utils.clip_grad_norm_(mine, 0.5)
        return c.rows()

    for rows in simulate(program, ranks=4):
        assert rows == {
            ("reduce_scatter", "dp"): (1, 24 * 8 // 2),
            ("all_reduce", "dp"): (1, 8),
        }


def test_in_two_halves() -> None:
    reference = serial()
    want = utils.get_total_norm([p.grad for p in reference])
    utils.clip_grads_with_norm_(reference, 0.5, want)

    def program() -> None:
        mine = parameters()
        norm = utils.get_total_norm(p.grad for p in mine)
        same(norm, want)
        utils.clip_grads_with_norm_(mine, 0.5, norm)
        for p, w in zip(mine, reference, strict=True):
            same(p.grad, w.grad)
        again = parameters()
        utils.clip_grads_with_norm_(again, 0.5, full(norm).clone())
        same(again[0].grad, reference[0].grad)
        one = parameters()[3]
        same(utils.clip_grad_norm_(one, 1e-3), serial()[3].grad.norm())

    simulate(program, ranks=4)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clips_by_value(foreach: bool | None) -> None:
    reference = serial()
    utils.clip_grad_value_(reference, 0.3, foreach=foreach)

    def program() -> None:
        mine = parameters()
        utils.clip_grad_value_(mine, 0.3, foreach=foreach)
        for p, w in zip(mine, reference, strict=True):
            same(p.grad, w.grad)
        utils.clip_grad_value_(mine[0], 0.1)
        assert mine[0].grad.full_tensor().abs().max() == 0.1

    simulate(program, ranks=4)


@pytest.mark.parametrize("bad", [INF, float("nan")])
@pytest.mark.parametrize("order", [2.0, INF])
def test_not_finite(bad: float, order: float) -> None:
    """One bad element on one rank is an error, or a bad norm, on all."""

    def program() -> str:
        mine = parameters()
        if GRID.coordinate == (1, 0):
            mine[0].grad.to_local()[0, 0] = bad
        norm = utils.get_total_norm([p.grad for p in mine], order)
        assert not norm.full_tensor().isfinite()  # type: ignore[attr-defined]
        before = mine[3].grad.full_tensor()
        with pytest.raises(RuntimeError) as error:
            utils.clip_grad_norm_(mine, 1.0, order, error_if_nonfinite=True)
        same(mine[3].grad, before)
        return str(error.value)

    texts = simulate(program, ranks=4)
    assert (
        texts
        == [
            f"get_total_norm: the norm of order {order} of the gradients is not finite, got "
            f"{bad}, expected a finite one to clip by. Look for the parameter at fault, or "
            "give error_if_nonfinite=False."
        ]
        * 4
    )


def test_halves_do_not_overflow() -> None:
    """A square of 300 is not in float16; each rank's part is summed in float32."""

    def program() -> None:
        p = torch.nn.Parameter(place(torch.zeros(8).half(), GRID, (Shard(0), R)))
        p.grad = place(torch.full((8,), 300.0).half(), GRID, (Shard(0), R))
        norm = utils.clip_grad_norm_([p], 1.0)
        assert norm.dtype == torch.float16 and abs(norm.item() - 848.5) < 1

    simulate(program, ranks=4)


def test_while_gradients_add_up() -> None:
    """Addends left by ``no_grad_sync`` are clipped and go on adding up."""
    x = normal((4, 3), 1)
    w = normal((3, 2), 2).requires_grad_()
    (x @ w).square().sum().backward()
    want = utils.clip_grad_norm_([w], 0.5)
    (x @ w).square().sum().backward()

    def program() -> None:
        mine = torch.nn.Parameter(place(normal((3, 2), 2), GRID, (R, R)))
        batch = place(x, GRID, (Shard(0), R))
        with no_grad_sync():
            (batch @ mine).square().sum().backward()
        assert mine.grad.placements == (P, P)  # type: ignore[union-attr]
        same(utils.clip_grad_norm_([mine], 0.5), want)
        (batch @ mine).square().sum().backward()
        assert mine.grad.placements == (R, R)  # type: ignore[union-attr]
        same(mine.grad, w.grad)

    simulate(program, ranks=4)


def test_plain_ones_are_torchs() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    assert type(dtensor.clip_grad_norm_([p], 1.0)) is torch.Tensor
    assert utils.clip_grad_norm_([], 1.0) == 0
    utils.clip_grad_value_([p], 0.1)
    same(p.grad, torch.full((3,), 0.1))


def test_a_mesh_without_this_rank() -> None:
    def program() -> str:
        some = DeviceMesh("cpu", [0, 2], mesh_dim_names=("ep",))
        mine = torch.nn.Parameter(place(torch.ones(4), GRID, (R, R)))
        mine.grad = place(torch.ones(4), GRID, (R, R))
        other = torch.nn.Parameter(
            dtensor.distribute_tensor(torch.ones(4), some, [Shard(0)])
        )
        other.grad = dtensor.distribute_tensor(torch.ones(4), some, [Shard(0)])
        inside = some.coordinate is not None
        if inside:
            norm = utils.get_total_norm([mine.grad, other.grad])
            assert abs(norm.item() - 8**0.5) < 1e-6
            return ""
        with pytest.raises(ShardingError) as error:
            utils.get_total_norm([mine.grad, other.grad])
        return str(error.value)

    texts = simulate(program, ranks=4)
    assert "this rank has a part of some gradients and none of others" in texts[1]
    assert "Clip them in two calls" in texts[3]
