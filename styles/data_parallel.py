"""Data parallelism as a style: the batch is split over an axis."""

from __future__ import annotations

from torch import nn

from dtensor.placement import Shard
from dtensor.styles.style import Layout, ParallelStyle


class DataParallel(ParallelStyle):
    """Parameters replicated over the axis, plain activations pieces of the batch.

    It moves nothing. It tells all styles inside the module that a plain tensor on a
    rank of this axis is a piece along ``dim``, not a copy; gradients of parameters
    are then the sum over the ranks. A rank that averages its loss over its own piece
    of the batch therefore calls ``(loss / mesh.size("dp")).backward()``. (DTensors say
    themselves how they are split, and need none of this.)

    Args:
        dim: The dim of the activations that is split.
        mesh_dim: The mesh axis.
    """

    def __init__(self, *, dim: int = 0, mesh_dim: str | int | None = "dp") -> None:
        super().__init__(mesh_dim=mesh_dim)
        self.dim = dim

    def layout(self, module: nn.Module) -> Layout:
        """Everything replicated; plain tensors inside are shards."""
        return Layout(around=Shard(self.dim))
