"""Where plain local tensors become DTensors and come out again.

Inside, cotangents are duals (see ``placement.dual``). A user who holds a plain
tensor that is alike on every rank of an axis means something else: he computes
the same thing everywhere and calls backward everywhere. Call that a *local value*,
L; it is its own dual. Each crossing and its adjoint:

====================  ==========================  ============================
crossing              forward                     adjoint
====================  ==========================  ============================
L -> Replicate        identity                    Partial -> L: all-reduce
Partial -> L          all-reduce                  L -> Replicate: identity
Replicate -> L        identity                    L -> Partial: keep on coord. 0
L -> Partial          keep on coordinate 0        Replicate -> L: identity
Shard -> L            all-gather                  L -> Shard: slice
L -> Shard            slice                       Shard -> L: all-gather
====================  ==========================  ============================

The first two are Megatron's f and g (Shoeybi et al., arXiv:1909.08053, section 3).
Each is the other's adjoint, so second derivatives are right as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtensor.collectives import conjugate, functional
from dtensor.collectives.communicator import Communicator
from dtensor.collectives.reductions import reduction
from dtensor.collectives.registry import communicator_of
from dtensor.custom_placement import CustomPlacement
from dtensor.errors import ShardingError
from dtensor.mesh.chunks import chunk_sizes
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.mesh.world import current_world
from dtensor.moves import alias, dealt_out, lay_addends, plain, reduce_all
from dtensor.placement import (
    Partial,
    Placements,
    PlacementsLike,
    Replicate,
    Shard,
    axes_of,
    placements_of,
    show,
)
from dtensor.redistribute import transition
from dtensor.spec import Spec, check_custom, local_shape_at, spec_of

if TYPE_CHECKING:
    from dtensor.tensor import DTensor

MAX_DIMS = 16


class ReplicateToLocal(torch.autograd.Function):
    """Identity; the cotangent that comes back is alike on the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lead: bool) -> torch.Tensor:
        """A view of ``x``."""
        ctx.lead = lead
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """One rank's copy stands for all: the others contribute zero."""
        g = plain(grads[0])
        return LocalToPartial.apply(g, ctx.lead), None  # type: ignore[no-untyped-call]


class LocalToPartial(torch.autograd.Function):
    """Keep the value on the lead, zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lead: bool) -> torch.Tensor:
        """A view of ``x`` on the lead, zeros elsewhere."""
        ctx.lead = lead
        return x.view_as(x) if lead else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The cotangent of a Partial is replicated and comes out as it is."""
        g = plain(grads[0])
        return ReplicateToLocal.apply(g, ctx.lead), None  # type: ignore[no-untyped-call]


class ShardToLocal(torch.autograd.Function):
    """All-gather to a value that every rank uses alike."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Communicator, dim: int, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """The concatenation of the shards along ``dim``."""
        ctx.args = comm, dim, sizes
        return functional.all_gather(x, comm, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """This rank's piece of the (replicated) cotangent."""
        g = plain(grads[0])
        return LocalToShard.apply(g, *ctx.args), None, None, None  # type: ignore[no-untyped-call]


class LocalToShard(torch.autograd.Function):
    """This rank's piece of a value that all ranks hold."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Communicator, dim: int, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """A copy of the piece."""
        ctx.args = comm, dim, sizes
        start = sum(sizes[: comm.rank])
        return x.narrow(dim, start, sizes[comm.rank]).clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """The whole cotangent, gathered."""
        g = plain(grads[0])
        return ShardToLocal.apply(g, *ctx.args), None, None, None  # type: ignore[no-untyped-call]


def _given(
    what: str, spec: Spec, grad_placements: PlacementsLike | None
) -> tuple[bool, ...]:
    """Per axis: whether a replicated axis has addends (Partial) on the user's side."""
    if grad_placements is None:
        return (False,) * spec.mesh.ndim
    places = placements_of(what, grad_placements, spec.mesh.ndim, spec.ndim)
    for axis, (p, g) in enumerate(zip(spec.placements, places, strict=True)):
        same = g == p or isinstance(p, Partial) and isinstance(g, Replicate)
        if not same and not (isinstance(p, Replicate) and isinstance(g, Partial)):
            raise ShardingError(
                f"{what}: grad_placements do not fit, got {g} on axis "
                f"'{spec.mesh.axis_name(axis)}' for a tensor placed {p} there, "
                "expected the same placement, or Replicate() or Partial() where the "
                "tensor is Replicate(). Redistribute the tensor first."
            )
    return tuple(isinstance(g, Partial) for g in places)


def local_in(
    local: torch.Tensor, spec: Spec, grad_placements: PlacementsLike | None
) -> torch.Tensor:
    """A fresh plain tensor on the user's shard, with the adjoint of L -> spec."""
    addend = _given("from_local", spec, grad_placements)
    out = plain(local)
    if spec.coordinate is not None and out.requires_grad and torch.is_grad_enabled():
        for axis, p in enumerate(spec.placements):
            if isinstance(p, Replicate) and not addend[axis]:
                if spec.mesh.shape[axis] > 1:
                    out = conjugate.identity_all_reduce(out, spec.comm(axis))
    return alias(out)


def _lead(spec: Spec, axes: Sequence[int]) -> bool:
    """Whether this rank has coordinate 0 on all these axes."""
    assert spec.coordinate is not None, "only members cross a boundary"
    return all(spec.coordinate[axis] == 0 for axis in axes)


def _needs_grad(x: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and plain(x).requires_grad


def local_out(
    x: DTensor, spec: Spec, grad_placements: PlacementsLike | None
) -> torch.Tensor:
    """``to_local``: the shard, with the adjoint of spec -> L on replicated axes."""
    addend = _given("to_local", spec, grad_placements)
    local = plain(x)
    if spec.coordinate is None or not _needs_grad(x):
        return alias(local)
    axes = [
        axis
        for axis, p in enumerate(spec.placements)
        if isinstance(p, Replicate) and not addend[axis] and spec.mesh.shape[axis] > 1
    ]
    if not axes:
        return alias(local)
    return ReplicateToLocal.apply(local, _lead(spec, axes))  # type: ignore[no-any-return,no-untyped-call]


def full_out(
    x: DTensor, spec: Spec, grad_placements: PlacementsLike | None
) -> torch.Tensor:
    """``full_tensor``: every axis to L; a gathered or reduced one in one crossing."""
    replicated = spec.replicated()
    addend = _given("full_tensor", replicated, grad_placements)
    local = plain(x)
    if spec.coordinate is None:
        return alias(local)
    mesh, as_local = (
        spec.mesh,
        [
            axis
            for axis, p in enumerate(spec.placements)
            if isinstance(p, CustomPlacement)
        ],
    )
    if as_local:
        custom, spec = (
            spec,
            spec.replace(
                tuple(
                    Replicate() if isinstance(p, CustomPlacement) else p
                    for p in spec.placements
                )
            ),
        )
        local = transition(custom, spec)(local)
        as_local = [axis for axis in as_local if not addend[axis]]
        addend = tuple(a or i in as_local for i, a in enumerate(addend))
    for axis, p in reversed(list(enumerate(spec.placements))):
        if isinstance(p, Partial) and mesh.shape[axis] > 1:
            comm = spec.comm(axis)
            if addend[axis]:
                local = reduce_all(local, comm, p.reduce_op)
                continue
            if not p.linear:
                local = reduce_all(local, comm, p.reduce_op)
                as_local.append(axis)
                continue
            if p.reduce_op == "avg":
                local = local / mesh.shape[axis]
            local = conjugate.all_reduce_identity(local, comm)
        elif isinstance(p, Replicate) and not addend[axis] and mesh.shape[axis] > 1:
            as_local.append(axis)
    cut = [a for d in range(spec.ndim) for a in reversed(axes_of(spec.placements, d))]
    for axis in cut:
        p = spec.placements[axis]
        if isinstance(p, Shard) and mesh.shape[axis] > 1:
            comm = spec.comm(axis)
            sizes = chunk_sizes(spec.block(p.dim, axis)[1], mesh.shape[axis])
            if addend[axis]:
                local = functional.all_gather(local, comm, p.dim, sizes)
            else:
                local = ShardToLocal.apply(local, comm, p.dim, sizes)  # type: ignore[no-untyped-call]
    if as_local and _needs_grad(local):
        local = ReplicateToLocal.apply(local, _lead(spec, as_local))  # type: ignore[no-untyped-call]
    return alias(local)


def check_grad(spec: Spec, value: object) -> None:
    """Refuse a ``.grad`` whose shards would not line up with those of its tensor."""
    from dtensor.tensor import DTensor

    fits = isinstance(value, DTensor) and value._spec.mesh is spec.mesh
    fits = fits and value._spec.shape == spec.shape  # type: ignore[attr-defined]
    if fits:
        for p, q in zip(spec.placements, value._spec.placements, strict=True):  # type: ignore[attr-defined]
            fits = fits and (p == q or not p.is_cut() and not q.is_cut())
    if not fits:
        got = repr(value) if isinstance(value, DTensor) else f"{type(value)}"
        raise ShardingError(
            f"grad: a gradient lies as its tensor does, got {got}, expected "
            f"placements {show(spec.placements)} and shape {tuple(spec.shape)} on "
            f"{spec.mesh!r}. Use g.redistribute(p.placements), or "
            "distribute_tensor(g, p.device_mesh, p.placements)."
        )


def check_dtype(what: str, dtype: torch.dtype, placements: Placements) -> None:
    """Refuse Partial placements that have no meaning for the dtype."""
    for p in placements:
        if isinstance(p, Partial):
            try:
                reduction(what, p.reduce_op, dtype)
            except TypeError as e:
                raise ShardingError(
                    f"{what}: placement {p} has no meaning for {dtype}. Convert first: "
                    f"x.to(torch.float32) or x.to(torch.int64). ({e})"
                ) from None


def scatter(tensor: torch.Tensor, spec: Spec, src: int | None) -> torch.Tensor:
    """This rank's shard of a full tensor; a fresh tensor without autograd."""
    mesh = spec.mesh
    check_dtype("distribute_tensor", tensor.dtype, spec.placements)
    if spec.coordinate is None:
        return tensor.new_empty(spec.local_shape)
    if src is not None and mesh.size() > 1 and not tensor.is_meta:
        if not 0 <= src < mesh.size():
            raise ValueError(
                f"distribute_tensor: src_data_rank is a position in the mesh, got "
                f"{src}, expected 0 to {mesh.size() - 1}, or None."
            )
        comm = communicator_of(mesh.ranks, "mesh", mesh.device_type)
        tensor = comm.broadcast(tensor, src)
    piece = tensor
    for dim in range(spec.ndim):
        offset, length = spec.block(dim)
        piece = piece.narrow(dim, offset, length)
    piece = lay_addends(dealt_out(piece, spec), spec)
    return piece.clone(memory_format=torch.contiguous_format)


def spec_of_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    places: Placements,
    shape: Sequence[int] | None,
    run_check: bool,
) -> Spec:
    """The spec of a shard that a user hands in; see ``DTensor.from_local``."""
    check_dtype("from_local", local.dtype, places)
    if mesh.coordinate is None:
        return spec_of(mesh, places, local.shape if shape is None else shape)
    # In a dry world there is no one to compare with, as with run_check=False.
    run_check = run_check and current_world().kind != "dry"
    if run_check and mesh.size() > 1 and not local.is_meta:
        return spec_of(mesh, places, _agreed_shape(local, mesh, places, shape))
    if shape is None:
        if any(isinstance(p, CustomPlacement) for p in places):
            raise ShardingError(
                f"from_local: the global shape cannot be told from one shard placed "
                f"{show(places)}. Give shape=, or leave run_check=True."
            )
        sizes = list(local.shape)
        for axis, p in enumerate(places):
            if isinstance(p, Shard):
                sizes[p.dim] *= mesh.shape[axis]
        shape = sizes
    spec = spec_of(mesh, places, shape)
    if spec.local_shape != local.shape:
        raise ShardingError(
            f"from_local: the shard does not fit the global shape, got "
            f"{tuple(local.shape)} on rank {spec.world.rank}, expected "
            f"{tuple(spec.local_shape)} of {tuple(spec.shape)} placed "
            f"{show(places)} (cut as torch.chunk cuts). Give the shard of that shape."
        )
    return spec


def _ragged(
    mesh: DeviceMesh, places: Placements, shapes: Sequence[tuple[int, ...]]
) -> str:
    """A hint for pieces of one dim that are cut in sizes of their own."""
    if mesh.ndim != 1 or not isinstance(places[0], Shard):
        return ""
    dim = places[0].dim
    sizes = tuple(s[dim] for s in shapes)
    if len({(*s[:dim], *s[dim + 1 :]) for s in shapes}) > 1:
        return ""
    return f", or name the pieces as they are: [RaggedShard({dim}, {sizes})]"


def _agreed_shape(
    local: torch.Tensor,
    mesh: DeviceMesh,
    places: Placements,
    shape: Sequence[int] | None,
) -> tuple[int, ...]:
    """Global shape from all shards; every rank sees all and judges alike."""
    if local.ndim > MAX_DIMS:
        raise ShardingError(
            f"from_local: shards of more than {MAX_DIMS} dims, got {local.ndim}."
        )
    dtypes = sorted({str(d) for d in vars(torch).values() if type(d) is torch.dtype})
    given = [] if shape is None else [int(n) for n in shape]
    row = [local.ndim, dtypes.index(str(local.dtype)), int(local.requires_grad)]
    row += [len(given) if shape is not None else -1]
    row += [*local.shape, *[0] * (MAX_DIMS - local.ndim)]
    row += [*given, *[0] * (MAX_DIMS - len(given))]
    post = torch.tensor(row, dtype=torch.int64, device=local.device)
    comm = communicator_of(mesh.ranks, "mesh")
    flat = comm.all_gather(post, (len(row),) * comm.size)
    table = flat.view(comm.size, len(row)).tolist()
    shapes = [tuple(r[4 : 4 + r[0]]) for r in table]
    listed = ", ".join(
        f"rank {rank}: {s}" for rank, s in zip(mesh.ranks, shapes, strict=True)
    )
    for index, what in ((0, "dims"), (1, "dtype"), (2, "requires_grad")):
        values = [r[index] for r in table]
        if len(set(values)) > 1:
            if what == "dtype":
                values = [dtypes[v] for v in values]
            raise ShardingError(
                f"from_local: the ranks of {mesh!r} disagree on {what}, got {values} "
                f"with shapes {listed}. Hand in shards that agree."
            )
    if len({tuple(r[4 + MAX_DIMS :]) for r in table}) > 1:
        raise ShardingError(
            f"from_local: the ranks of {mesh!r} disagree on shape=. Give one shape."
        )
    coordinates = [mesh.coordinate_of(rank) for rank in mesh.ranks]
    if shape is None:
        sizes = []
        for dim in range(local.ndim):
            axes = [*axes_of(places, dim)]
            axes += [
                a
                for a, p in enumerate(places)
                if isinstance(p, CustomPlacement) and p.along == dim
            ]
            total = 0
            for c, s in zip(coordinates, shapes, strict=True):
                assert c is not None, "every listed rank is a member"
                if all(c[a] == 0 for a in range(mesh.ndim) if a not in axes):
                    total += s[dim]
            sizes.append(total)
        given = sizes
    check_custom("from_local", mesh, places, tuple(given))
    wanted = []
    for c in coordinates:
        assert c is not None, "every listed rank is a member"
        wanted.append(local_shape_at(given, places, mesh.shape, c))
    if wanted != shapes:
        raise ShardingError(
            f"from_local: the shards are not those of a tensor of shape "
            f"{tuple(given)} placed {show(places)} on {mesh!r}, got {listed}, "
            f"expected {wanted} (cut as torch.chunk cuts: equal pieces, the last "
            "ones short or empty). Cut the full tensor with distribute_tensor(t, "
            f"mesh, placements){_ragged(mesh, places, shapes)}."
        )
    return tuple(given)
