"""The thread that looks after calls of NCCL: they fail, or wait, while nobody looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dtensor.collectives.activity import activity
from dtensor.collectives.communicator import Call

if TYPE_CHECKING:
    from dtensor.collectives.nccl import NCCLChannel

LOOK = 0.5  # seconds between two looks


class Watch:
    """The thread that looks at calls under way, twice a second.

    An error gives its communicator up, so that the host waits no longer. A call that
    takes long is shown in ``activity``, where the watcher of ranks looks for one
    that waits in vain.

    Args:
        channels: Gives the open ones.
    """

    def __init__(self, channels: Callable[[], Sequence[NCCLChannel]]) -> None:
        self._channels = channels
        self._stop = threading.Event()
        self._shown: Call | None = None
        self._thread = threading.Thread(
            target=self._run, name="dtensor-nccl-watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join(2 * LOOK)

    def _run(self) -> None:
        while not self._stop.wait(LOOK):
            self.look(list(self._channels()), time.monotonic())

    def look(self, channels: Sequence[NCCLChannel], now: float) -> None:
        """One look.

        Args:
            channels: The open ones.
            now: ``time.monotonic()``.
        """
        waiting = None
        for channel in channels:
            if channel.failure is None:
                found = channel.poll()
                if found is not None:
                    channel.failure = found
                    channel.abort()
            last = channel.last
            if last is not None and now - last[2] >= LOOK:
                if channel.streams.passed(last[1]):
                    channel.last = None
                elif waiting is None or last[2] < waiting[1]:
                    waiting = last[0], last[2], channel.ranks
        shown = self._shown
        if waiting is None:
            if shown is not None and activity.sequence == shown.sequence:
                activity.leave()
            self._shown = None
        elif activity.verb is None:
            activity.enter(waiting[0], waiting[2])
            activity.entered = waiting[1]
            self._shown = waiting[0]
