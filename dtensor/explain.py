"""What a redistribution would do: its plan as text, and as a table in notebooks.

Also ``calibrate``, which measures what the planner else takes for granted.
"""

from __future__ import annotations

import functools
import html
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dtensor.collectives.registry import communicator, communicator_of
from dtensor.costs import CostTable, costs_of, set_costs
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Placements, PlacementsLike, normal, placements_of, show
from dtensor.plan import plan_steps
from dtensor.steps import Step, average_shard

HEADS = ("step", "axis", "from", "to", "bytes sent", "time", "memory")


@dataclass(frozen=True, slots=True)
class Explanation:
    """The plan of one redistribution; ``print`` it.

    Attributes:
        mesh: The mesh.
        src: Placements before.
        dst: Placements after.
        shape: Global shape in elements.
        dtype: Element type.
        steps: The steps.
    """

    mesh: DeviceMesh
    src: Placements
    dst: Placements
    shape: tuple[int, ...]
    dtype: torch.dtype
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        """Modelled time of all steps."""
        return sum(s.seconds for s in self.steps)

    @property
    def sent_bytes(self) -> float:
        """Bytes a rank sends in all steps, on average."""
        return sum(s.elements for s in self.steps) * self.dtype.itemsize

    @property
    def peak_bytes(self) -> float:
        """Most bytes a rank holds at once: a step's shard before and the one after."""
        shard = average_shard(self.mesh.shape, self.src, math.prod(self.shape))
        return max([shard, *(s.held for s in self.steps)]) * self.dtype.itemsize

    def rows(self) -> list[tuple[str, ...]]:
        """One row of text per step: verb, axes, from, to, bytes, time, memory."""
        size = self.dtype.itemsize
        return [
            (
                "copy" if s.verb == "local" else s.verb.replace("_", "-"),
                "+".join(self.mesh.axis_name(a) for a in s.axes),
                show(s.src),
                show(s.dst),
                amount(s.elements * size),
                duration(s.seconds),
                amount(s.held * size),
            )
            for s in self.steps
        ]

    def _title(self) -> str:
        return (
            f"{show(self.src)} -> {show(self.dst)} of {tuple(self.shape)} "
            f"{str(self.dtype).removeprefix('torch.')} on {self.mesh!r}"
        )

    def _total(self) -> tuple[str, ...]:
        sent, seconds = amount(self.sent_bytes), duration(self.seconds)
        return ("total", "", "", "", sent, seconds, amount(self.peak_bytes))

    def __str__(self) -> str:
        """A table in plain text; bytes are per rank."""
        if not self.steps:
            return f"{self._title()}\nnothing to do"
        table = [HEADS, *self.rows(), self._total()]
        widths = [max(len(row[i]) for row in table) for i in range(len(HEADS))]
        lines = [
            "  ".join(
                cell.rjust(w) if i > 3 else cell.ljust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        return "\n".join([self._title(), *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The same table for notebooks."""

        def row(cells: Sequence[str], tag: str) -> str:
            inside = "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells)
            return f"<tr>{inside}</tr>"

        body = "".join(row(r, "td") for r in self.rows())
        return (
            f"<table><caption>{html.escape(self._title())}</caption>"
            f"<thead>{row(HEADS, 'th')}</thead><tbody>{body}</tbody>"
            f"<tfoot>{row(self._total(), 'th')}</tfoot></table>"
        )


def amount(n: float) -> str:
    """Bytes as short text.

    Example:
        >>> amount(1536)
        '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            break
        n /= 1024
    return f"{n:.4g} {unit}"


def duration(seconds: float) -> str:
    """Seconds as short text.

    Example:
        >>> duration(2.5e-05)
        '25 us'
    """
    for unit, size in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if seconds < 1000 * size or unit == "s":
            break
    return f"{seconds / size:.3g} {unit}"


def explain(
    src: PlacementsLike,
    dst: PlacementsLike,
    shape: Sequence[int],
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype = torch.float32,
) -> Explanation:
    """The plan of a redistribution; nothing is moved, and no ranks are needed.

    Args:
        src: Placements before, one per mesh axis.
        dst: Placements after.
        shape: Global shape in elements.
        mesh: The mesh; it may name ranks that the world does not have.
        dtype: Element type, for the bytes.

    Example:
        >>> from dtensor import Replicate, Shard, init_device_mesh
        >>> mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        >>> print(explain(Shard(0), Shard(1), (1024, 1024), mesh))
        (S(0)) -> (S(1)) of (1024, 1024) float32 on DeviceMesh('cpu', (tp=4))
        step        axis  from    to      bytes sent    time  memory
        all-to-all  tp    (S(0))  (S(1))     768 KiB  817 us   2 MiB
        total                                768 KiB  817 us   2 MiB
    """
    shape = tuple(shape)
    before = placements_of("explain", src, mesh.ndim, len(shape))
    after = placements_of("explain", dst, mesh.ndim, len(shape))
    steps = plan_steps(mesh, before, after, shape, dtype.itemsize, costs_of(mesh))
    return Explanation(mesh, normal(before), normal(after), shape, dtype, steps)


def calibrate(
    mesh: DeviceMesh, *, small: int = 256, large: int = 1 << 22, repeats: int = 5
) -> CostTable:
    """Measure latency and bandwidth of each axis, and let the planner use them.

    Times all-gathers of two sizes along each axis, takes the best of the repeats and
    then the slowest rank's, so that all ranks set the same prices. Every rank of the
    mesh must call, with the same arguments.

    Args:
        mesh: The mesh.
        small: Bytes a rank sends in the short collective.
        large: Bytes a rank sends in the long one.
        repeats: Collectives of each size that are timed.

    Returns:
        The prices; ``set_costs(mesh, None)`` forgets them.

    Raises:
        ValueError: Sizes that give no line, or a rank outside of the mesh.
    """
    if not 0 < small < large or repeats < 1:
        raise ValueError(
            f"calibrate: sizes must grow and repeats be positive, got small={small}, "
            f"large={large}, repeats={repeats}. Leave them out for the defaults."
        )
    if mesh.coordinate is None:
        raise ValueError(
            f"calibrate: only members of {mesh!r} can measure it. Ask "
            "`mesh.coordinate is not None` first."
        )
    device = torch.device(mesh.device_type)
    latency, per_byte = [], []
    for axis in range(mesh.ndim):
        if mesh.shape[axis] == 1:
            latency.append(0.0)
            per_byte.append(0.0)
            continue
        comm = communicator(mesh, axis)
        times = []
        for size in (small, large):
            own = max(1, size // (comm.size - 1))
            x = torch.zeros(own, dtype=torch.uint8, device=device)
            counts = [own] * comm.size
            comm.all_gather(x, counts)
            comm.barrier()
            run = functools.partial(comm.all_gather, x, counts)
            times.append(best_time(run, repeats, device))
        slope = max(1e-13, (times[1] - times[0]) / (large - small))
        per_byte.append(slope)
        latency.append(max(1e-9, times[0] - slope * small))
    x = torch.zeros(large, dtype=torch.uint8, device=device)
    copy = best_time(x.clone, repeats, device) / large
    tiny = best_time(x[:1].clone, repeats, device)
    measured = torch.tensor([*latency, *per_byte, tiny, copy], dtype=torch.float64)
    if mesh.size() > 1:
        whole = communicator_of(mesh.ranks, "mesh", mesh.device_type)
        measured = whole.all_reduce(measured.to(device), "max").cpu()
    numbers = measured.tolist()
    n = mesh.ndim
    table = CostTable(
        tuple(numbers[:n]), tuple(numbers[n : 2 * n]), numbers[-2], numbers[-1]
    )
    set_costs(mesh, table)
    return table


def best_time(
    run: Callable[[], object], repeats: int, device: torch.device | None = None
) -> float:
    """The shortest of some runs, in seconds; what a GPU was given is waited for."""
    best = math.inf
    wait = device is not None and device.type == "cuda"
    for _ in range(repeats):
        if wait:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if wait:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
