"""What one rank does in a step of a plan: differentiable moves of local shards.

Every move is made of torch functions and differentiable collectives, so its adjoint
and its second derivatives are theirs. Reductions that are not linear (max, min,
product ...) are folded from the addends of all ranks where a gradient is wanted: then
ties share it as ``amax`` does, and zeros in products are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.collectives import functional
from dtensor.collectives.communicator import Communicator
from dtensor.collectives.reductions import REDUCTIONS
from dtensor.collectives.registry import communicator_of
from dtensor.custom_placement import CustomPlacement
from dtensor.exchange import Box, Exchange, exchange
from dtensor.mesh.chunks import chunk_offset, chunk_sizes
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.mesh.world import World
from dtensor.placement import (
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    axes_of,
    placed,
)
from dtensor.plan import local_elements
from dtensor.spec import Spec, block_of, communicator_in
from dtensor.steps import Step

Move = Callable[[torch.Tensor], torch.Tensor]


class Mask(torch.autograd.Function):
    """Keep the value where this rank leads its row, ``fill`` elsewhere.

    Replicate -> Partial: the addends of the row then reduce to the value. The adjoint
    is the mask by zero: the cotangent of a Partial is replicated, that of a Replicate
    is a sum.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: torch.Tensor,
        lead: bool,
        fill: float = 0,
    ) -> torch.Tensor:
        """A copy of ``x`` on the lead, ``fill`` elsewhere."""
        ctx.lead = lead  # type: ignore[attr-defined]
        return x.clone() if lead else torch.full_like(x, fill)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        """The mask of the cotangent."""
        return Mask.apply(grads[0], ctx.lead), None, None  # type: ignore[attr-defined,no-untyped-call]


def plain(x: torch.Tensor) -> torch.Tensor:
    """The same local tensor as a plain ``torch.Tensor``, autograd kept."""
    if type(x) is torch.Tensor:
        return x
    with NoTF():
        return x.as_subclass(torch.Tensor)


def alias(x: torch.Tensor) -> torch.Tensor:
    """A fresh plain tensor on the same storage, autograd kept."""
    with NoTF():
        return x.view_as(x)


# ---- reductions that are not linear ---------------------------------------------------
def _records(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _folded(stacked: torch.Tensor, op: str) -> torch.Tensor:
    """The addends of all ranks, lying along dim 0, as one value."""
    if op == "max":
        return stacked.amax(0)
    if op == "min":
        return stacked.amin(0)
    return stacked.prod(0)


def reduce_all(x: torch.Tensor, comm: Communicator, op: str) -> torch.Tensor:
    """Partial(op) -> Replicate.

    Bytes sent per rank: 2(n-1)/n of the shard's, whether gradients are wanted or not.
    """
    if REDUCTIONS[op].linear or not _records(x):
        return functional.all_reduce(x, comm, op)
    flat = x.reshape(-1)
    sizes = chunk_sizes(flat.numel(), comm.size)
    piece = reduce_cut(flat, comm, 0, sizes, op)
    return functional.all_gather(piece, comm, 0, sizes).view(x.shape)


def reduce_cut(
    x: torch.Tensor, comm: Communicator, dim: int, sizes: Sequence[int], op: str
) -> torch.Tensor:
    """Partial(op) -> Shard(dim), pieces of the given lengths."""
    if REDUCTIONS[op].linear or not _records(x):
        return functional.reduce_scatter(x, comm, dim, sizes, op)
    ones = (1,) * comm.size
    stacked = functional.all_to_all(x.unsqueeze(0), comm, dim + 1, 0, sizes, ones)
    return _folded(stacked, op)


# ---- into addends --------------------------------------------------------------------
def into_addends(x: torch.Tensor, op: str, lead: bool) -> torch.Tensor:
    """Replicate -> Partial(op) on one axis; no communication.

    rank 0: a  rank 1: a   ->  rank 0: a  rank 1: the identity of op
    for avg, max, min, band, bor, of which copies reduce to the value: nothing.
    """
    if op == "avg" or REDUCTIONS[op].idempotent:
        return alias(x)
    return Mask.apply(x, lead, REDUCTIONS[op].identity(x.dtype))  # type: ignore[no-any-return,no-untyped-call]


def lay_addends(x: torch.Tensor, spec: Spec) -> torch.Tensor:
    """A value as this rank's addend, on every axis of ``spec`` that has addends."""
    if spec.coordinate is None:
        return x
    for axis, p in enumerate(spec.placements):
        if isinstance(p, Partial) and spec.mesh.shape[axis] > 1:
            x = into_addends(x, p.reduce_op, spec.coordinate[axis] == 0)
    return x


def padded(
    x: torch.Tensor, dim: int, start: int, length: int, op: str, parts: int
) -> torch.Tensor:
    """Shard -> Partial(op): the shard in its place, the identity of op around it."""
    fill = REDUCTIONS[op].identity(x.dtype)
    after = length - start - x.shape[dim]
    pads = [0, 0] * (x.ndim - 1 - dim) + [start, after]
    if x.dtype is torch.bool:
        out = torch.constant_pad_nd(x.to(torch.uint8), pads, int(bool(fill))).bool()
    else:
        out = torch.constant_pad_nd(x, pads, fill)
    return out * parts if op == "avg" else out


def kept_of_new_piece(spec: Spec, step: Step) -> Move:
    """What this rank has of its new piece, the identity around it.

    For axes that cut a dim and come to hold addends, while others cut it instead.
    """
    assert spec.coordinate is not None, "only members move"
    mesh, shape = spec.mesh, spec.shape
    pads = [a for a in step.axes if isinstance(step.dst[a], Partial)]
    src, dst = spec.placements[pads[0]], step.dst[pads[0]]
    assert isinstance(src, Shard) and isinstance(dst, Partial), "see the planner"
    dim, op = src.dim, dst.reduce_op
    parts = math.prod(mesh.shape[a] for a in pads)
    start, size = spec.block(dim)
    begin, length = block_of(shape[dim], dim, step.dst, mesh.shape, spec.coordinate)
    low = max(start, begin)
    high = max(low, min(start + size, begin + length))
    low = min(low, high)
    before = min(max(0, low - begin), length - (high - low))

    def keep(x: torch.Tensor) -> torch.Tensor:
        at = min(low - start, size) if high > low else 0
        mine = x.narrow(dim, at, high - low)
        return padded(mine, dim, before, length, op, parts)

    return keep


# ---- one move per step ------------------------------------------------------------------
def comm_over(world: World, mesh: DeviceMesh, axes: Sequence[int]) -> Communicator:
    """The communicator of this rank's ranks over some axes, the first slowest."""
    if len(axes) == 1:
        return communicator_in(world, mesh, axes[0])
    key = ("comm", mesh, *axes)
    found = world.memo.get(key)
    if found is None:
        label = "+".join(mesh.axis_name(a) for a in sorted(axes))
        mine = mesh.coordinate_of(world.rank) or ()
        rows = []
        for rank in mesh.ranks:
            at = mesh.coordinate_of(rank) or ()
            if all(a in axes or c == mine[a] for a, c in enumerate(at)):
                rows.append((tuple(at[a] for a in axes), rank))
        ranks = tuple(rank for _, rank in sorted(rows))
        found = world.memo[key] = communicator_of(ranks, label, mesh.device_type)
    return found


def box_of(
    mesh: DeviceMesh, places: Placements, shape: Sequence[int], at: Sequence[int]
) -> Box:
    """The (start, stop) on every dim that one coordinate holds."""
    box = []
    for dim, length in enumerate(shape):
        start, size = block_of(length, dim, places, mesh.shape, at)
        box.append((start, start + size))
    return tuple(box)


def pieces_of(length: int, parts: Sequence[int]) -> tuple[int, ...]:
    """Lengths of the pieces of a dim that axes cut one inside the other."""
    pieces = [length]
    for n in parts:
        pieces = [size for piece in pieces for size in chunk_sizes(piece, n)]
    return tuple(pieces)


def custom_move(
    spec: Spec, axis: int, src: Placement, dst: Placement, verb: str
) -> Move:
    """What this rank does in a step from or to a custom placement on one axis."""
    assert spec.coordinate is not None, "only members move"
    n, at = spec.mesh.shape[axis], spec.coordinate[axis]
    whole = spec.replace(placed(spec.placements, (axis,), Replicate()))
    shape = tuple(whole.local_shape)
    if isinstance(src, Replicate):
        assert isinstance(dst, CustomPlacement), "the only other end"
        custom = dst
        return lambda x: custom.split(x, n, at).clone()
    comm = comm_over(spec.world, spec.mesh, (axis,))
    if not isinstance(src, CustomPlacement):
        assert isinstance(dst, CustomPlacement), "the only other end"
        custom = dst
        return lambda x: custom.move_from(x, src, comm, shape)
    custom = src
    if isinstance(dst, Replicate):
        shapes = [custom.local_shape(shape, n, i) for i in range(n)]
        return lambda x: gathered(x, custom, comm, shapes, shape)
    if custom.sends_to(dst, n) is not None:
        return lambda x: custom.move_to(x, dst, comm, shape)
    assert isinstance(dst, CustomPlacement), "the way is the target's"
    other = dst
    return lambda x: other.move_from(x, custom, comm, shape)


def gathered(
    x: torch.Tensor,
    custom: CustomPlacement,
    comm: Communicator,
    shapes: Sequence[Sequence[int]],
    shape: tuple[int, ...],
) -> torch.Tensor:
    """The whole of what a custom placement dealt out, on every rank of its axis."""
    sizes = [math.prod(s) for s in shapes]
    flat = functional.all_gather(x.reshape(-1), comm, 0, sizes)
    pieces = torch.split(flat, sizes)
    shards = [p.view(tuple(s)) for p, s in zip(pieces, shapes, strict=True)]
    return custom.assemble(shards, shape)


def dealt_out(x: torch.Tensor, spec: Spec) -> torch.Tensor:
    """This rank's part of its block, as the custom placements of a spec deal it out."""
    assert spec.coordinate is not None, "only members hold parts"
    for axis, p in enumerate(spec.placements):
        if isinstance(p, CustomPlacement):
            x = p.split(x, spec.mesh.shape[axis], spec.coordinate[axis])
    return x


LARGE = 1 << 20  # bytes of a shard from which blocks are sent one after another


def move_of(spec: Spec, step: Step, itemsize: int = 4) -> Move:
    """What this rank does in ``step``, starting from ``spec``.

    Args:
        spec: Spec before the step.
        step: The step.
        itemsize: Bytes per element.

    Returns:
        A differentiable function from local shard to local shard.
    """
    mesh, axes = spec.mesh, step.axes
    src, dst = spec.placements[axes[0]], step.dst[axes[0]]
    if isinstance(src, CustomPlacement) or isinstance(dst, CustomPlacement):
        return custom_move(spec, axes[0], src, dst, step.verb)
    if len(axes) > 1 and step.verb == "local":
        return kept_of_new_piece(spec, step)
    if len(axes) > 1:  # ranks in the order of the pieces
        cut = spec.placements if isinstance(src, Shard) else step.dst
        end = cut[axes[0]]
        if isinstance(end, Shard) and not (
            isinstance(src, Shard) and isinstance(dst, Shard)
        ):
            axes = tuple(a for a in axes_of(cut, end.dim) if a in axes)
    parts = [mesh.shape[a] for a in axes]
    if math.prod(parts) == 1:
        return alias
    assert spec.coordinate is not None, "only members move"
    at, n = spec.coordinate[axes[0]], math.prod(parts)
    if isinstance(src, Replicate):
        if isinstance(dst, Partial):
            op = dst.reduce_op
            return lambda x: into_addends(x, op, at == 0)
        assert isinstance(dst, Shard), "the table of steps has no other row"
        dim, length = dst.dim, spec.block(dst.dim)[1]
        start, size = chunk_offset(length, n, at), chunk_sizes(length, n)[at]
        return lambda x: x.narrow(dim, start, size).clone()
    if isinstance(dst, Partial):
        op = dst.reduce_op
        if isinstance(src, Partial):
            factor = n if op == "avg" else 1 / n
            return lambda x: x * factor
        assert isinstance(src, Shard), "the table of steps has no other row"
        dim, length = src.dim, spec.block(src.dim, axes[0])[1]
        start = chunk_offset(length, n, at)
        return lambda x: padded(x, dim, start, length, op, n)
    comm = comm_over(spec.world, mesh, axes)
    if isinstance(src, Partial):
        op = src.reduce_op
        if isinstance(dst, Replicate):
            return lambda x: reduce_all(x, comm, op)
        assert isinstance(dst, Shard), "the table of steps has no other row"
        dim, sizes = dst.dim, pieces_of(spec.block(dst.dim)[1], parts)
        return lambda x: reduce_cut(x, comm, dim, sizes, op)
    assert isinstance(src, Shard), "the table of steps has no other row"
    if isinstance(dst, Replicate):
        dim, sizes = src.dim, pieces_of(spec.block(src.dim, axes[0])[1], parts)
        return lambda x: functional.all_gather(x, comm, dim, sizes)
    assert isinstance(dst, Shard), "the table of steps has no other row"
    large = local_elements(mesh, spec.placements, spec.shape) * itemsize > LARGE
    if len(axes) == 1 and not large:
        a, b = src.dim, dst.dim
        a_sizes = chunk_sizes(spec.block(a, axes[0])[1], n)
        b_sizes = chunk_sizes(spec.block(b)[1], n)
        return lambda x: functional.all_to_all(x, comm, b, a, b_sizes, a_sizes)
    plan = exchange_of(spec, step.dst, comm, large)
    return lambda x: exchange(x, plan)


def exchange_of(
    spec: Spec, dst: Placements, comm: Communicator, one_by_one: bool
) -> Exchange:
    """Who of ``comm`` gets which part of whose shard, from ``spec`` to ``dst``."""
    mesh = spec.mesh
    before, after = [], []
    for rank in comm.ranks:
        at = mesh.coordinate_of(rank)
        assert at is not None, "members have coordinates"
        before.append(box_of(mesh, spec.placements, spec.shape, at))
        after.append(box_of(mesh, dst, spec.shape, at))
    return Exchange.between(before, after, comm, one_by_one)
