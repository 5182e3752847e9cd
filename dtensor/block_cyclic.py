"""BlockCyclic: blocks dealt out in turn; written with the custom protocol alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from dtensor.collectives import functional
from dtensor.collectives.communicator import Communicator
from dtensor.custom_placement import CustomPlacement, Shape
from dtensor.errors import ShardingError
from dtensor.mesh.chunks import chunk_sizes
from dtensor.placement import Placement, Shard


@lru_cache(maxsize=4096)
def dealt(
    length: int, block: int, parts: int, zigzag: bool
) -> tuple[tuple[int, ...], ...]:
    """The indices that each rank gets, in its order.

    Example:
        >>> dealt(5, 1, 2, False)
        ((0, 2, 4), (1, 3))
        >>> dealt(8, 2, 2, True)
        ((0, 1, 6, 7), (2, 3, 4, 5))
    """
    hands: list[list[int]] = [[] for _ in range(parts)]
    for number, start in enumerate(range(0, length, block)):
        turn, place = divmod(number, parts)
        rank = parts - 1 - place if zigzag and turn % 2 else place
        hands[rank].extend(range(start, min(start + block, length)))
    return tuple(tuple(hand) for hand in hands)


@dataclass(frozen=True, slots=True)
class BlockCyclic(CustomPlacement):
    """Blocks of ``block`` indices of dim ``dim`` are dealt to the ranks in turn.

    With ``zigzag`` every other turn goes back: of 2n blocks rank i gets the blocks i
    and 2n - 1 - i, which balances the work of causal attention.

    Args:
        dim: The tensor dim.
        block: Indices per block; the last block may be short.
        zigzag: Whether the turns go to and fro.

    Example:
        >>> str(BlockCyclic(1, 4, zigzag=True))
        'Cyclic(1: 4, zigzag)'
    """

    dim: int
    block: int
    zigzag: bool = False

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ShardingError(
                f"BlockCyclic: a block has one index or more, got {self.block}. "
                "Write BlockCyclic(0, 1) to deal out single indices."
            )

    def __str__(self) -> str:
        return f"Cyclic({self.dim}: {self.block}{', zigzag' if self.zigzag else ''})"

    @property
    def along(self) -> int:
        """The dim that is dealt out."""
        return self.dim

    def at_dim(self, dim: int) -> BlockCyclic:
        """The same blocks of another dim."""
        return BlockCyclic(dim, self.block, self.zigzag)

    def on(self, dims: int) -> BlockCyclic:
        """The dim counted from the front."""
        return self.at_dim(self.dim + dims) if self.dim < 0 else self

    def check(self, what: str, shape: Shape, parts: int) -> None:
        """The dim is there."""
        if not 0 <= self.dim < len(shape):
            raise ShardingError(
                f"{what}: {self} deals out a dim that is not there, got shape {shape}. "
                f"Use a dim below {len(shape)}."
            )

    def hands(self, shape: Shape, parts: int) -> tuple[tuple[int, ...], ...]:
        """The indices of each rank."""
        return dealt(shape[self.dim], self.block, parts, self.zigzag)

    def local_shape(self, shape: Shape, parts: int, index: int) -> Shape:
        """The shape with this rank's number of indices."""
        mine = len(self.hands(shape, parts)[index])
        return (*shape[: self.dim], mine, *shape[self.dim + 1 :])

    def split(self, x: torch.Tensor, parts: int, index: int) -> torch.Tensor:
        """This rank's indices."""
        mine = self.hands(tuple(x.shape), parts)[index]
        return x.index_select(self.dim, torch.tensor(mine, dtype=torch.int64))

    def assemble(self, shards: Sequence[torch.Tensor], shape: Shape) -> torch.Tensor:
        """The shards joined, and the indices put in order."""
        return self.sorted(torch.cat(list(shards), self.dim), shape, len(shards))

    def sorted(self, x: torch.Tensor, shape: Shape, parts: int) -> torch.Tensor:
        """From rank after rank to the order of the whole."""
        order = [i for hand in self.hands(shape, parts) for i in hand]
        back = torch.argsort(torch.tensor(order, dtype=torch.int64))
        return x.index_select(self.dim, back)

    # ---- direct ways: one all-to-all from and to shards of other dims -------------------
    def sends_to(self, dst: Placement, parts: int) -> float | None:
        """All but its own part."""
        other = isinstance(dst, Shard) and dst.dim != self.dim
        return (parts - 1) / parts if other else None

    def sends_from(self, src: Placement, parts: int) -> float | None:
        """All but its own part."""
        return self.sends_to(src, parts)

    def move_to(
        self, x: torch.Tensor, dst: Placement, comm: Communicator, shape: Shape
    ) -> torch.Tensor:
        """To equal pieces of another dim."""
        assert isinstance(dst, Shard), "see sends_to"
        cut = chunk_sizes(shape[dst.dim], comm.size)
        sizes = [len(hand) for hand in self.hands(shape, comm.size)]
        joined = functional.all_to_all(x, comm, dst.dim, self.dim, cut, sizes)
        return self.sorted(joined, shape, comm.size)

    def move_from(
        self, x: torch.Tensor, src: Placement, comm: Communicator, shape: Shape
    ) -> torch.Tensor:
        """From equal pieces of another dim."""
        assert isinstance(src, Shard), "see sends_from"
        hands = self.hands(shape, comm.size)
        order = torch.tensor([i for hand in hands for i in hand], dtype=torch.int64)
        cut = chunk_sizes(shape[src.dim], comm.size)
        dealt_out = x.index_select(self.dim, order)
        sizes = [len(hand) for hand in hands]
        return functional.all_to_all(dealt_out, comm, self.dim, src.dim, sizes, cut)
