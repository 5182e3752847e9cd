"""Memory of redistributions: what torch's allocator hands out while one rank moves.

One rank's part is run alone, on communicators that only make what would come.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from dtensor import (
    DeviceMesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    count_collectives,
    distribute_tensor,
    explain,
    get_rank,
    init_device_mesh,
    simulate,
)
from dtensor.exchange import Exchange
from dtensor.mesh.world import World
from dtensor.placement import Placements, normal, show
from dtensor.plan import plan_steps
from dtensor.redistribute import transition
from dtensor.spec import spec_of
from dtensor.steps import average_shard
from dtensor.tensor import local_of, typed

F64 = torch.float64
R = Replicate()


class Wire:
    """A communicator that only makes what this rank would receive."""

    axis = "x"

    def __init__(self, ranks: Sequence[int], me: int) -> None:
        self.ranks, self.size, self.rank = tuple(ranks), len(ranks), ranks.index(me)

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """As many elements."""
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def all_gather(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The elements of all ranks."""
        return x.new_empty(sum(counts))

    def reduce_scatter(
        self, x: torch.Tensor, counts: Sequence[int], op: str = "sum"
    ) -> torch.Tensor:
        """This rank's stretch."""
        return x.new_empty(counts[self.rank])

    def all_to_all(self, x: torch.Tensor, sent: Any, came: Any) -> torch.Tensor:
        """What came."""
        return x.new_empty(sum(came))

    def permute(self, x: torch.Tensor, dest: int, source: int, count: int) -> Any:
        """What came."""
        return x.new_empty(count)


def peak_bytes(run: Callable[[], Any]) -> int:
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


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let communicators be wires of rank 1."""

    def along(mesh: DeviceMesh, axis: int) -> Wire:
        mine = mesh.coordinate_of(1) or ()
        rows = [
            (at[axis], rank)
            for rank in mesh.ranks
            if (at := mesh.coordinate_of(rank)) is not None
            and all(a == axis or at[a] == c for a, c in enumerate(mine))
        ]
        return Wire([rank for _, rank in sorted(rows)], 1)

    monkeypatch.setattr("dtensor.spec.communicator", along)
    monkeypatch.setattr(
        "dtensor.moves.communicator_of", lambda ranks, *_: Wire(ranks, 1)
    )


def peak_of(
    mesh: DeviceMesh, src: Placements, dst: Placements, shape: tuple[int, ...]
) -> int:
    """Most bytes that rank 1 holds in a redistribution, its shard included."""
    world = World(1, mesh.size(), "self")
    a, b = spec_of(mesh, src, shape, world), spec_of(mesh, dst, shape, world)
    move = transition(a, b)
    x = torch.zeros(a.local_shape)
    return int(x.nbytes) + peak_bytes(lambda: move(x))


def test_a_shard_moves_in_less_than_three_shards_of_memory(alone: None) -> None:
    """S(0) -> S(1) of 64 MiB on 4 ranks."""
    mesh = init_device_mesh("cpu", (4,))
    shard = 16 << 20
    assert peak_of(mesh, (Shard(0),), (Shard(1),), (4096, 4096)) < 2.6 * shard
    before = [((i * 1024, (i + 1) * 1024), (0, 4096)) for i in range(4)]
    after = [((0, 4096), (i * 1024, (i + 1) * 1024)) for i in range(4)]
    wire: Any = Wire(range(4), 1)
    x = torch.zeros(1024, 4096)
    at_once = Exchange.between(before, after, wire, False)
    assert shard + peak_bytes(lambda: at_once.run(x)) > 3 * shard  # the count counts


def cuts(axes: int, dims: int) -> list[Placements]:
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


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (4, 4), (2, 2, 2)])
def test_no_cut_goes_through_the_whole(
    mesh_shape: tuple[int, ...], alone: None
) -> None:
    """A rank holds its source, what it makes of it, and blocks on their way.

    No more than four of the larger shard at the ends; were the whole gathered, it would
    be 17 on 4 x 4.
    """
    mesh = DeviceMesh("cpu", torch.arange(math.prod(mesh_shape)).view(mesh_shape))
    shape, whole = (2048, 2048), 16 << 20
    states = [p for p in cuts(len(mesh_shape), 2) if any(q.is_cut() for q in p)]
    pairs = list(itertools.product(states, states))
    for src, dst in pairs if len(pairs) < 200 else pairs[:: len(pairs) // 150]:
        largest = max(average_shard(mesh_shape, p, whole) for p in (src, dst))
        peak = peak_of(mesh, src, dst, shape)
        what = f"{show(src)} -> {show(dst)}: {peak / whole:.3f} of the whole"
        assert peak <= 4 * largest, what


@pytest.mark.parametrize("dst", [Shard(0), Shard(1), R])
def test_addends_are_reduced_in_place_of_being_gathered(
    dst: Placement, alone: None
) -> None:
    mesh = init_device_mesh("cpu", (4,))
    whole = 16 << 20
    peak = peak_of(mesh, (Partial(),), (dst,), (2048, 2048))
    assert peak <= whole * 2.3


def test_to_another_mesh_in_source_target_and_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "dtensor.across.communicator_of", lambda ranks, *_: Wire(ranks, 0)
    )
    line, grid = DeviceMesh("cpu", [3, 1, 0, 2]), DeviceMesh("cpu", [[0, 1], [2, 3]])
    spec = spec_of(line, (Shard(0),), (4096, 4096))
    shard = 16 << 20
    x = typed(torch.zeros(spec.local_shape), spec)
    for dst in ([Shard(1), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(1)]):
        peak = shard + peak_bytes(lambda dst=dst: x.redistribute(grid, dst))  # type: ignore[misc]
        assert 2 * shard <= peak <= 3 * shard, dst


def test_a_large_shard_is_sent_block_by_block() -> None:
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
        for step in plan_steps(mesh, src, dst, (16, 16)):
            assert average_shard((2, 2), step.dst, 256) <= max(held), (src, dst)
        assert found.steps == plan_steps(mesh, src, dst, (16, 16))
