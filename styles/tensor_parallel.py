"""Tensor-parallel linears and embeddings: cut by output, or by input.

``Colwise`` and ``Rowwise`` take and give DTensors and leave the reduction to the
author of the model. ``ColwiseParallel`` and ``RowwiseParallel`` have PyTorch's names
and arguments and, by default, keep the activations between the modules plain. A pair
of either kind costs one all-reduce forward and one backward (Shoeybi et al.,
arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from torch import nn

from dtensor.errors import ShardingError
from dtensor.placement import Placement, Replicate, Shard
from dtensor.styles.heads import SharedHeads, check_heads, check_shared, head_width
from dtensor.styles.lending import Lending
from dtensor.styles.style import Layout, ParallelStyle, Port


class Colwise(ParallelStyle):
    """Cut a linear or an embedding by its output features; DTensors in and out.

    ======  ==================  ===========================================
    input   Replicate           brought there; a plain tensor is taken so
    weight  Shard(0)            of a linear; an embedding's is ``Shard(1)``
    bias    Shard(0)
    output  Shard(-1)
    ======  ==================  ===========================================

    A plain input gets its whole gradient on every rank.

    Args:
        heads: The output features are so many attention heads; a cut through a head is
            an error.
        kv_heads: They are heads of keys or values. Where the ranks do not divide them,
            weight and output are Replicate: every rank computes all heads.
        mesh_dim: The mesh axis; see ``ParallelStyle``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from dtensor.collectives.simulate import simulate
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> from dtensor.styles.parallelize import parallelize_module
        >>> def program():
        ...     with init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)):
        ...         linear = parallelize_module(nn.Linear(4, 6), Colwise)
        ...     return linear(torch.ones(3, 4)).placements
        >>> simulate(program, ranks=2)
        [(Shard(dim=1),), (Shard(dim=1),)]
    """

    def __init__(
        self,
        *,
        heads: int | None = None,
        kv_heads: int | None = None,
        mesh_dim: str | int | None = None,
    ) -> None:
        super().__init__(mesh_dim=mesh_dim)
        self.heads, self.kv_heads = heads, kv_heads

    def layout(self, module: nn.Module) -> Layout:
        """Weights by output features, input whole."""
        whole = Port(given=Replicate(), wanted=Replicate())
        return Layout(_by_output(self, module), inputs=whole)

    def layout_over(self, module: nn.Module, ranks: int) -> Layout:
        """Weights by output features, between heads."""
        layout = self.layout(module)
        if _fits_heads(self, module, self.heads, self.kv_heads, ranks):
            return layout
        return Layout(inputs=layout.inputs)


class Rowwise(ParallelStyle):
    """Cut a linear by its input features or an embedding by its entries.

    ======  =====================  =========================================
    input   Shard(-1)              of a linear; an embedding's is Replicate.
                                   A plain tensor is taken as Replicate.
    weight  Shard(1)               of a linear; an embedding's is Shard(0)
    bias    Replicate              added once
    output  Partial                ``y.redistribute(Replicate())`` reduces it
    ======  =====================  =========================================

    Args:
        mesh_dim: The mesh axis; see ``ParallelStyle``.
    """

    def layout(self, module: nn.Module) -> Layout:
        """Weights by input features; the output stays Partial."""
        parameters, wanted = _by_input(self, module)
        return Layout(parameters, inputs=Port(given=Replicate(), wanted=wanted))


class ColwiseParallel(ParallelStyle):
    """PyTorch's ``ColwiseParallel``: cut by output features, local activations.

    With the defaults the input passes Megatron's f (identity forward, all-reduce
    backward) and the output is this rank's share of the features.

    Args:
        input_layouts: What the plain input is along the axis; ``Replicate()`` by
            default. A DTensor is brought to Replicate from wherever it is.
        output_layouts: Placement of the output; ``Shard(-1)`` by default.
        use_local_output: Give a plain local tensor rather than a DTensor.
        heads: The output features are so many attention heads; a cut through a head is
            an error.
        kv_heads: They are heads of keys or values, which ranks may share: with fewer
            heads than ranks all ranks store them, and a local output is the one head
            that this rank's queries need. A DTensor output is then Replicate.
        mesh_dim: The mesh axis; see ``ParallelStyle``.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        heads: int | None = None,
        kv_heads: int | None = None,
        mesh_dim: str | int | None = None,
    ) -> None:
        super().__init__(mesh_dim=mesh_dim)
        self.heads, self.kv_heads = heads, kv_heads
        self.input_layouts = self._placement(
            "input_layouts", input_layouts, Replicate()
        )
        self.output_layouts = self._placement(
            "output_layouts", output_layouts, Shard(-1)
        )
        self.use_local_output = use_local_output

    def layout(self, module: nn.Module) -> Layout:
        """Weights by output features."""
        size = _feature_size(module, self.input_layouts)
        return Layout(
            _by_output(self, module),
            inputs=Port(self.input_layouts, Replicate(), size),
            outputs=Port(wanted=self.output_layouts, local=self.use_local_output),
        )

    def layout_over(self, module: nn.Module, ranks: int) -> Layout:
        """Weights by output features, between heads."""
        layout = self.layout(module)
        if _fits_heads(self, module, self.heads, self.kv_heads, ranks):
            return layout
        assert self.kv_heads is not None, "other heads fit, or are refused"
        cut = self.output_layouts == Shard(-1)
        if self.use_local_output and cut:
            check_shared(self, self.kv_heads, ranks)
            form: Lending = SharedHeads(self.kv_heads)
            lent = {"weight": form, "bias": form}
            return Layout(inputs=layout.inputs, outputs=layout.outputs, lent=lent)
        there = Replicate() if cut else self.output_layouts
        out = Port(wanted=there, local=self.use_local_output)
        return Layout(inputs=layout.inputs, outputs=out)


class RowwiseParallel(ParallelStyle):
    """PyTorch's ``RowwiseParallel``: cut by input features, local activations.

    With the defaults the input is this rank's share of the features and the output
    passes Megatron's g (all-reduce forward, identity backward). The bias is added
    once.

    Args:
        input_layouts: What the plain input is along the axis; ``Shard(-1)`` by
            default. Give ``Replicate()`` for an embedding whose ids all ranks hold.
        output_layouts: Placement of the output; ``Replicate()`` by default.
        use_local_output: Give a plain local tensor rather than a DTensor.
        mesh_dim: The mesh axis; see ``ParallelStyle``.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        mesh_dim: str | int | None = None,
    ) -> None:
        super().__init__(mesh_dim=mesh_dim)
        self.input_layouts = self._placement("input_layouts", input_layouts, Shard(-1))
        self.output_layouts = self._placement(
            "output_layouts", output_layouts, Replicate()
        )
        self.use_local_output = use_local_output

    def layout(self, module: nn.Module) -> Layout:
        """Weights by input features."""
        parameters, wanted = _by_input(self, module)
        size = _feature_size(module, self.input_layouts)
        return Layout(
            parameters,
            inputs=Port(self.input_layouts, wanted, size),
            outputs=Port(wanted=self.output_layouts, local=self.use_local_output),
        )


def _fits_heads(
    style: ParallelStyle,
    module: nn.Module,
    heads: int | None,
    kv_heads: int | None,
    ranks: int,
) -> bool:
    """Whether the features can be cut evenly, between heads where they are heads."""
    if heads is not None and kv_heads is not None:
        raise ShardingError(
            f"{type(style).__name__}: the features are heads of queries or of keys, got "
            f"heads {heads} and kv_heads {kv_heads}, expected one of them. FusedQKV is "
            f"for a linear that makes both."
        )
    if heads is not None:
        head_width(style, module, heads)
        check_heads(style, heads, ranks)
    if kv_heads is not None:
        head_width(style, module, kv_heads, "kv_heads")
        return kv_heads % ranks == 0
    return True


def _by_output(style: ParallelStyle, module: nn.Module) -> dict[str, Placement]:
    if isinstance(module, nn.Embedding):
        return {"weight": Shard(1)}
    if isinstance(module, nn.Linear):
        return {"weight": Shard(0), "bias": Shard(0)}
    raise _unknown(style, module)


def _by_input(
    style: ParallelStyle, module: nn.Module
) -> tuple[dict[str, Placement], Placement]:
    """Placements of the parameters, and where the input has to be."""
    if isinstance(module, nn.Embedding):
        return {"weight": Shard(0)}, Replicate()
    if isinstance(module, nn.Linear):
        return {"weight": Shard(1)}, Shard(-1)
    raise _unknown(style, module)


def _feature_size(module: nn.Module, layout: Placement) -> int | None:
    """Global length of the dim that ``layout`` shards, where the module knows it."""
    if isinstance(module, nn.Linear) and layout == Shard(-1):
        return module.in_features
    return None


def _unknown(style: ParallelStyle, module: nn.Module) -> TypeError:
    name = type(style).__name__
    return TypeError(
        f"{name}: no layout for this kind of module, got {type(module).__name__}, "
        f"expected nn.Linear or nn.Embedding. Name the linears inside it in the plan, "
        f"or write a ParallelStyle whose layout(module) says how it lies."
    )
