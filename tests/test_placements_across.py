"""Across meshes, plain code on shards, pictures, and how much memory a move takes."""

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
    explain,
    get_rank,
    init_device_mesh,
    local_map,
    simulate,
    visualize_sharding,
)
from dtensor.exchange import Exchange
from dtensor.steps import average_shard
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
                assert c.bytes() <= 8 * 18 * 2
                if b.coordinate is None:
                    assert local_of(y).numel() == 0
                else:
                    assert torch.equal(y.full_tensor(), full), (a, b, src, dst)
        x = distribute_tensor(full, left, [R], src_data_rank=None)
        with pytest.raises(ShardingError, match="a gradient cannot cross"):
            x.requires_grad_().redistribute(right, [R])

    simulate(program, 4, timeout=200)


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
            (lambda: local_map(lambda x: 3, [R])(dx), "a result is no tensor"),
            (lambda: local_map(lambda x: (x, x), ([R],))(dw), "not one per result"),
        ):
            if words is not None:
                with pytest.raises(ShardingError, match=words):
                    call()

    simulate(program, 2)


# ---- pictures ----------------------------------------------------------------------------
def test_pictures() -> None:
    def program() -> tuple[str, ...]:
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(values(4, 6), mesh, [Shard(0), R])
        cyclic = distribute_tensor(values(4), mesh, [BlockCyclic(0, 1), Partial()])
        cube = distribute_tensor(values(2, 3, 4), mesh, [Shard(0), Shard(2)])
        page = visualize_sharding(x)._repr_html_()
        assert page.count("<td") == 2 and "0,1" in page
        assert "\x1b[30;48" in str(visualize_sharding(x, color=True))
        with pytest.raises(ValueError, match="dims or indices do not fit"):
            visualize_sharding(cube, dims=(0, 1), at=(9,))
        return (
            str(visualize_sharding(x, color=False)),
            str(visualize_sharding(cyclic, color=False)),
            str(visualize_sharding(cube, dims=(1, 2), at=(1,), color=False)),
            str(visualize_sharding(x.sum(), color=False)),
        )

    grid, cyclic, cube, scalar = simulate(program, 4)[0]
    head = "on DeviceMesh('cpu', (2, 2))"
    assert grid.splitlines() == [
        f"(4, 6) placed (S(0), R) {head}",
        "     0:6",
        "0:2  0,1",
        "2:4  2,3",
    ]
    assert cyclic.splitlines() == [
        f"(4) placed (Cyclic(0: 1), P) {head}".replace("(4)", "(4,)"),
        "0:1  0,1",
        "1:2  2,3",
        "2:3  0,1",
        "3:4  2,3",
    ]
    assert cube.splitlines() == [
        f"(2, 3, 4) placed (S(0), S(2)) {head}, dim 0 at 1",
        "     0:2  2:4",
        "0:3   2    3",
    ]
    assert scalar.splitlines() == [f"() placed (P, R) {head}", "  0-3"]


# ---- memory ---------------------------------------------------------------------------------
class Wire:
    """A communicator of four that only makes what it would receive."""

    size, rank, ranks, axis = 4, 1, (0, 1, 2, 3), "x"

    def permute(self, x: torch.Tensor, dest: int, source: int, count: int) -> Any:
        """What came."""
        return x.new_empty(count)

    def all_to_all(self, x: torch.Tensor, sent: Any, came: Any) -> Any:
        """What came."""
        return x.new_empty(sum(came))


def peak_bytes(run: Any) -> int:
    """Most bytes that torch's allocator handed out at once while ``run`` ran."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as p:
        result = run()
    events = p.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = [e for e in events if e.name() == "[memory]"]
    now = most = 0
    for e in sorted(memory, key=lambda e: e.start_ns()):
        now += e.nbytes()
        most = max(most, now)
    del result
    return most


def test_a_large_shard_moves_in_less_than_three_shards_of_memory() -> None:
    rows, shard = 4096, 16 << 20  # a float32 tensor of 64 MiB on 4 ranks
    before = [((i * 1024, (i + 1) * 1024), (0, rows)) for i in range(4)]
    after = [((0, rows), (i * 1024, (i + 1) * 1024)) for i in range(4)]
    x = torch.zeros(1024, rows)
    assert x.nbytes == shard
    wire: Any = Wire()
    one_by_one = Exchange.between(before, after, wire, True)
    assert shard + peak_bytes(lambda: one_by_one.run(x)) < 2.6 * shard
    at_once = Exchange.between(before, after, wire, False)
    assert shard + peak_bytes(lambda: at_once.run(x)) > 3 * shard

    def program() -> None:
        mesh = init_device_mesh("cpu", (4,))
        full = torch.arange(1 << 20, dtype=F64).view(1024, 1024)  # shards of 2 MiB
        y = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
        with count_collectives() as c:
            z = y.redistribute([Shard(1)])
        assert c.calls("permute") == 3 and c.calls() == 3
        assert torch.equal(local_of(z), full.chunk(4, 1)[get_rank()])

    simulate(program, 4)


def test_only_a_whole_target_is_ever_whole() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    kinds = [R, Shard(0), Shard(1), Partial()]
    for src, dst in itertools.product(itertools.product(kinds, repeat=2), repeat=2):
        found = explain(src, dst, (16, 16), mesh)  # where latency is all
        held = [average_shard((2, 2), p, 256) for p in (src, dst)]
        most = (
            max(average_shard((2, 2), s.dst, 256) for s in found.steps or ())
            if found.steps
            else 0
        )
        assert most <= max(held), (src, dst)
