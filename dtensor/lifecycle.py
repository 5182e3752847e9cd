"""How a rank begins and ends: no rank may leave the others waiting forever.

MPI itself does nothing for a rank that waits for one that will never come. Where an MPI
launcher started the process, ``install`` sees to three ways of leaving:

* An uncaught exception prints its traceback with its rank and ends the whole job.
* A rank that ends, by ``sys.exit`` or at the end of its script, tells the others, and
  ends when all have. One that waits for it in a collective says so, and ends the job:
  the notice alone is no fault, since a rank may well end a little before the others.
* An interrupt that cannot reach a rank, since it waits in a collective, ends the job.

The last two are seen by a thread that looks twice a second, and only while the rank
is inside a collective; it calls MPI only when a collective takes long.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import glob
import io
import os
import select
import signal
import struct
import sys
import termios
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from dtensor.collectives import mpi
from dtensor.collectives.activity import activity
from dtensor.mesh.world import launcher_world
from dtensor.rank_environment import (
    count_cores,
    count_gpus,
    gpu_settings,
    local_rank,
    yield_settings,
)

OWNER = "DTENSOR_RANK_PROCESS"  # process id of the rank: its children inherit the rest
POLL = 0.5  # seconds between two looks
GRACE = 2.0  # seconds that a rank may go on waiting for one that has ended
PATIENCE = 2.0  # seconds that the MPI launcher has to read the last output
INTERRUPTED = 130  # exit code, as shells have it

_Call = tuple[str, str, int, tuple[int, ...], float]


@dataclass(frozen=True, slots=True)
class Notice:
    """What a rank says when it ends.

    Attributes:
        code: What it gave to ``sys.exit``, -1 if it ended otherwise.
        finished: Number of the last call that it came back from, by the checksum of
            the ranks of the call. A root of a broadcast may end before the others have
            their copy: it is not to blame for their waiting.
    """

    code: int
    finished: Mapping[int, int]

    def pack(self) -> bytes:
        """As bytes: few, so that MPI sends them without waiting for the receiver."""
        parts = [struct.pack("<i", self.code)]
        parts += [struct.pack("<Iq", *item) for item in self.finished.items()]
        return b"".join(parts)

    @staticmethod
    def unpack(data: bytes) -> Notice:
        """The inverse of ``pack``."""
        (code,) = struct.unpack_from("<i", data)
        return Notice(code, dict(struct.iter_unpack("<Iq", data[4:])))


def checksum(ranks: tuple[int, ...]) -> int:
    """A short name for a set of ranks, the same in every process."""
    return zlib.crc32(repr(ranks).encode())


class Watcher:
    """The thread that sees that its rank waits in vain.

    Args:
        rank: Number of this rank.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.notices: dict[int, Notice] = {}
        self._thread: threading.Thread | None = None
        self._pipe = (-1, -1)
        self._stopping = False
        self._blamed: tuple[_Call, float] | None = None
        self._interrupted: tuple[_Call, float] | None = None

    def start(self) -> None:
        """Begin to look; called when MPI has been started."""
        if self._thread is not None or self._stopping:
            return
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        # Python writes the number of each signal here, also while the main thread is
        # inside MPI and cannot run a handler. Only the main thread may ask for that,
        # and an event loop that asked before keeps it.
        with contextlib.suppress(ValueError):
            before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            if before != -1:
                signal.set_wakeup_fd(before)
        self._thread = threading.Thread(
            target=self._run, name="dtensor-watcher", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Look no more; returns at once."""
        self._stopping = True
        if self._thread is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], b"\0")
            self._thread.join(timeout=1.0)

    def collect(self) -> Mapping[int, Notice]:
        """Take what has come; returns all notices so far, by rank."""
        for rank, data in mpi.leave_channel().poll():
            self.notices[rank] = Notice.unpack(data)
        return self.notices

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._pipe[0]], [], [], POLL)
            signals = os.read(self._pipe[0], 64) if ready else b""
            if self._stopping:
                return
            call, now = _current_call(), time.monotonic()
            if call is None:
                self._blamed = self._interrupted = None
                continue
            if signal.SIGINT in signals:
                self._interrupted = call, now
            if self._interrupted is not None:
                self._look_at_interrupt(call, now)
            if now - call[-1] >= POLL and mpi.started():
                self._look_at_notices(call, now)

    def _look_at_interrupt(self, call: _Call, now: float) -> None:
        verb, axis, sequence, ranks, _ = call
        if self._interrupted is None or self._interrupted[0] != call:
            self._interrupted = None
        elif now - self._interrupted[1] >= GRACE:
            _end_job(
                f"{verb}: rank {self.rank} was interrupted while it waited on axis "
                f"{axis!r} in call {sequence} with ranks {_spell(ranks)}.",
                INTERRUPTED,
            )

    def _look_at_notices(self, call: _Call, now: float) -> None:
        found = blame(call, self.collect())
        if found is None:
            self._blamed = None
        elif self._blamed is None or self._blamed[0] != call:
            self._blamed = call, now
        elif now - self._blamed[1] >= GRACE:
            code = self.notices[found].code
            _end_job(
                explain_wait(call, self.rank, found, self.notices[found]),
                code if 0 < code < 256 else 1,
            )


def blame(call: _Call, notices: Mapping[int, Notice]) -> int | None:
    """The first rank that ended without taking part in ``call``, or None.

    Args:
        call: (verb, axis, sequence, ranks, entered) of a collective.
        notices: What ended ranks said.
    """
    _, _, sequence, ranks, _ = call
    name = checksum(ranks)
    for rank in ranks:
        notice = notices.get(rank)
        if notice is not None and notice.finished.get(name, -1) < sequence:
            return rank
    return None


def explain_wait(call: _Call, rank: int, ended: int, notice: Notice) -> str:
    """The message of ``rank`` that waits in ``call`` for ``ended``."""
    verb, axis, sequence, ranks, _ = call
    how = "normally" if notice.code < 0 else f"with sys.exit({notice.code})"
    done = max(notice.finished.get(checksum(ranks), 0), 0)
    return (
        f"{verb}: rank {rank} waits in vain on axis {axis!r} in call {sequence}, got "
        f"rank {ended} that ended {how} after {done} calls, expected all ranks "
        f"{_spell(ranks)}. Let every rank of an axis make the same calls before it "
        f"ends."
    )


class _Rank:
    """This process as one rank of a job: its hooks, and what they found."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.process = os.getpid()
        self.code = -1
        self.watcher = Watcher(rank)
        self.show = sys.excepthook
        self.exit: Callable[..., NoReturn] = sys.exit

    def install(self) -> None:
        """Put the hooks in place."""
        sys.excepthook = self.on_exception
        sys.exit = self.on_sys_exit
        mpi.on_start.append(self.watcher.start)
        atexit.register(self.on_end)

    def on_exception(
        self,
        kind: type[BaseException],
        value: BaseException,
        trace: TracebackType | None,
    ) -> None:
        """Say what happened, in one piece, and end the job."""
        if os.getpid() != self.process:  # a child by fork
            self.show(kind, value, trace)
            return
        head = f"rank {self.rank} of {self.size} ends the job: uncaught {kind.__name__}"
        if self.show is sys.__excepthook__:
            body = "".join(traceback.format_exception(kind, value, trace))
            _end_job(f"{head}\n{body}", _code_of(kind))
        _write(head)
        self.show(kind, value, trace)
        _end_job("", _code_of(kind))

    def on_sys_exit(self, status: object = None, /) -> NoReturn:
        """Note the code, which nothing tells at the end, for the others' message."""
        if threading.current_thread() is threading.main_thread():
            self.code = _exit_code(status)
        self.exit(status)

    def on_end(self) -> None:
        """Tell the others that this rank makes no further call, and hear it of them."""
        if os.getpid() != self.process:
            return
        self.watcher.stop()
        if sys.excepthook != self.on_exception and hasattr(sys, "last_value"):
            # Another hook has replaced this one, and an exception went to it.
            _end_job(f"rank {self.rank} of {self.size} ends the job", 1)
        try:
            self.part()
        except KeyboardInterrupt:
            _end_job(f"rank {self.rank} was interrupted at its end.", INTERRUPTED)

    def part(self) -> None:
        """Exchange notices with all ranks: MPI does not end with messages on the way.

        It is no longer wait than that of MPI_Finalize, which follows, and a quieter
        one.
        """
        if not mpi.started():
            # The others may be starting MPI, which waits for this rank; and without
            # MPI it cannot tell them that it will not take part in what follows.
            if "mpi4py.MPI" in sys.modules:  # it was, and is no more
                return
            try:
                mpi.start()
            except ImportError:  # then no rank waits in MPI either
                return
        if mpi.start().COMM_WORLD.size != self.size:  # of another MPI than mpiexec
            return
        finished = {checksum(k): v for k, v in mpi.finished().items()}
        mpi.leave_channel().post(Notice(self.code, finished).pack())
        pause = 0.001
        while len(self.watcher.collect()) < self.size - 1:
            time.sleep(pause)
            pause = min(2 * pause, 0.02)


def install() -> None:
    """Make this process a good rank; does nothing where no MPI launcher started it.

    Also gives it whole lines of output, a way to wait that leaves the cores to others
    where ranks outnumber them, and under ``dtensor-run`` the GPU of its local rank.
    Children of a rank inherit its environment but are no ranks.

    It relies on every process of the job importing dtensor. Where some of them run
    another program, set ``DTENSOR_LIFECYCLE=0``.
    """
    if os.environ.get("DTENSOR_LIFECYCLE") == "0":
        return
    try:
        world = launcher_world()
    except ValueError:  # said in full by the first call that needs the world
        return
    process = str(os.getpid())
    if world is None or os.environ.setdefault(OWNER, process) != process:
        return
    place = local_rank(os.environ)
    ranks = place[1] if place is not None else 1
    os.environ.update(yield_settings(os.environ, ranks, count_cores()))
    if not _cuda_started():
        os.environ.update(gpu_settings(os.environ, count_gpus()))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A job that is ended must not take the lines along that it printed before.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    installed = isinstance(getattr(sys.excepthook, "__self__", None), _Rank)
    if world[1] > 1 and not installed:
        _Rank(*world).install()


def _cuda_started() -> bool:
    """Whether CUDA has read its variables already."""
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())


def _current_call() -> _Call | None:
    """The collective that this process is in."""
    now = activity
    verb = now.verb
    if verb is None:
        return None
    return verb, now.axis, now.sequence, now.ranks, now.entered


def _end_job(message: str, code: int) -> NoReturn:
    """Print, and end all ranks."""
    _write(message)
    _remove_shared_memory()
    _await_output()
    mpi.abort(code)


def _write(message: str) -> None:
    """One write, so that the lines of several ranks do not mix."""
    if message and sys.stderr is not None:
        sys.stderr.write(message if message.endswith("\n") else message + "\n")
        sys.stderr.flush()


def _await_output() -> None:
    """Let the MPI launcher read what was printed: Hydra drops it when a job ends."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until and _count_unread(stream.fileno()):
                time.sleep(0.01)
    time.sleep(0.2)  # from there it goes on to the launcher of the whole job


def _count_unread(pipe: int) -> int:
    """Bytes in a pipe that nobody has read yet."""
    (count,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return int(count)


def _remove_shared_memory() -> None:
    """Remove the files by which MPICH shares memory: it does so at a good end only.

    The ranks of the host keep what they mapped.
    """
    if mpi.started():
        with contextlib.suppress(OSError):
            for name in glob.glob("/dev/shm/mpich_shm_*"):
                with open("/proc/self/maps") as maps:
                    if name in maps.read():
                        os.unlink(name)


def _exit_code(status: object) -> int:
    """The exit code that Python makes of ``sys.exit(status)``."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1


def _code_of(kind: type[BaseException]) -> int:
    return INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1


def _spell(ranks: tuple[int, ...]) -> str:
    """Ranks as text, shortened."""
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} ranks)"
