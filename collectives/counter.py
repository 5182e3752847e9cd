"""Counting collectives: how many calls, how many bytes, by verb and mesh axis.

Every communicator adds its calls to a tally that belongs to the rank, not to a
context, so collectives of a backward pass count too. ``count_collectives`` takes the
difference of the tally between two moments.

Bytes are what one rank sends when the verb runs as a ring (n ranks; ``full`` is the
size of the gathered, or of the not yet scattered, buffer in bytes), rounded down. They
measure the program, not the backend: the size of the caller's dtype counts, whatever
travels, and all ranks of an axis report the same number except in the last two rows.

===================  ========================================
all_reduce           2 (n-1)/n  x  bytes of the tensor
all_gather           (n-1)/n  x  full
reduce_scatter       (n-1)/n  x  full
broadcast            (n-1)/n  x  bytes of the tensor
all_gather_object    (n-1)/n  x  the pickles of all ranks
barrier              0
all_to_all           what this rank sends to others
permute              what this rank sends to another
===================  ========================================
"""

from __future__ import annotations

import threading
from types import TracebackType

from dtensor.mesh.world import World, current_world

_Row = tuple[int, int]
_Rows = dict[tuple[str, str], _Row]


class Tally:
    """Calls and bytes of one rank since it started, by (verb, axis)."""

    __slots__ = ("_lock", "_rows")

    def __init__(self) -> None:
        # Backward on a GPU posts collectives from autograd's own threads.
        self._lock = threading.Lock()
        self._rows: _Rows = {}

    def add(self, verb: str, axis: str, sent: int) -> None:
        """Count one call that sends ``sent`` bytes from this rank."""
        key = (verb, axis)
        with self._lock:
            calls, total = self._rows.get(key, (0, 0))
            self._rows[key] = (calls + 1, total + sent)

    def rows(self) -> _Rows:
        """A copy of the counts: (verb, axis) -> (calls, bytes)."""
        with self._lock:
            return dict(self._rows)


def tally_of(world: World) -> Tally:
    """The tally of the rank that ``world`` belongs to."""
    found = world.memo.get("tally")
    if found is None:
        found = world.memo.setdefault("tally", Tally())
    if not isinstance(found, Tally):
        raise TypeError(f"tally_of: memo['tally'] was overwritten, got {found!r}.")
    return found


class count_collectives:
    """Count the collectives this rank calls inside a ``with`` block.

    The numbers may be read inside the block (so far) and after it. Blocks may nest.

    Example:
        >>> import torch
        >>> from dtensor.collectives.functional import all_reduce
        >>> from dtensor.collectives.simulate import simulate
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        >>> def program():
        ...     with count_collectives() as c:
        ...         all_reduce(torch.ones(8), mesh)
        ...     return c.calls("all_reduce", "tp"), c.bytes("all_reduce")
        >>> simulate(program, ranks=2)
        [(1, 32), (1, 32)]
    """

    __slots__ = ("_before", "_counted", "_tally")

    def __enter__(self) -> count_collectives:  # noqa: PYI034 - Self is of 3.11
        self._tally = tally_of(current_world())
        self._before = self._tally.rows()
        self._counted: _Rows | None = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._counted = self._difference()

    def _difference(self) -> _Rows:
        rows: _Rows = {}
        for key, (calls, sent) in self._tally.rows().items():
            calls_before, sent_before = self._before.get(key, (0, 0))
            if calls > calls_before:
                rows[key] = (calls - calls_before, sent - sent_before)
        return rows

    def rows(self) -> _Rows:
        """The counts of the block: (verb, axis) -> (calls, bytes)."""
        return self._difference() if self._counted is None else dict(self._counted)

    def _sum(self, part: int, verb: str | None, axis: str | None) -> int:
        return sum(
            row[part]
            for (v, a), row in self.rows().items()
            if verb in (None, v) and axis in (None, a)
        )

    def calls(self, verb: str | None = None, axis: str | None = None) -> int:
        """Number of calls, of one verb and on one axis where these are given."""
        return self._sum(0, verb, axis)

    def bytes(self, verb: str | None = None, axis: str | None = None) -> int:
        """Bytes this rank sent, by the formulas at the top of this file."""
        return self._sum(1, verb, axis)

    def table(self) -> str:
        """The counts as text, one line per verb and axis, largest bytes first."""
        rows = sorted(self.rows().items(), key=lambda row: (-row[1][1], row[0]))
        cells = [("verb", "axis", "calls", "bytes sent")]
        cells += [(v, a, f"{c:,}", f"{b:,}") for (v, a), (c, b) in rows]
        cells += [("total", "", f"{self.calls():,}", f"{self.bytes():,}")]
        w = [max(len(row[i]) for row in cells) for i in range(4)]
        return "\n".join(
            f"{v:<{w[0]}}  {a:<{w[1]}}  {c:>{w[2]}}  {b:>{w[3]}}".rstrip()
            for v, a, c, b in cells
        )
