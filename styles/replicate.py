"""No cut at all: a module whose tensors are typed, and whole on every rank."""

from __future__ import annotations

from torch import nn

from dtensor.placement import Replicate
from dtensor.styles.style import Layout, ParallelStyle, Port


class ReplicateParallel(ParallelStyle):
    """Compute a module alike on all ranks of the axis, on DTensors.

    ======  ==========  ====================================================
    input   Replicate   brought there; a plain tensor is taken so
    all     Replicate
    output  Replicate
    ======  ==========  ====================================================

    For what is too small to cut, and for modules between styles that give DTensors: a
    DTensor that comes in sharded is gathered. A plain input gets its whole gradient on
    every rank.

    Args:
        use_local_output: Give a plain local tensor rather than a DTensor.
        mesh_dim: The mesh axis; see ``ParallelStyle``.
    """

    def __init__(
        self,
        *,
        use_local_output: bool = False,
        mesh_dim: str | int | None = None,
    ) -> None:
        super().__init__(mesh_dim=mesh_dim)
        self.use_local_output = use_local_output

    def layout(self, module: nn.Module) -> Layout:
        """Everything whole."""
        whole = Replicate()
        return Layout(
            inputs=Port(given=whole, wanted=whole),
            outputs=Port(wanted=whole, local=self.use_local_output),
        )
