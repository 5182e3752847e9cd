"""Collectives over MPI, on host memory: the only file that imports mpi4py.

MPI is imported and initialised when the first communicator of two or more ranks is
made, never before. Buffers are passed as address, count and datatype: mpi4py would
otherwise choose the datatype itself, and takes bfloat16 for bytes. Moves travel as
unsigned integers of the element's size, so every dtype can be moved. Counts larger
than ``LARGEST`` are cut, since not every MPI takes counts beyond 2**31.

Large reductions among ranks of one host read the others' memory (``one_host.py``);
MPI then carries the addresses. While a rank is inside MPI, ``activity`` says in which
call.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

from dtensor.collectives import memory
from dtensor.collectives.activity import activity
from dtensor.collectives.communicator import Call, CollectiveError
from dtensor.collectives.notices import LEAVE_TAG, LeaveChannel
from dtensor.collectives.one_host import SMALLEST, PeerMemory, peer_memory
from dtensor.collectives.reductions import Reduction
from dtensor.mesh.world import World

LARGEST = 2**30  # elements in one MPI call
_TAGS = 32_000  # tags of communicator creation; MPI promises tags up to 32,767

_FOLDED = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int16: "INT16_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
_MOVED = {1: "UINT8_T", 2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T"}
_ORDERED = {"max": np.maximum, "min": np.minimum}


class _Library:
    """mpi4py once it is needed, and what belongs to the process with it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.module: Any = None
        self.folds: dict[tuple[str, torch.dtype], Any] = {}
        self.finished: dict[tuple[int, ...], int] = {}
        self.leave_channel: LeaveChannel | None = None


on_start: list[Callable[[], None]] = []  # called once, when MPI has been started
_library = _Library()


def started() -> bool:
    """Whether MPI runs in this process, whoever started it; imports nothing."""
    module: Any = sys.modules.get("mpi4py.MPI")
    ask = getattr(module, "Is_finalized", None)
    return ask is not None and bool(module.Is_initialized()) and not ask()


def start() -> Any:
    """Import and initialise MPI, once. Some MPI libraries wait for all ranks here.

    Returns:
        The module ``mpi4py.MPI``.

    Raises:
        ImportError: mpi4py or an MPI library is missing.
    """
    if _library.module is None:
        with _library.lock:
            if _library.module is not None:
                return _library.module
            try:
                from mpi4py import MPI
            except (ImportError, RuntimeError) as error:
                raise ImportError(
                    f"start: MPI cannot be loaded, got {error}, expected mpi4py and an "
                    f"MPI library. Run `pip install mpi4py mpich`, or use "
                    f"simulate(fn, ranks=...) without MPI."
                ) from error
            _library.module = MPI
        for function in on_start:
            function()
    return _library.module


def finished() -> dict[tuple[int, ...], int]:
    """Number of the last call this process came back from, by ranks of the call."""
    return dict(_library.finished)


def note_finished(ranks: tuple[int, ...], sequence: int) -> None:
    """A call that needs this rank no more, though it was not made over MPI."""
    _library.finished[ranks] = sequence


def leave_channel() -> LeaveChannel:
    """Where a leaving rank tells the others, the same object at each call."""
    module = start()
    with _library.lock:
        if _library.leave_channel is None:
            _library.leave_channel = LeaveChannel(module, LEAVE_TAG)
        return _library.leave_channel


def abort(code: int) -> NoReturn:
    """End all ranks of the job, with a non-zero exit code.

    Also where MPI was not started on this rank, while others wait for it: to start it
    could then wait for them.
    """
    code = code or 1
    sys.stdout.flush()
    sys.stderr.flush()
    if started():
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(code)
    manager = os.environ.get("PMI_FD", "")
    if manager.isdigit():
        # Hydra (MPICH, Intel MPI) ends a job for a rank that is not connected to MPI
        # only if it is asked to; this is the request that MPI_Abort makes of it.
        try:
            os.write(int(manager), b"cmd=abort exitcode=%d\n" % code)
            time.sleep(1.0)
        except OSError:
            pass
    os._exit(code)


def make_channel(world: World, ranks: tuple[int, ...], label: str) -> MPIChannel:
    """Make the communicator of ``ranks``; called by all of them, and only by them.

    Args:
        world: The caller's world.
        ranks: World ranks in order.
        label: Label of the axis, for messages.

    Raises:
        CollectiveError: MPI sees another world than the launcher's variables said, or
            fails to make the communicator.
    """
    call = Call("connect", label, world.rank, 0, (), None, (("ranks", ranks),))
    activity.enter(call, ranks)
    try:
        module = start()
        everyone = module.COMM_WORLD
        if (everyone.rank, everyone.size) != (world.rank, world.size):
            raise CollectiveError(
                call,
                f"MPI and the launcher disagree, got rank {everyone.rank} of "
                f"{everyone.size} from MPI, expected rank {world.rank} of {world.size} "
                f"from the launcher's variables. Use the mpiexec that belongs to the "
                f"MPI library of mpi4py; `dtensor-run` finds it.",
            )
        group = everyone.group.Incl(list(ranks))
        # Members that make several communicators at once tell them apart by the tag.
        tag = zlib.crc32(repr(ranks).encode()) % _TAGS
        try:
            comm = everyone.Create_group(group, tag)
        except module.Exception as error:
            raise CollectiveError(call, f"MPI failed: {error}.") from error
        finally:
            group.Free()
    finally:
        activity.leave()
    return MPIChannel(module, comm, ranks)


class MPIChannel:
    """The verbs on one MPI communicator.

    Args:
        module: The module ``mpi4py.MPI``.
        comm: Communicator of the axis, its ranks in axis order.
        ranks: Their world ranks.
    """

    kind: ClassVar[str] = "cpu"
    averages: ClassVar[bool] = False
    short: ClassVar[frozenset[torch.dtype]] = frozenset()

    def __init__(self, module: Any, comm: Any, ranks: tuple[int, ...]) -> None:
        self.sequence = 0
        self._ranks = ranks
        self._mpi = module
        self._comm = comm
        self._size: int = comm.size
        self._rank: int = comm.rank
        self._folds: dict[tuple[str, torch.dtype], tuple[Any, tuple[Any, int]]] = {}
        self._address: Callable[[int, int], Any] = module.buffer.fromaddress
        self._near: PeerMemory | None = None
        self._asked = False  # whether the ranks can read each other's memory

    def all_reduce(self, call: Call, x: torch.Tensor, row: Reduction) -> torch.Tensor:
        """Fold; MPI gives all ranks the same bits."""
        peers = self._peers(call, x.numel() * x.element_size())
        if peers is not None:
            out = memory.empty(x.numel(), x.dtype)
            self._run(call, peers.all_reduce, call, x, out, row.function)
            return out.resize_(x.shape)
        out = torch.empty_like(x)
        op, kind = self._fold(row, x.dtype)
        for start, count in _stretches(x.numel()):
            self._run(
                call,
                self._comm.Allreduce,
                self._buffer(x, start, count, kind),
                self._buffer(out, start, count, kind),
                op,
            )
        return out

    def all_gather(
        self, call: Call, x: torch.Tensor, counts: tuple[int, ...]
    ) -> torch.Tensor:
        """Join; a joined buffer that is too large is broadcast piece by piece."""
        total = sum(counts)
        out = memory.empty(total, x.dtype)
        if total == 0:
            return out
        kind = self._kind(x.dtype)
        if total > LARGEST:
            offsets = _offsets(counts)
            mine = offsets[self._rank]
            out[mine : mine + x.numel()] = x.view(-1)
            for root, offset in enumerate(offsets):
                self._send_all(call, out, offset, counts[root], root)
            return out
        mine_buffer = self._buffer(x, 0, x.numel(), kind)
        if counts.count(counts[0]) == len(counts):
            whole = self._buffer(out, 0, total, kind)
            whole[1] //= self._size  # of a received block MPI wants the count per rank
            self._run(call, self._comm.Allgather, mine_buffer, whole)
        else:
            whole = self._parts(out, counts, kind)
            self._run(call, self._comm.Allgatherv, mine_buffer, whole)
        return out

    def reduce_scatter(
        self, call: Call, x: torch.Tensor, counts: tuple[int, ...], row: Reduction
    ) -> torch.Tensor:
        """Fold and cut; a buffer that is too large is folded to each rank in turn."""
        mine = counts[self._rank]
        peers = self._peers(call, x.numel() * x.element_size())
        if peers is not None:
            out = memory.empty(mine, x.dtype)
            self._run(call, peers.reduce_scatter, call, x, out, counts, row.function)
            return out
        out = x.new_empty(mine)
        if x.numel() == 0:
            return out
        op, kind = self._fold(row, x.dtype)
        if x.numel() > LARGEST:
            for root, offset in enumerate(_offsets(counts)):
                for start, count in _stretches(counts[root]):
                    here = root == self._rank
                    self._run(
                        call,
                        self._comm.Reduce,
                        self._buffer(x, offset + start, count, kind),
                        self._buffer(out, start, count, kind) if here else None,
                        op,
                        root,
                    )
            return out
        given = self._buffer(x, 0, x.numel(), kind)
        kept = self._buffer(out, 0, mine, kind)
        if counts.count(mine) == len(counts):
            given[1] //= self._size  # as above
            self._run(call, self._comm.Reduce_scatter_block, given, kept, op)
        else:
            self._run(call, self._comm.Reduce_scatter, given, kept, list(counts), op)
        return out

    def all_to_all(
        self,
        call: Call,
        x: torch.Tensor,
        send_counts: tuple[int, ...],
        recv_counts: tuple[int, ...],
    ) -> torch.Tensor:
        """Exchange stretches by messages between pairs.

        Only the two ranks of a pair know the size of what they exchange, so only a
        pair can agree to cut it; MPI libraries do the same inside MPI_Alltoallv.
        """
        out = x.new_empty(sum(recv_counts))
        sent, received = _offsets(send_counts), _offsets(recv_counts)
        me, n = self._rank, self._size
        mine = send_counts[me]
        if mine:
            there = received[me]
            out[there : there + mine] = x.view(-1)[sent[me] : sent[me] + mine]
        others = [(me + step) % n for step in range(1, n)]
        self._messages(
            call,
            [(x, sent[r], send_counts[r], r) for r in others],
            [(out, received[r], recv_counts[r], r) for r in reversed(others)],
        )
        return out

    def broadcast(self, call: Call, x: torch.Tensor, root: int) -> torch.Tensor:
        """Copy from the root."""
        out = x.clone() if root == self._rank else torch.empty_like(x)
        self._send_all(call, out, 0, out.numel(), root)
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
        if source == self._rank:
            return x.view(-1).clone()
        out = x.new_empty(count)
        self._messages(
            call,
            [] if dest is None else [(x, 0, x.numel(), dest)],
            [] if source is None else [(out, 0, count, source)],
        )
        return out

    def barrier(self, call: Call) -> None:
        """Wait for all."""
        self._run(call, self._comm.Barrier)

    # ------------------------------------------------------------------ calls of MPI
    def _peers(self, call: Call, size: int) -> PeerMemory | None:
        """How to read the other ranks' memory, for ``size`` bytes; None: use MPI.

        ``size`` is the same on all ranks, and so is the answer.
        """
        if size < SMALLEST:
            return None
        if not self._asked:
            self._run(call, self._ask)
        return self._near

    def _ask(self) -> None:
        self._near = peer_memory(self._mpi, self._comm)
        self._asked = True

    def _run(self, call: Call, function: Callable[..., Any], *args: Any) -> None:
        activity.enter(call, self._ranks)
        try:
            function(*args)
            _library.finished[self._ranks] = call.sequence
        except self._mpi.Exception as error:
            raise CollectiveError(call, f"MPI failed: {error}.") from error
        finally:
            activity.leave()

    def _send_all(
        self, call: Call, out: torch.Tensor, offset: int, count: int, root: int
    ) -> None:
        """Broadcast a stretch of ``out`` in place."""
        kind = self._kind(out.dtype)
        for start, part in _stretches(count):
            buffer = self._buffer(out, offset + start, part, kind)
            self._run(call, self._comm.Bcast, buffer, root)

    def _messages(self, call: Call, sends: _Messages, receives: _Messages) -> None:
        """Exchange (tensor, offset, count, rank) with others; all at once."""
        requests = []
        for post, messages in (
            (self._comm.Irecv, receives),
            (self._comm.Isend, sends),
        ):
            for tensor, offset, count, rank in messages:
                kind = self._kind(tensor.dtype)
                for start, part in _stretches(count):
                    buffer = self._buffer(tensor, offset + start, part, kind)
                    requests.append(post(buffer, rank))
        if requests:
            self._run(call, self._mpi.Request.Waitall, requests)

    def _buffer(
        self, x: torch.Tensor, start: int, count: int, kind: tuple[Any, int]
    ) -> list[Any]:
        """``count`` elements of a contiguous tensor as MPI takes them."""
        datatype, words = kind
        width = x.element_size()
        pointer = x.data_ptr() + start * width
        return [self._address(pointer, count * width), count * words, datatype]

    def _parts(
        self, x: torch.Tensor, counts: Sequence[int], kind: tuple[Any, int]
    ) -> list[Any]:
        """All of a contiguous tensor, in parts of ``counts`` elements."""
        datatype, words = kind
        each = [n * words for n in counts]
        memory = self._address(x.data_ptr(), x.numel() * x.element_size())
        return [memory, (each, _offsets(each)), datatype]

    def _kind(self, dtype: torch.dtype) -> tuple[Any, int]:
        """Datatype that moves an element, and how many of it one element takes."""
        width = dtype.itemsize
        if width in _MOVED:
            return getattr(self._mpi, _MOVED[width]), 1
        return self._mpi.UINT64_T, width // 8

    def _fold(self, row: Reduction, dtype: torch.dtype) -> tuple[Any, tuple[Any, int]]:
        """MPI operation and datatype of a reduction."""
        found = self._folds.get((row.name, dtype))
        if found is None:
            if row.name in _ORDERED and dtype.is_floating_point:
                op = self._ordered(row.name, dtype)
            else:
                op = getattr(self._mpi, row.mpi)
            found = op, (getattr(self._mpi, _FOLDED[dtype]), 1)
            self._folds[row.name, dtype] = found
        return found

    def _ordered(self, name: str, dtype: torch.dtype) -> Any:
        """max or min of floats as torch has it: a NaN on any rank wins.

        MPI_MAX leaves open what becomes of a NaN, and of zeros of unlike sign, so that
        ranks could differ. This one is said not to commute, which fixes the order.
        """
        with _library.lock:
            found = _library.folds.get((name, dtype))
            if found is None:
                function = _ORDERED[name]
                kind = np.float64 if dtype is torch.float64 else np.float32

                def fold(first: Any, second: Any, datatype: Any) -> None:
                    total = np.frombuffer(second, kind)
                    function(np.frombuffer(first, kind), total, out=total)

                found = self._mpi.Op.Create(fold, commute=False)
                _library.folds[name, dtype] = found
        return found


_Messages = list[tuple[torch.Tensor, int, int, int]]


def _stretches(count: int) -> list[tuple[int, int]]:
    """(start, length) of pieces that one MPI call can take; none for zero elements."""
    if 0 < count <= LARGEST:
        return [(0, count)]
    return [(i, min(LARGEST, count - i)) for i in range(0, count, LARGEST)]


def _offsets(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]
