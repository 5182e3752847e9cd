"""RaggedShard: pieces of a dim in any sizes; written with the custom protocol alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtensor.collectives import functional
from dtensor.collectives.communicator import Communicator
from dtensor.custom_placement import CustomPlacement, Shape
from dtensor.errors import ShardingError
from dtensor.mesh.chunks import chunk_sizes
from dtensor.placement import Placement, Shard


@dataclass(frozen=True, slots=True)
class RaggedShard(CustomPlacement):
    """Rank i of the axis holds ``sizes[i]`` indices of dim ``dim``, in rank order.

    Args:
        dim: The tensor dim.
        sizes: Length of each rank's piece, zero included; they add up to the dim.

    Example:
        >>> str(RaggedShard(0, (3, 0, 4)))
        'Ragged(0: 3, 0, 4)'
    """

    dim: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = tuple(int(n) for n in self.sizes)
        if not sizes or min(sizes) < 0:
            raise ShardingError(
                f"RaggedShard: sizes must be lengths of zero or more, got {self.sizes}."
                " Give one length per rank, such as RaggedShard(0, (3, 5))."
            )
        object.__setattr__(self, "sizes", sizes)

    def __str__(self) -> str:
        return f"Ragged({self.dim}: {', '.join(map(str, self.sizes))})"

    @property
    def along(self) -> int:
        """The dim that is cut."""
        return self.dim

    def at_dim(self, dim: int) -> RaggedShard:
        """The same sizes along another dim."""
        return RaggedShard(dim, self.sizes)

    def on(self, dims: int) -> RaggedShard:
        """The dim counted from the front."""
        return RaggedShard(self.dim + dims, self.sizes) if self.dim < 0 else self

    def check(self, what: str, shape: Shape, parts: int) -> None:
        """The dim is there, there is a size per rank, and they add up."""
        there = 0 <= self.dim < len(shape)
        if not there or len(self.sizes) != parts or sum(self.sizes) != shape[self.dim]:
            got = f"dim {self.dim} of length {shape[self.dim]}" if there else "no dim"
            raise ShardingError(
                f"{what}: {self} does not fit, got {got} of shape {shape} on an axis of "
                f"{parts} ranks, expected {parts} sizes that add up to the dim. Give "
                "the length of every rank's piece."
            )

    def local_shape(self, shape: Shape, parts: int, index: int) -> Shape:
        """The shape with this rank's size in the place of the dim."""
        return (*shape[: self.dim], self.sizes[index], *shape[self.dim + 1 :])

    def split(self, x: torch.Tensor, parts: int, index: int) -> torch.Tensor:
        """The piece between its neighbours'."""
        return x.narrow(self.dim, sum(self.sizes[:index]), self.sizes[index])

    def assemble(self, shards: Sequence[torch.Tensor], shape: Shape) -> torch.Tensor:
        """The pieces, joined."""
        return torch.cat(list(shards), self.dim)

    # ---- direct ways: one all-to-all from and to every Shard ---------------------------
    def sends_to(self, dst: Placement, parts: int) -> float | None:
        """All but its own part."""
        return (parts - 1) / parts if isinstance(dst, Shard) else None

    def sends_from(self, src: Placement, parts: int) -> float | None:
        """All but its own part."""
        return self.sends_to(src, parts)

    def move_to(
        self, x: torch.Tensor, dst: Placement, comm: Communicator, shape: Shape
    ) -> torch.Tensor:
        """To equal pieces of any dim."""
        assert isinstance(dst, Shard), "see sends_to"
        cut = chunk_sizes(shape[dst.dim], comm.size)
        if dst.dim == self.dim:
            return recut(x, comm, self.dim, self.sizes, cut)
        return functional.all_to_all(x, comm, dst.dim, self.dim, cut, self.sizes)

    def move_from(
        self, x: torch.Tensor, src: Placement, comm: Communicator, shape: Shape
    ) -> torch.Tensor:
        """From equal pieces of any dim."""
        assert isinstance(src, Shard), "see sends_from"
        cut = chunk_sizes(shape[src.dim], comm.size)
        if src.dim == self.dim:
            return recut(x, comm, self.dim, cut, self.sizes)
        return functional.all_to_all(x, comm, self.dim, src.dim, self.sizes, cut)


def recut(
    x: torch.Tensor,
    comm: Communicator,
    dim: int,
    before: Sequence[int],
    after: Sequence[int],
) -> torch.Tensor:
    """The pieces of a dim in other sizes."""

    def overlap(a: Sequence[int], i: int, b: Sequence[int], j: int) -> int:
        low = max(sum(a[:i]), sum(b[:j]))
        return max(0, min(sum(a[: i + 1]), sum(b[: j + 1])) - low)

    ranks = range(comm.size)
    sent = [overlap(before, comm.rank, after, j) for j in ranks]
    came = [overlap(before, i, after, comm.rank) for i in ranks]
    return functional.all_to_all(x, comm, dim, dim, sent, came)
