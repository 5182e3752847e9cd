"""The verbs against raw mpi4py and torch's process groups, from 64 B to 256 MiB.

A size is that of the larger of input and output, as nccl-tests count it. All candidates
work alike: the input stays as it is, the result is a new buffer, made in the call (a
broadcast in place begins with that buffer, filled at the root). Equal pieces, so that
nobody has to ask for lengths. Calls follow each other without a barrier in between, and
the slowest rank counts.

MPI has no bfloat16: raw mpi4py moves it as int16, and is left out where it would reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dtensor.benchmarks import peers
from dtensor.benchmarks.harness import (
    OURS,
    Bar,
    Call,
    Measure,
    Options,
    calibrate,
    interleave,
)
from dtensor.benchmarks.spread import spread_of
from dtensor.benchmarks.tables import show_value
from dtensor.collectives import functional
from dtensor.mesh.device_mesh import DeviceMesh

NCCL = "NCCL, torch"
SMALL = 4096  # bytes; up to here what counts is the time of a call
LARGE, HUGE = 4 << 20, 64 << 20
SIZES = tuple(64 << (2 * i) for i in range(12))  # 64 B to 256 MiB
QUICK = (64, 4096, 256 << 10, LARGE, HUGE)
TINY = (64, 4096)


@dataclass(frozen=True, slots=True)
class Verb:
    """A collective.

    Attributes:
        name: Ours.
        shrink: Whether the input is the nth part of the size.
        bus: Factor from size / time to the bandwidth of the bus, for n ranks, as
            nccl-tests define it (doc/PERFORMANCE.md there).
        reduces: Whether it computes.
        raw_bars: Whether raw mpi4py sets bars.
    """

    name: str
    bus: Callable[[int], float]
    shrink: bool = False
    reduces: bool = False
    raw_bars: bool = False


VERBS = (
    Verb("all_reduce", lambda n: 2 * (n - 1) / n, reduces=True, raw_bars=True),
    Verb("all_gather", lambda n: (n - 1) / n, shrink=True, raw_bars=True),
    Verb("reduce_scatter", lambda n: (n - 1) / n, reduces=True, raw_bars=True),
    Verb("all_to_all", lambda n: (n - 1) / n),
    Verb("broadcast", lambda n: 1.0),
)


def ours(verb: str, x: torch.Tensor, mesh: DeviceMesh) -> Call:
    """The public function, on a tensor that requires no grad."""
    n = mesh.shape[0]
    if verb == "all_gather":
        return partial(functional.all_gather, x, mesh, 0, (len(x),) * n)
    if verb == "all_to_all":
        even = (len(x) // n,) * n
        return partial(functional.all_to_all, x, mesh, 0, 0, even, even)
    return partial(getattr(functional, verb), x, mesh)


def raw(verb: str, x: Any, comm: Any, empty: Callable[[int], Any]) -> Call:
    """mpi4py's upper-case methods on arrays, or on tensors.

    Args:
        verb: Our name.
        x: The input.
        comm: Of all ranks.
        empty: Makes a buffer of a length.
    """
    n, rank, length = comm.size, comm.rank, len(x)

    def broadcast() -> Any:
        out = empty(length)
        if rank == 0:
            out[:] = x
        comm.Bcast(out)
        return out

    if verb == "broadcast":
        return broadcast
    function, size = {
        "all_reduce": (comm.Allreduce, length),
        "all_gather": (comm.Allgather, length * n),
        "reduce_scatter": (comm.Reduce_scatter_block, length // n),
        "all_to_all": (comm.Alltoall, length),
    }[verb]

    def call() -> Any:
        out = empty(size)
        function(x, out)
        return out

    return call


def group(verb: str, x: torch.Tensor, n: int) -> Call:
    """torch.distributed on its default group."""
    if verb in ("all_reduce", "broadcast"):
        root = dist.get_rank() == 0

        def in_place() -> torch.Tensor:
            if verb == "all_reduce":
                out = x.clone()
                dist.all_reduce(out)
            else:
                out = x.clone() if root else torch.empty_like(x)
                dist.broadcast(out, 0)
            return out

        return in_place
    table: dict[str, tuple[Callable[..., Any], int]] = {
        "all_gather": (dist.all_gather_into_tensor, len(x) * n),
        "reduce_scatter": (dist.reduce_scatter_tensor, len(x) // n),
        "all_to_all": (dist.all_to_all_single, len(x)),
    }
    function, size = table[verb]

    def call() -> torch.Tensor:
        out = x.new_empty(size)
        function(out, x)
        return out

    return call


def candidates(
    verb: Verb, x: torch.Tensor, mesh: DeviceMesh, comm: Any
) -> dict[str, Call]:
    """What is timed for one input, by name."""
    calls = {OURS: ours(verb.name, x, mesh)}
    if x.is_cpu:
        wire = x
        if x.dtype == torch.bfloat16:
            wire = x.view(torch.int16)
        if x.dtype != torch.bfloat16 or not verb.reduces:
            array = wire.numpy()
            kind = array.dtype
            calls[peers.RAW] = raw(verb.name, array, comm, lambda n: np.empty(n, kind))
            calls[peers.RAW_TENSOR] = raw(verb.name, wire, comm, wire.new_empty)
    name = peers.GLOO if x.is_cpu else NCCL
    calls[name] = group(verb.name, x, mesh.shape[0])
    return calls


def bars_of(verb: Verb, size: int, device: str) -> tuple[Bar, ...]:
    """What must be reached at a size."""
    if device != "cpu":
        return ()
    bars = [Bar(peers.GLOO, 1.0)]
    if verb.raw_bars and size <= SMALL:
        bars += [Bar(peers.RAW, 1.0, 5e-6), Bar(peers.RAW_TENSOR, 0.5)]
    if verb.raw_bars and size >= LARGE:
        bars.append(Bar(peers.RAW, 0.6 if size >= HUGE else 0.8))
    return tuple(bars)


def check(verb: Verb, calls: dict[str, Call]) -> None:
    """All candidates give the same values.

    Raises:
        RuntimeError: They do not.
    """
    mine: torch.Tensor = calls[OURS]()  # type: ignore[assignment]
    for name, call in calls.items():
        got = torch.as_tensor(call())
        if got.dtype == torch.int16:
            got = got.view(torch.bfloat16)
        if not torch.equal(got, mine):
            raise RuntimeError(
                f"check: {verb.name} of {name} differs from ours, got {got[:4]}, "
                f"expected {mine[:4]}. Compare both with exact values."
            )


def measure(
    verb: Verb, size: int, dtype: torch.dtype, mesh: DeviceMesh, comm: Any, o: Options
) -> Measure:
    """Time all candidates at one size, of at least one element a rank."""
    n = mesh.shape[0]
    width = dtype.itemsize
    length = max(n, size // width // n * n)
    length = length // n if verb.shrink else length
    # Small whole numbers: every candidate must give them exactly.
    x = (torch.arange(length, device=o.device) % 32 + o.ranks.rank).to(dtype)
    calls = candidates(verb, x, mesh, comm)
    check(verb, calls)
    wait = peers.wait_for(o.device)
    most = 8 if o.tiny else 1000
    inner = calibrate(calls, o.ranks, 0.002 if o.quick else 0.005, most, wait)
    rounds = o.rounds if size < HUGE else min(o.rounds, 15)
    times = interleave(calls, rounds, inner, o.ranks, wait=wait)
    title = f"{verb.name}, {str(dtype).removeprefix('torch.')}"
    speed = verb.bus(n) * size / spread_of(times[OURS]).median / 1e9
    return Measure(
        show_value(size, "B"),
        times,
        tuple(b for b in bars_of(verb, size, o.device) if b.peer in times),
        {"bus GB/s": round(speed, 3)},
        title,
        x=float(size),
    )


def run(options: Options) -> list[Measure]:
    """Time all verbs at all sizes."""
    sizes = TINY if options.tiny else QUICK if options.quick else SIZES
    rows = [
        (verb, dtype, size)
        for verb in VERBS
        for dtype in (torch.float32, torch.bfloat16)
        for size in sizes
    ]
    out = []
    shape = (options.ranks.size,)
    with peers.torch_world(options.ranks, options.device):
        mesh, _ = peers.meshes(shape, device=options.device)
        comm = peers.raw_comm() if options.device == "cpu" else None
        for done, (verb, dtype, size) in enumerate(rows):
            label = f"{verb.name}, {dtype}, {show_value(size, 'B')}"
            options.tell(done, len(rows), label)
            out.append(measure(verb, size, dtype, mesh, comm, options))
    return out
