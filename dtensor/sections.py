"""Sections: a dim made of stretches that are each cut over the ranks.

Queries, keys and values that come out of one linear lie one after the other, and so do
the two halves of a gated feed-forward. Cut as one dim, a rank would get queries only;
cut by sections it gets its part of each. Written with the custom protocol alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtensor.custom_placement import CustomPlacement, Run, Shape
from dtensor.errors import ShardingError
from dtensor.placement import Placement, Shard


@dataclass(frozen=True, slots=True)
class Sections(CustomPlacement):
    """Dim ``dim`` is a row of sections; rank i holds the i-th piece of each, in order.

    A slice of a whole section, as ``split`` takes it, is an ordinary shard of that
    section, and so is the middle dim of a view that gives sections of equal length a
    dim of their own: nothing moves.

    Args:
        dim: The tensor dim.
        sizes: Length of each section; the ranks divide each of them.

    Example:
        >>> str(Sections(0, (8, 4, 4)))
        'Sections(0: 8, 4, 4)'
    """

    dim: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = tuple(int(n) for n in self.sizes)
        if not sizes or min(sizes) < 1:
            raise ShardingError(
                f"Sections: sizes must be lengths of one or more, got {self.sizes}. "
                "Give one length per section, such as Sections(0, (8, 4, 4))."
            )
        object.__setattr__(self, "sizes", sizes)

    def __str__(self) -> str:
        return f"Sections({self.dim}: {', '.join(map(str, self.sizes))})"

    @property
    def along(self) -> int:
        """The dim that is cut."""
        return self.dim

    def at_dim(self, dim: int) -> Sections:
        """The same sections along another dim."""
        return Sections(dim, self.sizes)

    def on(self, dims: int) -> Sections:
        """The dim counted from the front."""
        return self.at_dim(self.dim + dims) if self.dim < 0 else self

    def check(self, what: str, shape: Shape, parts: int) -> None:
        """The sections add up to the dim, and the ranks divide each of them."""
        there = 0 <= self.dim < len(shape)
        if not there or sum(self.sizes) != shape[self.dim]:
            got = f"dim {self.dim} of length {shape[self.dim]}" if there else "no dim"
            raise ShardingError(
                f"{what}: {self} does not fit, got {got} of shape {shape}, expected "
                f"sections that add up to the dim. Give the length of every section; "
                "where another axis cuts the dim, cut another dim by it."
            )
        if any(n % parts for n in self.sizes):
            raise ShardingError(
                f"{what}: {self} does not fit, got {parts} ranks, expected a number "
                f"that divides every section. Use a mesh axis of another size."
            )

    def local_shape(self, shape: Shape, parts: int, index: int) -> Shape:
        """The shape with an equal share in the place of the dim."""
        return (*shape[: self.dim], shape[self.dim] // parts, *shape[self.dim + 1 :])

    def split(self, x: torch.Tensor, parts: int, index: int) -> torch.Tensor:
        """This rank's piece of each section, joined."""
        pieces, start = [], 0
        for size in self.sizes:
            mine = size // parts
            pieces.append(x.narrow(self.dim, start + index * mine, mine))
            start += size
        return torch.cat(pieces, self.dim)

    def assemble(self, shards: Sequence[torch.Tensor], shape: Shape) -> torch.Tensor:
        """The pieces of each section joined, then the sections."""
        parts = len(shards)
        lengths = [n // parts for n in self.sizes]
        rows = [torch.split(s, lengths, self.dim) for s in shards]
        return torch.cat([p for section in zip(*rows) for p in section], self.dim)

    # ---- what ops keep ----------------------------------------------------------------
    def slice_of(self, start: int, count: int, parts: int) -> Run | None:
        """Whole sections are this rank's pieces of them."""
        ends = [0]
        for size in self.sizes:
            ends.append(ends[-1] + size)
        if count == 0 or start not in ends or start + count not in ends:
            return None
        taken = self.sizes[ends.index(start) : ends.index(start + count)]
        there = Shard(self.dim) if len(taken) == 1 else Sections(self.dim, taken)
        return Run(there, start // parts, count // parts)

    def viewed(self, old: Shape, new: Shape, parts: int) -> Placement | None:
        """Equal sections that get a dim of their own leave a shard of the next one."""
        if old[self.dim] != sum(self.sizes) or any(
            n != 1 for d, n in enumerate(old) if d != self.dim
        ):
            return None
        places = [d for d, n in enumerate(new) if n != 1]
        if len(set(self.sizes)) != 1 or len(places) < 2:
            return None
        first, second = places[:2]
        if new[first] != len(self.sizes) or new[second] % parts:
            return None
        return Shard(second)
