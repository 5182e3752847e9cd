"""Large host buffers, kept for the next result of their size.

The system hands out memory page by page, each cleared when it is first written, and
takes it back when a tensor goes: for a result that is made at every step this costs as
much as filling it. Buffers of results are kept here instead, and given out again once
nobody holds them: neither a tensor (the storage counts those) nor Python.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch

SMALLEST = 1 << 20  # bytes below which torch's allocator does not ask the system
LIMIT = 512 << 20  # bytes kept at most, in use and idle ones together


class Pool:
    """Buffers that come back by themselves.

    Args:
        limit: Bytes that are kept; what goes beyond is torch's own to free.

    Attributes:
        held: Bytes that are kept now.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.held = 0
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: dict[int, list[torch.Tensor]] = {}  # by bytes
        self._unused = _holders(torch.empty(1, dtype=torch.uint8, device="cpu"))

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """``count`` elements, not initialised, in memory that nobody else holds.

        Args:
            count: Elements.
            dtype: Theirs.

        Returns:
            A 1-D tensor on the CPU.
        """
        size = count * dtype.itemsize
        if size < SMALLEST or size > self._limit or self._unused is None:
            return torch.empty(count, dtype=dtype, device="cpu")
        with self._lock:
            buffer = self._idle(size)
            if buffer is None:
                buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
                self._keep(buffer, size)
            out = torch.empty(0, dtype=dtype, device="cpu")
            return out.set_(buffer.untyped_storage(), 0, (count,), (1,))

    def _idle(self, size: int) -> torch.Tensor | None:
        """A kept buffer of ``size`` bytes that nobody holds."""
        for buffer in list(self._kept.get(size, ())):
            if buffer.untyped_storage().nbytes() != size:  # a holder resized it
                self._drop(buffer, size)
            elif _holders(buffer) == self._unused:
                return buffer
        return None

    def _keep(self, buffer: torch.Tensor, size: int) -> None:
        """Keep a buffer if there is room, or can be made by dropping idle ones."""
        for other, kept in list(self._kept.items()):
            for idle in list(kept):
                if self.held + size > self._limit and _holders(idle) == self._unused:
                    self._drop(idle, other)
        if self.held + size <= self._limit:
            self._kept.setdefault(size, []).append(buffer)
            self.held += size

    def _drop(self, buffer: torch.Tensor, size: int) -> None:
        kept = self._kept[size]
        kept[:] = [other for other in kept if other is not buffer]
        self.held -= size


def _holders(buffer: torch.Tensor) -> tuple[int, int] | None:
    """Who holds the memory: uses in C++ and references of Python, with those made here.

    None if this torch does not tell.
    """
    count: Any = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return None
    storage = buffer.untyped_storage()
    return int(count(storage._cdata)), sys.getrefcount(storage)


_pool = Pool()


def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
    """``count`` elements on the CPU, not initialised, from this process's pool."""
    return _pool.empty(count, dtype)
