"""Across meshes, and plain code on shards."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dtensor import (
    BlockCyclic,
    DeviceMesh,
    DTensor,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    ShardingError,
    count_collectives,
    distribute_tensor,
    get_rank,
    init_device_mesh,
    local_map,
    simulate,
)
from dtensor.tensor import local_of

F64 = torch.float64
R = Replicate()


def values(*shape: int) -> torch.Tensor:
    """The same numbers on every rank."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=F64).view(shape)


def test_the_same_ranks_in_another_shape() -> None:
    def program() -> None:
        grid = init_device_mesh("cpu", (2, 2))
        line = DeviceMesh("cpu", [3, 1, 0, 2])
        full = values(7, 5)
        sources: list[Any] = [
            [Shard(0), Shard(1)],
            [R, Shard(0)],
            [Partial(), Shard(1)],
            [Partial("max"), R],
            [BlockCyclic(0, 1), R],
        ]
        goals: list[Any] = [
            [Shard(0)],
            [Shard(1)],
            [R],
            [Partial()],
            [RaggedShard(0, (1, 0, 5, 1))],
        ]
        for src, dst in itertools.product(sources, goals):
            what = f"{src} -> {dst}"
            linear = src[0] != Partial("max")
            x = distribute_tensor(full, grid, src)
            if linear:
                x.requires_grad_()
            y = x.redistribute(line, dst)
            assert y.device_mesh is line and y.placements == tuple(dst), what
            torch.testing.assert_close(y.full_tensor().detach(), full, msg=what)
            if linear:
                (g,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
                assert isinstance(g, DTensor) and g.device_mesh is grid
                torch.testing.assert_close(g.full_tensor(), 3 * full.pow(2), msg=what)
                (gg,) = torch.autograd.grad(g.sum(), x)
                torch.testing.assert_close(gg.full_tensor(), 6 * full, msg=what)
            back = y.detach().redistribute(grid, src)
            torch.testing.assert_close(back.full_tensor(), full, msg=what)
        scalar = distribute_tensor(torch.tensor(2.0), grid, [R, R])
        assert scalar.redistribute(line, [R]).full_tensor().item() == 2

    simulate(program, 4, timeout=200)


def test_to_some_of_the_ranks_and_to_others() -> None:
    def program() -> None:
        whole, few = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [1, 2])
        left, right = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        full = values(6, 3)
        for a, b in ((whole, few), (few, whole), (left, right), (right, few)):
            for src, dst in itertools.product([Shard(0), Shard(1), R], repeat=2):
                x = distribute_tensor(full, a, [src], src_data_rank=None)
                with count_collectives() as c:
                    y = x.redistribute(b, [dst])
                assert c.bytes() <= 8 * 18 * 2 + 2  # and who wants a gradient
                if b.coordinate is None:
                    assert local_of(y).numel() == 0
                else:
                    assert torch.equal(y.full_tensor(), full), (a, b, src, dst)

    simulate(program, 4, timeout=200)


def set_pairs() -> list[tuple[DeviceMesh, DeviceMesh]]:
    """Meshes of unlike ranks of five: subsets, overlaps, disjoint sets."""
    whole, grid = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [[0, 3], [1, 2]])
    few, left, right = (DeviceMesh("cpu", r) for r in ([1, 2], [0, 1], [2, 3]))
    return [
        (whole, few),
        (few, whole),
        (left, right),
        (right, few),
        (grid, left),
        (right, grid),
    ]


def cotangent_for(spec: Any, dtype: torch.dtype = F64) -> torch.Tensor:
    """A cotangent of this rank's shard: alike where it must be, else unlike."""
    at = spec.coordinate
    own = 0
    for axis, p in enumerate(spec.placements):
        own = own * 5 + (0 if at is None or p.is_partial() else at[axis])
    g = torch.Generator().manual_seed(31 + own)
    return torch.randn(spec.local_shape, generator=g, dtype=dtype)


def test_the_adjoint_between_unlike_ranks() -> None:
    """<A x, y> = <x, A* y>, summed over all ranks; rank 4 is in no mesh."""

    def program() -> int:
        world = DeviceMesh("cpu", [0, 1, 2, 3, 4])
        full = values(5, 3)
        count = 0
        for a, b in set_pairs():
            kinds = [R, Shard(0), Shard(1), Partial(), Partial("avg")]
            sources = list(itertools.product(kinds, repeat=a.ndim))[:: 2 * a.ndim - 1]
            goals = list(itertools.product(kinds, repeat=b.ndim))[:: 2 * b.ndim - 1]
            for src, dst in itertools.product(sources, goals):
                what = f"{a} {src} -> {b} {dst}"
                model = distribute_tensor(full, a, src, src_data_rank=None)
                leaf = local_of(model).clone().requires_grad_()
                raw = [Partial() if p.is_replicate() else p for p in src]
                x = DTensor.from_local(
                    leaf, a, src, shape=full.shape, grad_placements=raw, run_check=False
                )
                with count_collectives() as c:
                    y = x.redistribute(b, dst)
                    local = local_of(y)
                assert c.bytes() < 8 * 15 * 6, what
                cotangent = cotangent_for(y._spec)
                back = torch.zeros_like(leaf)
                if local.requires_grad:  # on every rank of either mesh
                    found = torch.autograd.grad(
                        local, leaf, cotangent, allow_unused=True
                    )
                    back = back if found[0] is None else found[0]
                left, right = (
                    DTensor.from_local(z.sum(), world, Partial()).full_tensor()
                    for z in (local.detach() * cotangent, leaf.detach() * back)
                )
                torch.testing.assert_close(
                    left, right, rtol=1e-12, atol=1e-12, msg=what
                )
                assert left.abs() > 1e-3, what
                count += 1
        return count

    assert min(simulate(program, 5, timeout=200)) > 100


def test_gradients_between_unlike_ranks() -> None:
    """Two layers on two sets of ranks; every rank runs the same program."""
    batch, first, second = values(6, 4) / 8, values(4, 3) / 8, values(3, 2) / 8
    plain = [t.clone().requires_grad_() for t in (batch, first, second)]
    h = (plain[0] @ plain[1]).tanh()
    loss = ((h + h.sum(0)) @ plain[2]).pow(2).sum()
    loss.backward()
    again = [t.detach().clone().requires_grad_() for t in plain]
    h = (again[0] @ again[1]).tanh()
    out = ((h + h.sum(0)) @ again[2]).pow(2).sum()
    (g,) = torch.autograd.grad(out, again[1], create_graph=True)
    want = torch.autograd.grad(g.pow(2).sum(), again[0])[0]

    def program() -> None:
        for a, b in set_pairs():
            for src, dst in itertools.product([R, Shard(0), Shard(1)], repeat=2):
                what = f"{a} {src} -> {b} {dst}"
                x = distribute_tensor(batch, a, [src] * a.ndim, src_data_rank=None)
                w = distribute_tensor(first, a, [R] * a.ndim, src_data_rank=None)
                v = distribute_tensor(second, b, [R] * b.ndim, src_data_rank=None)
                for t in (x, w, v):
                    t.requires_grad_()
                h = (x @ w).tanh()
                there = [dst] * b.ndim
                h, s = h.redistribute(b, there), h.sum(0).redistribute(b, [R] * b.ndim)
                loss = ((h + s) @ v).pow(2).sum()
                loss.backward(retain_graph=True)
                for t, p in zip((x, w, v), plain, strict=True):
                    if t.device_mesh.coordinate is None:
                        assert t.grad is None or local_of(t.grad).numel() == 0
                        continue
                    assert t.grad is not None and p.grad is not None, what
                    assert t.grad.placements == t.placements, what  # type: ignore[attr-defined]
                    torch.testing.assert_close(
                        t.grad.full_tensor(),  # type: ignore[attr-defined]
                        p.grad,
                        msg=what,
                    )
                if get_rank() not in {*a.ranks, *b.ranks}:
                    continue
                (g,) = torch.autograd.grad(loss, w, create_graph=True)
                (gg,) = torch.autograd.grad(g.pow(2).sum(), x)
                if a.coordinate is not None:
                    torch.testing.assert_close(gg.full_tensor(), want, msg=what)  # type: ignore[attr-defined]

    simulate(program, 5, timeout=200)


def test_placeholders_without_a_history_take_part() -> None:
    """Only the ranks of the first mesh have what requires a gradient."""

    def program() -> None:
        left, right = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        leaf = torch.ones(2, 3, dtype=F64, requires_grad=left.coordinate is not None)
        x = DTensor.from_local(leaf, left, [Shard(0)], shape=(4, 3), run_check=False)
        y = x.redistribute(right, [Shard(1)])
        y.pow(3).sum().backward()
        if left.coordinate is not None:
            assert torch.equal(leaf.grad, torch.full((2, 3), 3.0, dtype=F64))  # type: ignore[arg-type]

    simulate(program, 4)


def test_ops_on_a_rank_outside() -> None:
    """What stands for a tensor there has its shape, and knows what it was made of."""
    calls: list[Any] = [
        lambda x: x.view(12),
        lambda x: x.split(2, 1)[1],
        lambda x: x.max(0).values,
        lambda x: torch.nn.functional.layer_norm(x, (4,)),
        lambda x: x.clone().mul_(x),
        lambda x: torch.fft.fft(x).abs(),
        lambda x: torch.zeros_like(x).add_(x),
    ]

    def program() -> list[Any]:
        mesh = DeviceMesh("cpu", [0])
        x = distribute_tensor(values(3, 4), mesh, [R], src_data_rank=None)
        x.requires_grad_()
        found = []
        for call in calls:
            y = call(x)
            (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
            found.append((y.shape, y.dtype, g.shape))
        return found

    member, outside = simulate(program, 2)
    assert member == outside


# ---- local_map ------------------------------------------------------------------------
def test_plain_code_on_shards() -> None:
    x, w = values(5, 3), values(3, 2)

    def block(x: torch.Tensor, w: torch.Tensor, scale: float) -> Any:
        assert type(x) is torch.Tensor
        y = (x @ w) * scale
        return y, y.sum(0), "done"

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        mapped = local_map(
            block,
            ([Shard(0)], [Partial()], None),
            in_placements=([Shard(0)], [R], None),
            redistribute_inputs=True,
        )
        dx = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
        dw = distribute_tensor(w, mesh, [R]).requires_grad_()
        y, total, word = mapped(dx, dw, 2.0)
        assert word == "done" and y.placements == (Shard(0),)
        px, pw = x.clone().requires_grad_(), w.clone().requires_grad_()
        want = (px @ pw) * 2.0
        torch.testing.assert_close(y.full_tensor(), want)
        torch.testing.assert_close(total.full_tensor(), want.sum(0))
        (y.pow(2).sum() + total.pow(2).sum()).backward()
        (want.pow(2).sum() + want.sum(0).pow(2).sum()).backward()
        torch.testing.assert_close(dx.grad.full_tensor(), px.grad)  # type: ignore[union-attr]
        torch.testing.assert_close(dw.grad.full_tensor(), pw.grad)  # type: ignore[union-attr]
        for call, words in (
            (lambda: local_map(block, [R], ([R], [R], None))(dx, dw, 1.0), "elsewhere"),
            (lambda: local_map(block, ([R],))(dx, dx, 1.0), None),
            (lambda: local_map(torch.abs, [R])(x), "no mesh"),
            (lambda: local_map(torch.abs, [R], ())(dx), "no entry for argument 0"),
            (lambda: local_map(torch.abs, [R], ([R], [R]))(dw), "without an argument"),
            (lambda: local_map(lambda x: 3, [R])(dx), "a result is no tensor"),
            (lambda: local_map(lambda x: (x, x), ([R],))(dw), "not one per result"),
        ):
            if words is not None:
                with pytest.raises(ShardingError, match=words):
                    call()
        with pytest.raises(TypeError, match="in_grad_placements must be a tuple"):
            local_map(torch.abs, [R], ([R],), mesh)(dw)  # type: ignore[arg-type]

    simulate(program, 2)
