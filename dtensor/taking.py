"""Taking elements along a sharded dim: only those that change owner move.

What is taken is described by progressions: element ``at + i`` of the result is element
``start + i * step`` of the source. A slice is one progression, ``flip`` one that runs
backwards, ``roll`` two. Source and result are cut by the same mesh axes, each by the law
of ``torch.chunk``, so every rank knows from lengths alone what it sends to whom; one
all-to-all per dim does it, and none where every rank has what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtensor.collectives import functional
from dtensor.collectives.communicator import Communicator
from dtensor.moves import comm_over, pieces_of
from dtensor.placement import axes_of
from dtensor.spec import Spec


@dataclass(frozen=True, slots=True)
class Progression:
    """Indices ``start``, ``start + step`` ..., ``count`` of them, from ``at`` on."""

    at: int
    start: int
    count: int
    step: int = 1

    def read_from(self, low: int, high: int) -> tuple[int, int]:
        """The range of the result that is read from ``low <= index < high``."""
        if self.step > 0:
            first = -(-(low - self.start) // self.step)
            last = -(-(high - self.start) // self.step)
        else:
            first = (self.start - high) // -self.step + 1
            last = (self.start - low) // -self.step + 1
        first = min(max(first, 0), self.count)
        last = min(max(last, first), self.count)
        return self.at + first, self.at + last

    def source(self, k: int) -> int:
        """The index that element ``k`` of the result has in the source."""
        return self.start + (k - self.at) * self.step


@dataclass(frozen=True, slots=True)
class Wire:
    """A stretch of one result that goes from one rank to another.

    Attributes:
        result: Which of the results it belongs to.
        at: Its first element there.
        count: Number of elements.
        start, step: Where it lies in the source.
    """

    result: int
    at: int
    count: int
    start: int
    step: int


def blocks_of(length: int, parts: Sequence[int]) -> list[tuple[int, int]]:
    """The (start, stop) of each piece of a dim that axes cut one inside the other."""
    found, start = [], 0
    for n in pieces_of(length, parts):
        found.append((start, start + n))
        start += n
    return found


def wires(
    results: Sequence[tuple[int, Sequence[Progression]]],
    held: tuple[int, int],
    wanted: Sequence[tuple[int, int]],
) -> list[Wire]:
    """What the holder of one block sends to the owner of a block of each result."""
    found = []
    for j, (_, progressions) in enumerate(results):
        low, high = wanted[j]
        for p in progressions:
            first, last = p.read_from(*held)
            first, last = max(first, low), min(last, high)
            if first < last:
                found.append(Wire(j, first, last - first, p.source(first), p.step))
    return found


@dataclass(frozen=True, slots=True)
class Take:
    """One rank's part in taking elements along one dim.

    Attributes:
        comm: The ranks that cut the dim, or None where nothing has to move.
        held: The block of the source that this rank has.
        outgoing: What this rank sends, by receiver.
        incoming: What it receives, by sender.
        results: Number of results.
        moved: Share of the elements of all results that change owner.
    """

    comm: Communicator | None
    held: tuple[int, int]
    outgoing: tuple[tuple[Wire, ...], ...]
    incoming: tuple[tuple[Wire, ...], ...]
    results: int
    moved: float

    @property
    def sent(self) -> tuple[int, ...]:
        """Length that each rank gets."""
        return tuple(sum(w.count for w in ws) for ws in self.outgoing)

    @property
    def received(self) -> tuple[int, ...]:
        """Length that each rank gives."""
        return tuple(sum(w.count for w in ws) for ws in self.incoming)

    def mine(self) -> slice:
        """Where what others and this rank want lies in the shard; of one slice only."""
        ws = [w for row in self.outgoing for w in row]
        if not ws:
            return slice(0, 0)
        start = ws[0].start - self.held[0]
        count = sum(w.count for w in ws)
        return slice(start, start + (count - 1) * ws[0].step + 1, ws[0].step)

    def span(self) -> tuple[int, int]:
        """The (start, stop) of the result that this rank's block has; of one slice."""
        ws = [w for row in self.outgoing for w in row]
        return (ws[0].at, ws[-1].at + ws[-1].count) if ws else (0, 0)

    def move(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """What ``mine`` cut out of the shards, to the owners in the result."""
        if self.comm is None:
            return x
        return functional.all_to_all(x, self.comm, dim, dim, self.sent, self.received)

    def move_back(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The opposite way: shards of the result, to where the source lies."""
        if self.comm is None:
            return x
        return functional.all_to_all(x, self.comm, dim, dim, self.received, self.sent)

    def __call__(self, x: torch.Tensor, dim: int) -> list[torch.Tensor]:
        """All results of this rank; views of ``x`` where nothing has to move."""
        ranges = [w for row in self.outgoing for w in row]
        if self.comm is None:
            return self._joined(self._cut(x, dim, ranges), ranges, x, dim)
        pieces = self._cut(x, dim, ranges)
        packed = joined(pieces, x, dim)
        came = self.move(packed, dim)
        arrived = [w for row in self.incoming for w in row]
        if self.results == 1 and len(arrived) == 1:
            return [came]
        parts = came.split_with_sizes([w.count for w in arrived], dim)
        made = self._joined(list(parts), arrived, came, dim)
        # Each result is written by itself: it must not share memory with another.
        return [p.clone() if p._is_view() else p for p in made]

    def _cut(
        self, x: torch.Tensor, dim: int, ranges: Sequence[Wire]
    ) -> list[torch.Tensor]:
        """Stretches of the shard; where they tile it, by one split."""
        low, high = self.held
        at, sizes = low, []
        for w in ranges:
            if w.step != 1 or w.start < at:
                break
            sizes += [w.start - at, w.count]
            at = w.start + w.count
        else:
            if len(ranges) > 1:
                tiles = x.split_with_sizes([*sizes, high - at], dim)
                return list(tiles[1 : 2 * len(ranges) : 2])
        return [stretch(x, dim, w, low) for w in ranges]

    def _joined(
        self,
        parts: list[torch.Tensor],
        ws: Sequence[Wire],
        like: torch.Tensor,
        dim: int,
    ) -> list[torch.Tensor]:
        """The stretches that came, put together in the order of the results."""
        rows: list[list[tuple[int, torch.Tensor]]] = [[] for _ in range(self.results)]
        for w, part in zip(ws, parts, strict=True):
            rows[w.result].append((w.at, part))
        out = []
        for row in rows:
            row.sort(key=lambda item: item[0])
            out.append(joined([part for _, part in row], like, dim))
        return out


def stretch(x: torch.Tensor, dim: int, w: Wire, low: int) -> torch.Tensor:
    """One stretch of a shard whose first element is number ``low``."""
    if w.step == 1:
        return x.narrow(dim, w.start - low, w.count)
    last = w.start + (w.count - 1) * w.step
    first = min(w.start, last) - low
    at = [slice(None)] * dim
    out = x[(*at, slice(first, abs(last - w.start) + first + 1, abs(w.step)))]
    return out if w.step > 0 else out.flip(dim)


def joined(parts: list[torch.Tensor], like: torch.Tensor, dim: int) -> torch.Tensor:
    """Parts along a dim as one tensor; an empty one where there are none."""
    if not parts:
        return like.narrow(dim, 0, 0)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def take_plan(
    spec: Spec, dim: int, results: Sequence[tuple[int, Sequence[Progression]]]
) -> Take:
    """Plan how this rank takes elements along ``dim``; communicates nothing.

    Args:
        spec: Of the source; the axes that cut ``dim`` cut the results alike.
        dim: The dim.
        results: For each result its length and what it takes, in ascending order.
    """
    axes = axes_of(spec.placements, dim)
    parts = [spec.mesh.shape[a] for a in axes]
    held = blocks_of(spec.shape[dim], parts)
    wanted = [blocks_of(length, parts) for length, _ in results]
    total = sum(length for length, _ in results)
    stays = 0
    for r, block in enumerate(held):
        own = [w[r] for w in wanted]
        stays += sum(w.count for w in wires(results, block, own))
    moved = (total - stays) / total if total else 0.0
    comm = comm_over(spec.world, spec.mesh, axes) if axes else None
    me = 0 if comm is None else comm.rank
    if moved == 0.0:
        own = [w[me] for w in wanted]
        kept = (tuple(wires(results, held[me], own)),)
        return Take(None, held[me], kept, kept, len(results), 0.0)
    outgoing, incoming = [], []
    for r in range(len(held)):
        outgoing.append(tuple(wires(results, held[me], [w[r] for w in wanted])))
        incoming.append(tuple(wires(results, held[r], [w[me] for w in wanted])))
    return Take(comm, held[me], tuple(outgoing), tuple(incoming), len(results), moved)
