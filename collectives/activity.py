"""What this process waits for, for a watcher on another thread to read."""

from __future__ import annotations

import time

from dtensor.collectives.communicator import Call


class Activity:
    """What this process waits for in MPI; plain attributes, written around each call.

    Attributes:
        verb: The collective, ``"connect"`` while a communicator is made, None if idle.
        axis: Label of its mesh axis.
        sequence: Number of the call among those of the same ranks, from one.
        ranks: World ranks that take part.
        entered: ``time.monotonic()`` when it was entered, 0.0 when idle.
    """

    __slots__ = ("axis", "entered", "ranks", "sequence", "verb")

    def __init__(self) -> None:
        self.verb: str | None = None
        self.axis = ""
        self.sequence = 0
        self.ranks: tuple[int, ...] = ()
        self.entered = 0.0

    def enter(self, call: Call, ranks: tuple[int, ...]) -> None:
        """The calling thread goes into MPI."""
        self.axis = call.axis
        self.sequence = call.sequence
        self.ranks = ranks
        self.entered = time.monotonic()
        self.verb = call.verb

    def leave(self) -> None:
        """It is back."""
        self.verb = None
        self.entered = 0.0


activity = Activity()
