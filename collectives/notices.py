"""Notices between ranks beside the collectives, over MPI."""

from __future__ import annotations

from typing import Any

LEAVE_TAG = 32_001  # of messages on leave_channel(); nothing else uses it there


class LeaveChannel:
    """Notices between all ranks, on COMM_WORLD with a tag of their own.

    It needs no call that all ranks must make. Collectives never use COMM_WORLD.

    Args:
        module: The module ``mpi4py.MPI``.
        tag: Tag of the notices.
    """

    def __init__(self, module: Any, tag: int = LEAVE_TAG) -> None:
        self._mpi = module
        self._tag = tag
        self._world = module.COMM_WORLD
        self._sent: list[Any] = []

    def post(self, data: bytes) -> None:
        """Send ``data`` to every other rank, without waiting for anyone."""
        for rank in range(self._world.size):
            if rank != self._world.rank:
                buffer = [data, len(data), self._mpi.BYTE]
                request = self._world.Isend(buffer, rank, self._tag)
                self._sent.append((request, data))

    def poll(self) -> list[tuple[int, bytes]]:
        """(world rank, data) of every notice that has come; never waits."""
        notices: list[tuple[int, bytes]] = []
        status = self._mpi.Status()
        while True:
            message = self._world.Improbe(self._mpi.ANY_SOURCE, self._tag, status)
            if message is None:
                return notices
            data = bytearray(status.Get_count(self._mpi.BYTE))
            message.Recv([data, len(data), self._mpi.BYTE])
            notices.append((status.Get_source(), bytes(data)))
