"""Sequence parallelism: what works on each token alone gets a part of the tokens."""

from __future__ import annotations

from torch import nn

from dtensor.placement import Shard
from dtensor.styles.style import Layout, ParallelStyle, Port


class SequenceParallel(ParallelStyle):
    """Run a norm, a dropout or the like on activations cut along the sequence.

    ======  ===================  ===========================================
    input   Shard(sequence_dim)  brought there; a plain tensor is taken as
                                 this rank's part of the sequence
    all     Replicate            their gradients are summed over the axis
    output  Shard(sequence_dim)
    ======  ===================  ===========================================

    Between a ``RowwiseParallel(output_layouts=Shard(1))`` and a ``ColwiseParallel``
    that gets its input, the all-reduce of the pair becomes a reduce-scatter and an
    all-gather, and the activations between them are held in parts (Korthikanti et al.,
    arXiv:2205.05198, section 4). The sequence need not be a multiple of the ranks: the
    parts of a plain input are compared, by one small all-gather; a DTensor says how it
    is cut and needs none.

    Args:
        sequence_dim: The dim that is cut.
        use_local_output: Give a plain local tensor rather than a DTensor.
        mesh_dim: The mesh axis; see ``ParallelStyle``.
    """

    def __init__(
        self,
        *,
        sequence_dim: int = 1,
        use_local_output: bool = False,
        mesh_dim: str | int | None = None,
    ) -> None:
        super().__init__(mesh_dim=mesh_dim)
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output

    def layout(self, module: nn.Module) -> Layout:
        """Parameters whole, activations cut."""
        cut = Shard(self.sequence_dim)
        return Layout(
            inputs=Port(given=cut, wanted=cut),
            outputs=Port(wanted=cut, local=self.use_local_output),
        )
