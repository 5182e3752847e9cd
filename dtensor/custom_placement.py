"""The protocol of user-defined placements: how one mesh axis deals out a tensor.

Subclass ``CustomPlacement`` as a frozen dataclass and say three things: the shape of
each shard, how a shard is taken from the whole, and how the whole is put together from
the shards, in torch functions. Redistribution, gradients and second derivatives follow.
Direct ways to other placements, and what ops may do, are optional.

A custom placement deals out what the built-in placements of the other axes left on a
rank; of several custom axes, the first one first. ``dtensor.testing.check_placement``
checks the laws.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dtensor.placement import Placement, Shard

if TYPE_CHECKING:
    from dtensor.collectives.communicator import Communicator

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Where a slice of a dealt-out dim lies on every rank, and how that is placed."""

    placement: Placement
    start: int
    count: int


class CustomPlacement(Placement):
    """Base of user-defined placements.

    The laws, for every shape that ``check`` lets pass and every number of ranks n:

    * local shape: ``split(x, n, i).shape == local_shape(x.shape, n, i)``;
    * round trip: ``assemble([split(x, n, i) for i in range(n)], x.shape) == x``;
    * each element of the whole lies on exactly one rank, so that a shard of the
      cotangent is the cotangent of the shard.

    Attributes:
        along: The dim whose indices are dealt out, or None. With a dim, ops may keep
            the placement wherever a ``Shard`` of that dim could stay, since they
            treat each index by itself.
    """

    __slots__ = ()

    @property
    def along(self) -> int | None:
        """The dim whose indices are dealt out; None keeps ops off."""
        return None

    def at_dim(self, dim: int) -> CustomPlacement:
        """The same placement of another dim; needed where ``along`` is not None."""
        raise NotImplementedError

    def on(self, dims: int) -> CustomPlacement:
        """The placement for a tensor of so many dims: negative dims made positive."""
        return self

    def check(self, what: str, shape: Shape, parts: int) -> None:
        """Raise ShardingError where a shape cannot be dealt to so many ranks."""

    def local_shape(self, shape: Shape, parts: int, index: int) -> Shape:
        """Shape of the shard of rank ``index`` of ``parts``."""
        raise NotImplementedError

    def split(self, x: torch.Tensor, parts: int, index: int) -> torch.Tensor:
        """The shard of rank ``index``, by differentiable torch functions."""
        raise NotImplementedError

    def assemble(self, shards: Sequence[torch.Tensor], shape: Shape) -> torch.Tensor:
        """The whole from all shards in rank order, by differentiable functions."""
        raise NotImplementedError

    # ---- what ops keep, optional ------------------------------------------------------
    def slice_of(self, start: int, count: int, parts: int) -> Run | None:
        """What a slice along the dim is, where each rank has a run of it, or None.

        Args:
            start: First index of the slice.
            count: Number of indices.
            parts: Number of ranks.
        """
        return None

    def viewed(self, old: Shape, new: Shape, parts: int) -> Placement | None:
        """What a view leaves of it without moving anything, or None.

        Args:
            old: The dims, the one that is dealt out among them, that the view joins
                and divides anew; ``along`` counts from the first of them.
            new: What they become; the result's dim counts from the first.
            parts: Number of ranks.
        """
        return None

    # ---- direct ways, optional --------------------------------------------------------
    def sends_to(self, dst: Placement, parts: int) -> float | None:
        """What part of its shard a rank sends on a direct way to ``dst``, if any."""
        return None

    def move_to(
        self, x: torch.Tensor, dst: Placement, comm: Communicator, shape: Shape
    ) -> torch.Tensor:
        """The direct way, by the differentiable verbs of ``collectives.functional``.

        Args:
            x: This rank's shard.
            dst: The placement to go to.
            comm: The ranks of the axis.
            shape: Shape of the whole that is dealt out.
        """
        raise NotImplementedError

    def sends_from(self, src: Placement, parts: int) -> float | None:
        """What part of its shard a rank sends on a direct way from ``src``, if any."""
        return None

    def move_from(
        self, x: torch.Tensor, src: Placement, comm: Communicator, shape: Shape
    ) -> torch.Tensor:
        """The direct way from ``src``; see ``move_to``."""
        raise NotImplementedError


def lies_along(placements: Iterable[Placement], dims: Collection[int]) -> bool:
    """Whether ranks hold parts of some of these dims, by built-in or own placements."""
    return any(
        p.dim in dims
        if isinstance(p, Shard)
        else isinstance(p, CustomPlacement) and p.along in dims
        for p in placements
    )
