"""Collectives over NCCL, on the ranks' GPUs: the only file that calls it.

NCCL is reached through CuPy, which takes addresses, counts and a stream as integers:
torch's tensors go in by ``data_ptr()``, on torch's current stream. The unique id and
small objects travel over MPI.

What NCCL does not have is made of what it has, on the GPU, for the same bytes as a
ring sends: uneven gathers are a group of broadcasts; 16-bit integers, bitwise
operations, products of complex numbers, and max and min of floats, whose NaNs NCCL
drops, are folds on each rank of the stretches that the ranks exchange.

A call returns when it is queued. ``Watch`` looks for errors and for calls that take
long, so that a rank that waits for one that has gone is not left waiting.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.metadata
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from dtensor.collectives import mpi
from dtensor.collectives.activity import activity
from dtensor.collectives.checked import CheckedCommunicator
from dtensor.collectives.communicator import Call, Channel, CollectiveError
from dtensor.collectives.counter import Tally
from dtensor.collectives.nccl_types import folds, moves
from dtensor.collectives.nccl_watch import Watch
from dtensor.collectives.reductions import Reduction
from dtensor.collectives.streams import CudaStreams, Streams
from dtensor.mesh.world import World

LARGEST = 2**30  # elements in one NCCL call
GATHERED = 2**16  # bytes up to which all stretches are gathered to be folded
PATIENCE = 5.0  # seconds that the end of the program waits for NCCL

_SHARES = ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_HOSTID")  # set where ranks share a GPU


class _Library:
    """CuPy's binding once it is needed, and the communicators of this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # of groups: posts of two threads do not mix
        self.module: Any = None
        self.open: list[NCCLChannel] = []
        self.watch: Watch | None = None


_library = _Library()


# ------------------------------------------------------------- what a machine must have
def missing_binding() -> str | None:
    """What keeps this process from using NCCL, as a sentence; None if nothing does."""
    if _library.module is not None:
        return None
    names = {
        (found.metadata["Name"] or "").lower()
        for found in importlib.metadata.distributions()
    }
    wheels = sorted(name for name in names if name.startswith("cupy-cuda"))
    if len(wheels) > 1:
        return (
            f"two builds of CuPy lie over each other, got {' and '.join(wheels)}, "
            f"expected one. Run `pip uninstall -y {' '.join(wheels)}`, then install "
            f"the one of your CUDA."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that NCCL is missing is said below
            module = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        return (
            f"CuPy cannot be loaded, got {error}, expected CuPy 14 or later. Run "
            f"`pip install 'dtensor-runtime[{_extra()}]'`."
        )
    if not module.available:
        return (
            "the NCCL library is not found, got none from CuPy, expected libnccl.so.2. "
            "A torch built for CUDA brings it along; import torch before cupy."
        )
    if not hasattr(module, "NCCL_AVG"):
        return (
            "CuPy is too old, got one without NCCL_AVG, expected CuPy 14 or later. "
            f"Run `pip install -U 'dtensor-runtime[{_extra()}]'`."
        )
    _library.module = module
    return None


def _extra() -> str:
    return "cuda12" if (torch.version.cuda or "").startswith("12") else "cuda13"


# ----------------------------------------------------------------- making a communicator
def make_channel(
    world: World,
    ranks: tuple[int, ...],
    label: str,
    host: Channel,
    streams: Streams | None = None,
) -> NCCLChannel:
    """Make the NCCL communicator of ``ranks``; called by all of them, and only by them.

    Every rank says first what it lacks, so that all raise where one cannot go on.

    Args:
        world: The caller's world.
        ranks: World ranks in order, two or more.
        label: Label of the axis, for messages.
        host: The channel of the same ranks on the host.
        streams: The device; by default torch's current CUDA device.

    Raises:
        CollectiveError: A rank lacks something, two share a GPU, or NCCL fails.
    """
    call = Call("connect", label, world.rank, 0, (), None, (("ranks", ranks),))
    problem = missing_binding()
    if streams is None and problem is None:
        index = torch.cuda.current_device()
        streams = CudaStreams(torch.device("cuda", index))
    place = "" if problem or streams is None else streams.name()
    version = "" if problem else str(_library.module.get_version())
    talk = CheckedCommunicator(ranks, world.rank, label, host, Tally())
    rows = talk.all_gather_object((problem, place, version))
    refused = refuse(ranks, rows)
    if refused is not None:
        raise CollectiveError(call, refused)
    assert streams is not None
    module = _library.module
    unique = module.get_unique_id() if talk.rank == 0 else None
    unique = talk.all_gather_object(unique)[0]
    try:
        with streams.activate():
            comm = module.NcclCommunicator(len(ranks), unique, talk.rank)
    except module.NcclError as error:
        raise CollectiveError(call, f"NCCL failed: {error}.") from error
    channel = NCCLChannel(comm, ranks, host, streams)
    with _library.lock:
        if _library.watch is None:
            _library.watch = Watch(lambda: _library.open)
            atexit.register(close_all)
        _library.open.append(channel)
    return channel


def refuse(
    ranks: tuple[int, ...], rows: Sequence[tuple[str | None, str, str]]
) -> str | None:
    """What keeps these ranks from one communicator, the same sentence on all.

    Args:
        ranks: World ranks.
        rows: For each what it lacks, the name of its device, NCCL's version.
    """
    places: dict[str, int] = {}
    for rank, (problem, place, _) in zip(ranks, rows, strict=True):
        if problem is not None:
            return f"on rank {rank} {problem}"
        if places.setdefault(place, rank) != rank and not any(
            os.environ.get(name) for name in _SHARES
        ):
            return (
                f"two ranks share a GPU, got ranks {places[place]} and {rank} on "
                f"{place}, expected one rank per GPU. Start as many ranks per host as "
                f"it has GPUs."
            )
    versions = {version for _, _, version in rows}
    if len(versions) > 1:
        return (
            f"the ranks have unlike NCCL libraries, got versions "
            f"{' and '.join(sorted(versions))}, expected one. Install the same torch "
            f"on all hosts."
        )
    return None


class NCCLChannel:
    """The verbs on one NCCL communicator.

    Args:
        comm: CuPy's communicator of the axis, its ranks in axis order.
        ranks: Their world ranks.
        host: The channel of the same ranks on the host.
        streams: The device.
    """

    averages: ClassVar[bool] = True
    short: ClassVar[frozenset[torch.dtype]] = frozenset({torch.float16, torch.bfloat16})

    def __init__(
        self, comm: Any, ranks: tuple[int, ...], host: Channel, streams: Streams
    ) -> None:
        self.sequence = 0
        self.kind = streams.device.type
        self.streams = streams
        self.last: tuple[Call, Any, float] | None = None  # with its event, and when
        self.failure: str | None = None
        self._comm = comm
        self._host = host
        self.ranks = ranks
        self._size = len(ranks)
        self._rank: int = comm.rank_id()

    # ------------------------------------------------------------------------- the verbs
    def all_reduce(self, call: Call, x: torch.Tensor, row: Reduction) -> torch.Tensor:
        """Fold; all ranks get what one of them has added up."""
        self._check_device(call, x)
        found = folds(row, x.dtype)
        if found is None:
            return self._all_reduce_here(call, x, row)
        out = torch.empty_like(x)
        op, kind, words = found
        with self._group(call) as (comm, stream):
            for start, count in _stretches(x.numel()):
                given, kept = _at(x, start), _at(out, start)
                comm.allReduce(given, kept, count * words, kind, op, stream)
        return out

    def all_gather(
        self, call: Call, x: torch.Tensor, counts: tuple[int, ...]
    ) -> torch.Tensor:
        """Join; uneven or large stretches are broadcast, each by its rank."""
        self._check_device(call, x)
        total = sum(counts)
        out = x.new_empty(total)
        if total == 0:
            return out
        kind, words = moves(x.dtype)
        with self._group(call) as (comm, stream):
            if min(counts) == max(counts) and total <= LARGEST:
                count = counts[0] * words
                comm.allGather(_at(x, 0), _at(out, 0), count, kind, stream)
                return out
            for root, offset in enumerate(_offsets(counts)):
                for start, count in _stretches(counts[root]):
                    kept = _at(out, offset + start)
                    given = _at(x, start) if root == self._rank else kept
                    comm.broadcast(given, kept, count * words, kind, root, stream)
        return out

    def reduce_scatter(
        self, call: Call, x: torch.Tensor, counts: tuple[int, ...], row: Reduction
    ) -> torch.Tensor:
        """Fold and cut; uneven or large stretches are folded to each rank in turn."""
        self._check_device(call, x)
        found = folds(row, x.dtype)
        if found is None:
            return self._reduce_scatter_here(call, x, counts, row)
        out = x.new_empty(counts[self._rank])
        if x.numel() == 0:
            return out
        op, kind, words = found
        with self._group(call) as (comm, stream):
            if min(counts) == max(counts) and x.numel() <= LARGEST:
                given, kept, each = _at(x, 0), _at(out, 0), counts[0] * words
                comm.reduceScatter(given, kept, each, kind, op, stream)
                return out
            for root, offset in enumerate(_offsets(counts)):
                for start, count in _stretches(counts[root]):
                    given = _at(x, offset + start)
                    # Others' output is not touched, but it must be an address.
                    kept = _at(out, start) if root == self._rank else given
                    comm.reduce(given, kept, count * words, kind, op, root, stream)
        return out

    def all_to_all(
        self,
        call: Call,
        x: torch.Tensor,
        send_counts: tuple[int, ...],
        recv_counts: tuple[int, ...],
    ) -> torch.Tensor:
        """Exchange stretches; a pair that has nothing to exchange posts nothing."""
        self._check_device(call, x)
        out = x.new_empty(sum(recv_counts))
        sent, received = _offsets(send_counts), _offsets(recv_counts)
        me, n = self._rank, self._size
        mine = send_counts[me]
        if mine:
            there = received[me]
            out[there : there + mine] = x.view(-1)[sent[me] : sent[me] + mine]
        messages = []
        for step in range(1, n):
            to, source = (me + step) % n, (me - step) % n
            messages.append((x, sent[to], send_counts[to], to, True))
            messages.append((out, received[source], recv_counts[source], source, False))
        self._messages(call, messages)
        return out

    def broadcast(self, call: Call, x: torch.Tensor, root: int) -> torch.Tensor:
        """Copy from the root."""
        self._check_device(call, x)
        out = torch.empty_like(x)
        kind, words = moves(x.dtype)
        with self._group(call) as (comm, stream):
            for start, count in _stretches(x.numel()):
                given, kept = _at(x, start), _at(out, start)
                comm.broadcast(given, kept, count * words, kind, root, stream)
        return out

    def permute(
        self,
        call: Call,
        x: torch.Tensor,
        dest: int | None,
        source: int | None,
        count: int,
    ) -> torch.Tensor:
        """Send and receive at most one buffer; empty ones are left out by both."""
        self._check_device(call, x)
        if source == self._rank:
            return x.view(-1).clone()
        out = x.new_empty(count)
        messages = []
        if dest is not None:
            messages.append((x, 0, x.numel(), dest, True))
        if source is not None:
            messages.append((out, 0, count, source, False))
        self._messages(call, messages)
        return out

    def barrier(self, call: Call) -> None:
        """Wait for this rank's stream, then on the host for all ranks."""
        self.streams.synchronize(self.streams.current())
        self.check(call)
        self._host.barrier(call)

    # ----------------------------------------------------------- folds that NCCL lacks
    def _all_reduce_here(
        self, call: Call, x: torch.Tensor, row: Reduction
    ) -> torch.Tensor:
        """Each rank folds a stretch and hands it on; of a small buffer, all of it."""
        n, size = self._size, x.numel()
        if size * x.element_size() * n <= GATHERED:
            joined = self.all_gather(call, x, (size,) * n)
            return _folded(joined.view(n, *x.shape), row)
        each = -(-size // n)
        counts = tuple(max(min(each, size - i * each), 0) for i in range(n))
        piece = self._reduce_scatter_here(call, x, counts, row)
        return self.all_gather(call, piece, counts).view(x.shape)

    def _reduce_scatter_here(
        self, call: Call, x: torch.Tensor, counts: tuple[int, ...], row: Reduction
    ) -> torch.Tensor:
        n, mine = self._size, counts[self._rank]
        parts = self.all_to_all(call, x, counts, (mine,) * n)
        return _folded(parts.view(n, mine), row)

    # ----------------------------------------------------------------- calls of NCCL
    @contextlib.contextmanager
    def _group(self, call: Call) -> Iterator[tuple[Any, int]]:
        """The communicator and the stream's handle; what is posted runs as one."""
        streams, module = self.streams, _library.module
        stream = streams.current()
        with _library.lock:
            self.check(call)
            # The first calls of a communicator meet their peers on the host.
            activity.enter(call, self.ranks)
            try:
                module.groupStart()
                try:
                    yield self._comm, streams.handle(stream)
                finally:
                    module.groupEnd()
            except module.NcclError as error:
                self.failure = f"NCCL failed: {error}."
                raise CollectiveError(call, self.failure) from error
            finally:
                activity.leave()
            self.last = call, streams.record(stream), time.monotonic()
            mpi.note_finished(self.ranks, call.sequence)

    def _messages(
        self, call: Call, messages: Sequence[tuple[torch.Tensor, int, int, int, bool]]
    ) -> None:
        """Exchange (tensor, offset, count, rank, whether it is sent), all at once."""
        if not any(count for _, _, count, _, _ in messages):
            return
        with self._group(call) as (comm, stream):
            for x, offset, count, rank, outward in messages:
                kind, words = moves(x.dtype)
                post = comm.send if outward else comm.recv
                for start, part in _stretches(count):
                    post(_at(x, offset + start), part * words, kind, rank, stream)

    def _check_device(self, call: Call, x: torch.Tensor) -> None:
        if x.device != self.streams.device:
            raise CollectiveError(
                call,
                f"the tensor is on another device than the rank's communicator, got "
                f"{x.device}, expected {self.streams.device}. Move it with "
                f"x.to({str(self.streams.device)!r}).",
            )

    def check(self, call: Call) -> None:
        """Raise what has gone wrong since the last call.

        Raises:
            CollectiveError: NCCL reports an error, or the communicator was given up.
        """
        if self.failure is None:
            self.failure = self.poll()
        if self.failure is not None:
            raise CollectiveError(call, self.failure)

    def poll(self) -> str | None:
        """NCCL's report on calls that are under way, None if there is no error."""
        try:
            self._comm.check_async_error()
        except _library.module.NcclError as error:
            return f"NCCL failed: {error}."
        return None

    # ------------------------------------------------------------------------ the end
    def close(self, patience: float) -> bool:
        """Destroy the communicator, or give it up after ``patience`` seconds.

        What is under way is waited for: a rank may well be late.

        Returns:
            Whether it was destroyed; otherwise it was aborted.
        """
        pause = 0.001
        while self.failure is None and self.last is not None:
            if self.streams.passed(self.last[1]):
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        whole = self.failure is None
        self.failure = self.failure or "The communicator is closed."
        if whole and _ends(self._comm.destroy, patience):
            return True
        self.abort()
        return False

    def abort(self) -> None:
        """Give it up; those who wait in it come back."""
        _ends(self._comm.abort, PATIENCE)


def close_all(patience: float | None = None) -> int:
    """Destroy all communicators, in an order that all ranks share.

    Args:
        patience: Seconds for each; by default ``PATIENCE``.

    Returns:
        How many had to be aborted.
    """
    limit = PATIENCE if patience is None else patience
    atexit.unregister(close_all)
    given_up = 0
    for channel in sorted(_library.open, key=lambda channel: channel.ranks):
        given_up += not channel.close(limit)
    with _library.lock:
        _library.open.clear()
        watch, _library.watch = _library.watch, None
    if watch is not None:
        watch.stop()
    return given_up


def _ends(function: Callable[[], Any], patience: float) -> bool:
    """Whether a call comes back in time, without an error; it runs in a thread."""
    came_back = threading.Event()

    def run() -> None:
        with contextlib.suppress(_library.module.NcclError):
            function()
            came_back.set()

    thread = threading.Thread(target=run, name="dtensor-nccl-end", daemon=True)
    thread.start()
    thread.join(patience)
    return came_back.is_set()


# -------------------------------------------------------------------------- small helpers
def _folded(parts: torch.Tensor, row: Reduction) -> torch.Tensor:
    """Fold the stretches of all ranks, in their order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total = row.function(total, part)
    return total


def _at(x: torch.Tensor, start: int) -> int:
    """Address of an element of a contiguous tensor."""
    return x.data_ptr() + start * x.element_size()


def _stretches(count: int) -> Iterator[tuple[int, int]]:
    """(start, length) of pieces that one call takes; none for zero elements."""
    for start in range(0, count, LARGEST):
        yield start, min(LARGEST, count - start)


def _offsets(counts: Sequence[int]) -> list[int]:
    offsets, total = [], 0
    for n in counts:
        offsets.append(total)
        total += n
    return offsets
