"""Attention heads: projections whose output features are cut between heads.

A rank of a tensor-parallel axis computes with whole heads of queries, keys and values.
``heads=`` and ``kv_heads=`` of the column styles say that a linear's features are heads,
``FusedQKV`` that one linear makes all three. Where there are fewer heads of keys and
values than ranks (grouped-query attention, Ainslie et al., arXiv:2305.13245), ranks
share a head: each computes the one that its queries need, and the gradients add up.

Parameters always have the shape of the one-process module, so states are saved and
loaded as everywhere. How a shared head is stored:

==================  =================================  ===============================
projection          stored                             in a call
==================  =================================  ===============================
keys or values      Replicate: each rank has all       its head, by slicing; gradients
                    ``kv_heads``                       are summed in the leaf bucket
fused               Sections: a share of each section  keys and values gathered, then
                                                       its head; gradients scattered
==================  =================================  ===============================
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dtensor.collectives.functional import all_gather
from dtensor.errors import ShardingError
from dtensor.placement import Placement, Replicate, Shard
from dtensor.redistribute import alias, plain
from dtensor.sections import Sections
from dtensor.spec import Spec
from dtensor.styles.lending import Lending
from dtensor.styles.style import Layout, ParallelStyle, Port
from dtensor.tensor import DTensor, typed


# ---- forms of shared heads -----------------------------------------------------------
@dataclass(frozen=True)
class SharedHeads(Lending):
    """Of a stored-by-all projection the head that this rank's queries need.

    The form has one head per rank, so what it computes is a shard of as many heads as
    there are ranks, equal ones side by side.

    Args:
        heads: Number of heads in the parameter.
    """

    heads: int

    def lent(self, held: DTensor, axis: int) -> DTensor:
        """A slice; sends nothing."""
        spec = held._spec
        parts, width = spec.mesh.shape[axis], spec.shape[0] // self.heads
        form = _reshaped(spec, axis, Shard(0), parts * width)
        if spec.coordinate is None:
            return typed(alias(plain(held))[:0], form)
        mine = spec.coordinate[axis] * self.heads // parts
        return typed(plain(held).narrow(0, mine * width, width), form)


@dataclass(frozen=True)
class FusedSharedHeads(Lending):
    """Of a fused projection this rank's queries and the head that they need.

    Args:
        sizes: Features of queries, keys and values.
        heads: Number of heads of keys, and of values.
    """

    sizes: tuple[int, int, int]
    heads: int

    def lent(self, held: DTensor, axis: int) -> DTensor:
        """Keys and values are gathered over the axis: one all-gather."""
        spec = held._spec
        parts = spec.mesh.shape[axis]
        q, k, _ = self.sizes
        width = k // self.heads
        wide = parts * width
        form = _reshaped(spec, axis, Sections(0, (q, wide, wide)), q + 2 * wide)
        if spec.coordinate is None:
            return typed(alias(plain(held))[:0], form)
        local, share = plain(held), k // parts
        own = local.narrow(0, 0, q // parts)
        # Both in one go: (share of keys, share of values) of every rank.
        pair = local.narrow(0, q // parts, 2 * share)
        pair = pair.reshape(2, share, *local.shape[1:])
        both = all_gather(pair, spec.comm(axis), 1, (share,) * parts)
        mine = spec.coordinate[axis] * self.heads // parts
        heads = both.narrow(1, mine * width, width).flatten(0, 1)
        return typed(torch.cat([own, heads]), form)


def _reshaped(spec: Spec, axis: int, place: Placement, rows: int) -> Spec:
    places = list(spec.placements)
    places[axis] = place
    return spec.replace(tuple(places), (rows, *spec.shape[1:]))


# ---- layouts of column styles ----------------------------------------------------------
def head_width(
    style: ParallelStyle, module: nn.Module, heads: int, shown: str = "heads"
) -> int:
    """Channels of a head of a linear's output features.

    Raises:
        ShardingError: The features are not so many heads.
    """
    if not isinstance(module, nn.Linear):
        raise TypeError(
            f"{type(style).__name__}: only a linear's features are heads, got "
            f"{type(module).__name__} with {style!r}. Leave out its number of heads."
        )
    if heads < 1 or module.out_features % heads:
        raise ShardingError(
            f"{type(style).__name__}: the output features are not so many heads, got "
            f"{module.out_features} features and {shown} {heads}, expected a multiple. "
            f"Give the number of heads that this linear makes."
        )
    return module.out_features // heads


def check_heads(style: ParallelStyle, heads: int, ranks: int) -> None:
    """Refuse a cut of heads that every rank needs for its own.

    Raises:
        ShardingError: The ranks do not divide the heads.
    """
    if heads % ranks:
        few = ", for keys and values give kv_heads=" if heads < ranks else ""
        raise ShardingError(
            f"{type(style).__name__}: the cut would go through a head, got {heads} heads "
            f"on {ranks} ranks, expected ranks that divide the heads. Take a mesh axis "
            f"of another size{few}."
        )


def check_shared(style: ParallelStyle, heads: int, ranks: int) -> None:
    """Refuse heads of keys and values that neither can be cut nor shared evenly.

    Raises:
        ShardingError: Neither of ``heads`` and ``ranks`` divides the other.
    """
    if heads % ranks and ranks % heads:
        raise ShardingError(
            f"{type(style).__name__}: a rank would need parts of two heads of keys and "
            f"values, got {heads} of them on {ranks} ranks, expected a number that "
            f"divides the other. Take a mesh axis of another size, or keep them whole "
            f"on all ranks with use_local_output=False."
        )


# ---- one linear for all three --------------------------------------------------------
class FusedColwise(ParallelStyle):
    """Cut a linear whose output is several results side by side: each by itself.

    ======  ========================  =====================================
    input   Replicate                 brought there
    weight  ``Sections(0, sizes)``    a rank's piece of each section
    bias    ``Sections(0, sizes)``
    output  ``Sections(-1, sizes)``   ``split(sizes, -1)`` gives ``Shard(-1)``
    ======  ========================  =====================================

    For the two halves of a gated feed-forward, say. Code on local outputs cuts them in
    proportion (``chunk(2, -1)``); on DTensors it is that of one process.

    Args:
        sizes: Features of each section; the ranks divide each.
        input_layouts: As in ``ColwiseParallel``.
        use_local_output: Give a plain local tensor rather than a DTensor.
        mesh_dim: The mesh axis; see ``ParallelStyle``.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        input_layouts: Placement | None = None,
        use_local_output: bool = True,
        mesh_dim: str | int | None = None,
    ) -> None:
        super().__init__(mesh_dim=mesh_dim)
        self.sizes = tuple(sizes)
        self.input_layouts = self._placement(
            "input_layouts", input_layouts, Replicate()
        )
        self.use_local_output = use_local_output

    def layout(self, module: nn.Module) -> Layout:
        """Weights by sections of output features."""
        return self._of(module, Sections(0, self.sizes), {})

    def _of(
        self, module: nn.Module, place: Placement, lent: dict[str, Lending]
    ) -> Layout:
        if not isinstance(module, nn.Linear):
            raise TypeError(
                f"{type(self).__name__}: no layout for this kind of module, got "
                f"{type(module).__name__}, expected nn.Linear. Name the linear in the "
                f"plan."
            )
        size = module.in_features if self.input_layouts == Shard(-1) else None
        return Layout(
            {"weight": place, "bias": place},
            inputs=Port(self.input_layouts, Replicate(), size),
            outputs=Port(local=self.use_local_output),
            lent=lent,
        )


class FusedQKV(FusedColwise):
    """Cut a linear that makes queries, keys and values: by heads of each.

    Every rank gets whole heads of all three. In one row the features are ``[q | k | v]``
    (GPT-2's ``c_attn``, the ``in_proj_weight`` of ``nn.MultiheadAttention``);
    interleaved they are ordered by heads of keys, each with its queries before it: of
    shape (kv_heads, heads / kv_heads + 2, head_dim).

    With fewer heads of keys than ranks, which must be in one row, ranks share a head: a
    local output is ``[q | k | v]`` of this rank's queries and the one head that they
    need. (A DTensor output has keys and values cut inside heads; a view to heads
    gathers them, and only them.)

    Args:
        heads: Number of heads of queries; the ranks divide it.
        kv_heads: Number of heads of keys; as many as of queries by default.
        interleaved: Whether the features are ordered by heads.
        input_layouts: As in ``ColwiseParallel``.
        use_local_output: Give a plain local tensor rather than a DTensor.
        mesh_dim: The mesh axis; see ``ParallelStyle``.

    Raises:
        ShardingError: When applied: a cut would go through a head.

    Example:
        >>> from dtensor.collectives.simulate import simulate
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> from dtensor.styles.parallelize import parallelize_module
        >>> def program():
        ...     with init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)):
        ...         qkv = parallelize_module(nn.Linear(8, 24), FusedQKV(heads=4))
        ...     return str(qkv.weight.placements[0])
        >>> simulate(program, ranks=2)
        ['Sections(0: 8, 8, 8)', 'Sections(0: 8, 8, 8)']
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int | None = None,
        *,
        interleaved: bool = False,
        input_layouts: Placement | None = None,
        use_local_output: bool = True,
        mesh_dim: str | int | None = None,
    ) -> None:
        super().__init__(
            (),
            input_layouts=input_layouts,
            use_local_output=use_local_output,
            mesh_dim=mesh_dim,
        )
        self.heads, self.kv_heads, self.interleaved = heads, kv_heads, interleaved
        if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
            raise ShardingError(
                f"FusedQKV: heads of keys are shared by equally many of queries, got "
                f"{heads} heads and kv_heads {kv_heads}, expected a divisor. Give the "
                f"numbers of the model."
            )

    def layout(self, module: nn.Module) -> Layout:
        """As on one rank; see ``layout_over``."""
        return self.layout_over(module, 1)

    def layout_over(self, module: nn.Module, ranks: int) -> Layout:
        """Weights by heads."""
        keys = self.heads if self.kv_heads is None else self.kv_heads
        total = self.heads + 2 * keys
        width = head_width(self, module, total, "heads of q, k and v together")
        check_heads(self, self.heads, ranks)
        if self.interleaved:
            if keys % ranks:
                raise ShardingError(
                    f"FusedQKV: the cut would go through a group of heads, got "
                    f"{keys} heads of keys on {ranks} ranks, interleaved with their "
                    f"queries, expected ranks that divide them. Order the features "
                    f"[q | k | v], or take a mesh axis of another size."
                )
            return self._of(module, Shard(0), {})
        sizes = self.heads * width, keys * width, keys * width
        if keys % ranks == 0:
            return self._of(module, Sections(0, sizes), {})
        if self.use_local_output:
            check_shared(self, keys, ranks)
        if sizes[1] % ranks:
            raise ShardingError(
                f"FusedQKV: ranks cannot share heads of keys, got {keys} heads of "
                f"{width} channels on {ranks} ranks, expected ranks that divide the "
                f"{sizes[1]} channels. Take a mesh axis of another size."
            )
        form = FusedSharedHeads(sizes, keys)
        lent: dict[str, Lending] = (
            {"weight": form, "bias": form} if self.use_local_output else {}
        )
        return self._of(module, Sections(0, sizes), lent)


# ---- plans that do not speak of heads ------------------------------------------------
_PROJECTION = re.compile(r"(w?[qkv]|qkv|query|key|value)s?(_?(proj|lin|linear))?")


def check_projection(
    name: str, parent: nn.Module, module: nn.Module, layout: Layout, ranks: int
) -> None:
    """Refuse to hand out pieces of heads where the model says what a head is.

    Only where it is certain: a linear with the name of a projection, in a module with a
    ``head_dim``, whose local output would not be whole heads.

    Raises:
        ShardingError: The cut goes through a head.
    """
    width = getattr(parent, "head_dim", None)
    out = layout.outputs
    last = name.rpartition(".")[2]
    if (
        not isinstance(module, nn.Linear)
        or not isinstance(width, int)
        or width < 1
        or layout.parameters.get("weight") != Shard(0)
        or not (isinstance(out, Port) and out.local and out.wanted == Shard(-1))
        or _PROJECTION.fullmatch(last) is None
        or module.out_features % width
    ):
        return
    heads = module.out_features // width
    if heads % ranks:
        raise ShardingError(
            f"parallelize_module: the cut of {name!r} would go through a head, got "
            f"{heads} heads of {width} channels (head_dim of the module around it) on "
            f"{ranks} ranks, expected ranks that divide the heads. Write "
            f"ColwiseParallel(kv_heads={heads}) where these are keys or values, which "
            f"ranks can share, or take a mesh axis of another size."
        )
