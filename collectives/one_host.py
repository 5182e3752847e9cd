"""Large reductions among ranks of one host, by reading each other's memory.

MPI moves a large message through a shared segment: one copy in, one copy out. Linux
lets a process read another's memory (``process_vm_readv``), which is one copy, and the
reduction is done piece by piece while the piece is in the cache. (A gather is left to
MPI, which reads memory once as well.) Each element is folded
by one rank, in the order of the ranks, and copied by the others: all get the same bits.

Every call begins with a gather of the ranks' addresses, which also tells whether all
are in the same call, and ends with a barrier: nobody returns while someone reads.
Whether the ranks can do this is tried once, together: one that cannot (another host or
container, a system that forbids it, ``DTENSOR_PEER_MEMORY=0``) makes all use MPI.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dtensor.collectives.communicator import Call, CollectiveError

SMALLEST = 1 << 19  # bytes from which this was faster than MPICH, on 2 cores
BLOCK = 1 << 18  # bytes folded at once: a piece of each of two ranks fits an L2 cache
LARGEST = 1 << 30  # bytes of one read; Linux cuts reads at 2 GiB

_PR_SET_PTRACER = 0x59616D61
_ANYONE = ctypes.c_ulong(-1)

Fold = Callable[..., torch.Tensor]


class _Stretch(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]


class _System:
    """``process_vm_readv`` and ``prctl`` of the C library."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self.prctl = library.prctl
        self._read = library.process_vm_readv
        self._read.restype = ctypes.c_ssize_t
        one = ctypes.POINTER(_Stretch)
        self._read.argtypes = [
            ctypes.c_int,
            one,
            ctypes.c_ulong,
            one,
            ctypes.c_ulong,
            ctypes.c_ulong,
        ]

    def read(self, process: int, there: int, here: int, size: int) -> None:
        """Copy ``size`` bytes at ``there`` in ``process`` to ``here``.

        Raises:
            OSError: The system does not allow it, or there is no such memory.
        """
        done = 0
        while done < size:
            want = min(LARGEST, size - done)
            into = _Stretch(here + done, want)
            source = _Stretch(there + done, want)
            got = self._read(process, into, 1, source, 1, 0)
            if got <= 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
            done += got


def peer_memory(module: Any, comm: Any) -> PeerMemory | None:
    """Try whether all ranks of ``comm`` can read each other's memory.

    Called by all of them; all get one or none does.

    Args:
        module: The module ``mpi4py.MPI``.
        comm: The communicator.
    """
    system, secret = None, b""
    if os.environ.get("DTENSOR_PEER_MEMORY", "1") != "0":
        try:
            system = _System()
            # Where a process may be read by its parents alone, let the others, too.
            system.prctl(_PR_SET_PTRACER, _ANYONE, 0, 0, 0)
            secret = secrets.token_bytes(16)
        except (OSError, AttributeError):
            system = None
    mine = ctypes.create_string_buffer(secret, 16)
    told = comm.allgather((os.getpid(), ctypes.addressof(mine), secret))
    able = system is not None and all(_reads(system, *peer) for peer in told)
    # Also the barrier after which the buffer may go.
    if not all(comm.allgather(able)) or system is None:
        return None
    return PeerMemory(module, comm, system, [process for process, _, _ in told])


def _reads(system: _System, process: int, address: int, secret: bytes) -> bool:
    if not secret:
        return False
    found = ctypes.create_string_buffer(16)
    try:
        system.read(process, address, ctypes.addressof(found), 16)
    except OSError:
        return False
    return found.raw == secret  # in another container the number is another process


class PeerMemory:
    """The large verbs of the ranks of one communicator on one host.

    Args:
        module: The module ``mpi4py.MPI``.
        comm: The communicator.
        system: The C library.
        processes: Process numbers of the ranks, in order.
    """

    def __init__(
        self, module: Any, comm: Any, system: _System, processes: list[int]
    ) -> None:
        self._comm = comm
        self._long = module.INT64_T
        self._system = system
        self._processes = processes
        self._rank: int = comm.rank
        self._size = len(processes)
        self._scratch = torch.empty(2, BLOCK, dtype=torch.uint8, device="cpu")

    def all_reduce(
        self, call: Call, x: torch.Tensor, out: torch.Tensor, fold: Fold
    ) -> None:
        """Fold ``x`` of all ranks into ``out``, alike in elements, on all."""
        told = self._enter(call, x, out)
        step = -(-x.numel() // self._size)
        bounds = [min(step * r, x.numel()) for r in range(self._size + 1)]
        lo, hi = bounds[self._rank], bounds[self._rank + 1]
        self._fold(told[:, 0], x, lo, hi, out[lo:hi], fold)
        self._comm.Barrier()
        for r in self._others():
            lo, hi = bounds[r], bounds[r + 1]
            self._read(r, int(told[r, 1]), lo, out[lo:hi])
        self._comm.Barrier()

    def reduce_scatter(
        self,
        call: Call,
        x: torch.Tensor,
        out: torch.Tensor,
        counts: tuple[int, ...],
        fold: Fold,
    ) -> None:
        """Fold ``x`` of all ranks, this rank's ``counts[rank]`` elements into ``out``."""
        told = self._enter(call, x, out)
        lo = sum(counts[: self._rank])
        self._fold(told[:, 0], x, lo, lo + counts[self._rank], out, fold)
        self._comm.Barrier()

    # --------------------------------------------------------------------- pieces
    def _enter(self, call: Call, x: torch.Tensor, out: torch.Tensor) -> Any:
        """Addresses of the ranks' ``x`` and ``out``, rank by rank.

        Raises:
            CollectiveError: On all ranks, if they are in different calls.
        """
        what = zlib.crc32(repr((call.verb, str(call.dtype), call.agree)).encode())
        mine = np.array([x.data_ptr(), out.data_ptr(), what], np.int64)
        told = np.empty((self._size, 3), np.int64)
        self._comm.Allgather([mine, 3, self._long], [told, 3, self._long])
        if (told[:, 2] != what).any():
            other = int(np.nonzero(told[:, 2] != what)[0][0])
            raise CollectiveError(
                call,
                f"the ranks are in different calls, got another verb, dtype, operation "
                f"or size at position {other} of the axis than at {self._rank}, expected "
                f"the same on all. Call the collectives in the same order on all ranks.",
            )
        return told

    def _others(self) -> list[int]:
        """The other ranks, each rank beginning with another."""
        return [(self._rank + i) % self._size for i in range(1, self._size)]

    def _read(self, rank: int, address: int, start: int, into: torch.Tensor) -> None:
        width = into.element_size()
        there = address + start * width
        size = into.numel() * width
        self._system.read(self._processes[rank], there, into.data_ptr(), size)

    def _fold(
        self,
        addresses: Any,
        x: torch.Tensor,
        lo: int,
        hi: int,
        out: torch.Tensor,
        fold: Fold,
    ) -> None:
        """Elements ``lo`` to ``hi`` of all ranks, folded in the order of ranks."""
        flat = x.detach().view(-1)
        step = BLOCK // x.element_size()
        scratch = self._scratch.view(x.dtype)
        at = [int(address) for address in addresses]
        for start in range(lo, hi, step):
            stop = min(start + step, hi)
            total = out[start - lo : stop - lo]
            done = None
            for r in range(self._size):
                if r == self._rank:
                    piece = flat[start:stop]
                else:
                    piece = scratch[0 if done is None else 1, : stop - start]
                    self._read(r, at[r], start, piece)
                done = piece if done is None else fold(done, piece, out=total)
