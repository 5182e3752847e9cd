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

    Gradients are reduced once per backward, at its end, in one all-reduce per dtype:
    with N ranks a rank sends 2 (N-1)/N of the bytes of the parameters, and holds all of
    them, their gradients and the states of the optimizer. Inside ``no_grad_sync()``
    nothing is sent. ``fully_shard`` holds 1/N of all three and sends half as much again.

    Args:
        dim: The dim of the activations that is split.
        mean: Divide what comes back to plain outputs of the module by N: a rank that
            averages its loss over its own piece calls ``loss.backward()``. For the
            module whose output the loss is computed from; not for one inside of it.
        mesh_dim: The mesh axis.
    """

    def __init__(
        self, *, dim: int = 0, mean: bool = False, mesh_dim: str | int | None = "dp"
    ) -> None:
        super().__init__(mesh_dim=mesh_dim)
        self.dim, self.mean = dim, mean

    def layout(self, module: nn.Module) -> Layout:
        """Everything replicated; plain tensors inside are shards."""
        return Layout(around=Shard(self.dim), average=self.mean)
