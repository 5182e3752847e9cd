"""Every pair of placements, against PyTorch's DTensor on gloo: time and bytes.

Meshes of one and of two axes over the same ranks, tensors of float32 that all axes cut
evenly. Both sides begin with the same local pieces, and must end with the same. The
bytes are those one rank sends by the formulas of ``collectives/counter.py``: ours
as counted, theirs from the collectives that a dispatch mode sees. PyTorch refuses to
redistribute to Partial: ours stands alone there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor
from dtensor.benchmarks import peers
from dtensor.benchmarks.harness import (
    OURS,
    Bar,
    Call,
    Measure,
    Options,
    calibrate,
    interleave,
    summarize,
)
from dtensor.benchmarks.tables import show_value
from dtensor.collectives.counter import count_collectives

OUR_WORDS: dict[str, Any] = {
    "R": Replicate(),
    "S(0)": Shard(0),
    "S(1)": Shard(1),
    "P": Partial(),
}
THEIR_WORDS: dict[str, Any] = {
    "R": TorchReplicate(),
    "S(0)": TorchShard(0),
    "S(1)": TorchShard(1),
    "P": TorchPartial(),
}
Layout = tuple[str, ...]

_group_of: Any = getattr(distributed_c10d, "_resolve_process_group")  # noqa: B009


class SeenBytes(TorchDispatchMode):
    """Sums what this rank sends by the functional collectives it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, tensor = str(func), args[0] if args else None
        groups = [a for a in args if isinstance(a, str)]
        spaces = ("_c10d_functional.", "_dtensor.")
        if name.startswith(spaces) and groups and isinstance(tensor, torch.Tensor):
            n = _group_of(groups[-1]).size()
            size = tensor.numel() * tensor.element_size()
            if "all_reduce" in name:
                self.bytes += 2 * size * (n - 1) // n
            elif "all_gather" in name:
                self.bytes += size * (n - 1)
            elif "wait_tensor" not in name:  # reduce_scatter, all-to-all
                self.bytes += size * (n - 1) // n
        return func(*args, **(kwargs or {}))


def shapes_of(ranks: int) -> list[tuple[int, ...]]:
    """Meshes over all ranks: one axis, then two."""
    if ranks % 2:
        return [(ranks,), (ranks, 1)]
    return [(ranks,), (2, ranks // 2), *([(1, 2)] if ranks == 2 else [])]


def pairs_of(axes: int, options: Options) -> list[tuple[Layout, Layout]]:
    """All pairs of unlike layouts; a drawn part of those of two axes for a look."""
    layouts = list(itertools.product(OUR_WORDS, repeat=axes))
    pairs = [(a, b) for a in layouts for b in layouts if a != b]
    if options.tiny:
        return pairs[:: 4 if axes == 1 else 60]
    return pairs[::11] if options.quick and axes > 1 else pairs


def tensors(
    side: int, layout: Layout, ours: DeviceMesh, theirs: TorchMesh
) -> tuple[DTensor, TorchDTensor]:
    """One value on both sides; an addend is the same on every rank.

    Args:
        side: Rows and columns.
        layout: Of both.
        ours: Our mesh.
        theirs: PyTorch's, of the same shape.
    """
    x = (torch.arange(side * side) % 32).to(torch.float32).view(side, side)
    cut = [OUR_WORDS["R" if word == "P" else word] for word in layout]
    local = distribute_tensor(x.to(ours.device_type), ours, cut).to_local().contiguous()
    mine = DTensor.from_local(local, ours, [OUR_WORDS[w] for w in layout])
    words = [THEIR_WORDS[w] for w in layout]
    return mine, TorchDTensor.from_local(local, theirs, words, run_check=False)


def measure(
    side: int,
    source: Layout,
    target: Layout,
    meshes: tuple[DeviceMesh, TorchMesh],
    o: Options,
) -> Measure:
    """Time one pair on both sides.

    Raises:
        RuntimeError: They end with unlike local pieces.
    """
    mine, other = tensors(side, source, *meshes)
    goal = [OUR_WORDS[w] for w in target]
    calls: dict[str, Call] = {OURS: lambda: mine.redistribute(goal)}
    with count_collectives() as counted:
        got = mine.redistribute(goal).to_local()
    extras: dict[str, str | float] = {"sent": show_value(counted.bytes(), "B")}
    if "P" not in target:
        words = [THEIR_WORDS[w] for w in target]
        with SeenBytes() as seen:
            expected = other.redistribute(meshes[1], words).to_local()
        if not torch.equal(got, expected):
            raise RuntimeError(
                f"measure: {source} -> {target} differs from PyTorch's, got "
                f"{got.flatten()[:4]}, expected {expected.flatten()[:4]}. "
                f"Compare both with full_tensor."
            )
        calls[peers.PYTORCH] = lambda: other.redistribute(meshes[1], words)
        extras["sent, PyTorch"] = show_value(seen.bytes, "B")
    wait = peers.wait_for(o.device)
    most = 4 if o.tiny else 200
    inner = calibrate(calls, o.ranks, 0.001 if o.quick else 0.003, most, wait)
    times = interleave(calls, o.rounds, inner, o.ranks, wait=wait)
    shape = "x".join(map(str, meshes[0].shape))
    group = f"mesh {shape}, {show_value(4 * side * side, 'B')}"
    label = f"{_write(source)} -> {_write(target)}"
    return Measure(label, times, extras=extras, group=group)


def _write(layout: Layout) -> str:
    return layout[0] if len(layout) == 1 else f"({', '.join(layout)})"


def _cases(o: Options) -> Iterator[tuple[tuple[int, ...], int, Layout, Layout]]:
    for shape in shapes_of(o.ranks.size):
        sides = (64,) if o.tiny else (256,) if o.quick else (64, 1024)
        for side in sides:
            even = side // o.ranks.size * o.ranks.size
            for source, target in pairs_of(len(shape), o):
                yield shape, even, source, target


def run(options: Options) -> list[Measure]:
    """Time all pairs on all meshes, and give the median ratio of each group."""
    cases = list(_cases(options))
    groups: dict[str, list[Measure]] = {}
    made: dict[tuple[int, ...], tuple[DeviceMesh, TorchMesh]] = {}
    with peers.torch_world(options.ranks, options.device), torch.no_grad():
        for done, (shape, side, source, target) in enumerate(cases):
            if shape not in made:
                made[shape] = peers.meshes(shape, device=options.device)
            label = f"{shape}: {_write(source)} -> {_write(target)}"
            options.tell(done, len(cases), label)
            m = measure(side, source, target, made[shape], options)
            groups.setdefault(m.group, []).append(m)
    out = []
    for name, rows in groups.items():
        out += rows
        paired = [m for m in rows if peers.PYTORCH in m.samples]
        bars = (Bar(peers.PYTORCH, 1.0),)
        out.append(summarize(paired, peers.PYTORCH, bars, group=name))
    return out
