"""The differentiable collectives on plain tensors, each with its transpose.

The pairing is the one of the whole project: local autograd computes the derivative of
the sum over ranks of (local output times local cotangent). Under it the adjoint of a
verb is another verb, and every backward below calls that *verb*, never the bare
communicator, so that second derivatives are right too.

==============  ======================
verb            adjoint
==============  ======================
all_reduce      all_reduce
all_gather      reduce_scatter
reduce_scatter  all_gather
all_to_all      all_to_all
broadcast       reduce to the root
permute         permute the other way
==============  ======================

``identity_all_reduce`` and ``all_reduce_identity`` are for a different convention, in
which a value that is alike on all ranks counts once (Shoeybi et al. 2019, Megatron-LM,
section 3, there f and g). They are each other's adjoint.

A collective inside a backward must be reached by every rank: a tensor has to require
grad on all ranks of the axis or on none. The communicator is looked up in forward and
kept; backward, which may run on another thread, reads no context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from dtensor.collectives.communicator import Communicator
from dtensor.collectives.reductions import REDUCTIONS
from dtensor.collectives.registry import communicator
from dtensor.mesh.chunks import chunk_sizes
from dtensor.mesh.device_mesh import DeviceMesh

Group = Communicator | DeviceMesh


def all_reduce(x: torch.Tensor, group: Group, op: str = "sum") -> torch.Tensor:
    """Fold the tensors of all ranks; every rank gets the result.

    forward   rank 0: a    rank 1: b    ->  rank 0: a+b  rank 1: a+b
    adjoint   rank 0: c    rank 1: d    ->  rank 0: c+d  rank 1: c+d

    Args:
        x: Tensor of one shape on all ranks.
        group: Communicator, or mesh of one axis; every rank of it must call.
        op: A name in ``REDUCTIONS``. Only sum and avg carry gradients.

    Returns:
        A new tensor, the same bits on every rank. Sends 2(n-1)/n of its bytes.

    Raises:
        ValueError: ``op`` is unknown, or has no adjoint and ``x`` requires grad.
        TypeError: ``op`` is not defined for the dtype.
        CollectiveError: The ranks disagree, or one has gone.

    Example:
        >>> from dtensor.collectives.simulate import simulate
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> from dtensor.mesh.world import get_rank
        >>> mesh = init_device_mesh("cpu", (3,))
        >>> simulate(lambda: all_reduce(torch.tensor(get_rank()), mesh).item(), 3)
        [3, 3, 3]
    """
    x, comm = plain(x), _resolve(group, "all_reduce")
    if _bare(x):
        return comm.all_reduce(x, op)
    _check_linear("all_reduce", x, op)
    return _apply(_AllReduce, x, comm, op)


def all_gather(
    x: torch.Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Join the tensors of all ranks along ``dim``, in rank order.

    forward   rank 0: a        rank 1: b        ->  both: [a b]
    adjoint   rank 0: [c0 c1]  rank 1: [d0 d1]  ->  rank 0: c0+d0  rank 1: c1+d1

    Args:
        x: Tensors that are alike but along ``dim``.
        group: Communicator, or mesh of one axis; every rank of it must call.
        dim: Dim to join along.
        sizes: Length along ``dim`` on each rank. None: the lengths are exchanged
            first, with an all-gather of one integer.

    Returns:
        A new contiguous tensor. Sends (n-1)/n of its bytes. Along dim 0 a contiguous
        ``x`` is sent from, and the result received into, its final place.

    Raises:
        ValueError: No such dim, or ``sizes`` do not fit.

    Example:
        >>> from dtensor.collectives.simulate import simulate
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> from dtensor.mesh.world import get_rank
        >>> mesh = init_device_mesh("cpu", (2,))
        >>> simulate(lambda: all_gather(torch.ones(1 + get_rank()), mesh).shape, 2)
        [torch.Size([3]), torch.Size([3])]
    """
    x, comm = plain(x), _resolve(group, "all_gather")
    dim = _dim("all_gather", x, dim)
    if sizes is None:
        lengths = _exchange(x.shape[dim], comm)
    else:
        lengths = _lengths("all_gather", "sizes", sizes, comm)
        _fits("all_gather", "sizes", lengths[comm.rank], x.shape[dim], dim)
    if _bare(x):
        return _gather(x, comm, dim, lengths)
    return _apply(_AllGather, x, comm, dim, lengths)


def reduce_scatter(
    x: torch.Tensor,
    group: Group,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    op: str = "sum",
) -> torch.Tensor:
    """Fold the tensors of all ranks, and keep this rank's piece along ``dim``.

    forward   rank 0: [a0 a1]  rank 1: [b0 b1]  ->  rank 0: a0+b0  rank 1: a1+b1
    adjoint   rank 0: c        rank 1: d        ->  both: [c d]

    Args:
        x: Tensor of one shape on all ranks.
        group: Communicator, or mesh of one axis; every rank of it must call.
        dim: Dim to cut along.
        sizes: Length of each rank's piece. None: as ``torch.chunk`` cuts.
        op: A name in ``REDUCTIONS``. Only sum and avg carry gradients.

    Returns:
        A new contiguous tensor. Sends (n-1)/n of the bytes of ``x``.

    Raises:
        ValueError: No such dim, ``sizes`` do not fit, or ``op`` has no adjoint.
        TypeError: ``op`` is not defined for the dtype.

    Example:
        >>> from dtensor.collectives.simulate import simulate
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (2,))
        >>> simulate(lambda: reduce_scatter(torch.arange(3), mesh).tolist(), ranks=2)
        [[0, 2], [4]]
    """
    x, comm = plain(x), _resolve(group, "reduce_scatter")
    dim = _dim("reduce_scatter", x, dim)
    if sizes is None:
        lengths = chunk_sizes(x.shape[dim], comm.size)
    else:
        lengths = _lengths("reduce_scatter", "sizes", sizes, comm)
        _fits("reduce_scatter", "sum of sizes", sum(lengths), x.shape[dim], dim)
    if _bare(x):
        return _scatter(x, comm, dim, lengths, op)
    _check_linear("reduce_scatter", x, op)
    return _apply(_ReduceScatter, x, comm, dim, lengths, op)


def all_to_all(
    x: torch.Tensor,
    group: Group,
    split_dim: int,
    concat_dim: int,
    split_sizes: Sequence[int] | None = None,
    concat_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Cut along one dim, send piece r to rank r, join what comes along another dim.

    forward   rank 0: [a0 a1]  rank 1: [b0 b1]  ->  rank 0: [a0 b0]  rank 1: [a1 b1]
    adjoint   rank 0: [c0 c1]  rank 1: [d0 d1]  ->  rank 0: [c0 d0]  rank 1: [c1 d1]

    With two different dims this moves a shard from one dim to the other: all ranks
    cut alike. With one dim twice, each rank may send any lengths to any rank.

    Args:
        x: The tensor to cut.
        group: Communicator, or mesh of one axis; every rank of it must call.
        split_dim: Dim to cut along.
        concat_dim: Dim to join along.
        split_sizes: Length of the piece for each rank. None: as ``torch.chunk`` cuts.
        concat_sizes: Length along ``concat_dim`` of the piece from each rank. None:
            the lengths are exchanged first.

    Returns:
        A new contiguous tensor. Sends the bytes of all pieces but this rank's own.

    Raises:
        ValueError: No such dim, or the sizes do not fit.

    Example:
        >>> from dtensor.collectives.simulate import simulate
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (2,))
        >>> simulate(lambda: all_to_all(torch.ones(1, 4), mesh, 1, 0).shape, ranks=2)
        [torch.Size([2, 2]), torch.Size([2, 2])]
    """
    x, comm = plain(x), _resolve(group, "all_to_all")
    split_dim = _dim("all_to_all", x, split_dim)
    concat_dim = _dim("all_to_all", x, concat_dim)
    if split_sizes is None:
        sent = chunk_sizes(x.shape[split_dim], comm.size)
    else:
        sent = _lengths("all_to_all", "split_sizes", split_sizes, comm)
        total = sum(sent)
        _fits("all_to_all", "sum of split_sizes", total, x.shape[split_dim], split_dim)
    own = sent[comm.rank] if split_dim == concat_dim else x.shape[concat_dim]
    if concat_sizes is not None:
        received = _lengths("all_to_all", "concat_sizes", concat_sizes, comm)
        _fits("all_to_all", "own concat_sizes", received[comm.rank], own, concat_dim)
    elif split_dim == concat_dim:
        one = (1,) * comm.size
        lengths = torch.tensor(sent, dtype=torch.int64, device="cpu")
        received = tuple(comm.all_to_all(lengths, one, one).tolist())
    else:
        received = _exchange(own, comm)
    if _bare(x):
        return _transpose(x, comm, split_dim, concat_dim, sent, received)
    return _apply(_AllToAll, x, comm, split_dim, concat_dim, sent, received)


def broadcast(x: torch.Tensor, group: Group, root: int = 0) -> torch.Tensor:
    """The tensor of one rank, on all ranks.

    forward   rank 0: a    rank 1: (b)  ->  rank 0: a    rank 1: a     (root 0)
    adjoint   rank 0: c    rank 1: d    ->  rank 0: c+d  rank 1: 0

    Args:
        x: On every rank a tensor of the right shape and dtype; its values matter at
            the root only. It requires grad on all ranks or on none.
        group: Communicator, or mesh of one axis; every rank of it must call.
        root: Position of the sender along the axis (not a world rank).

    Returns:
        A new tensor. Sends (n-1)/n of its bytes per rank, on average.

    Raises:
        ValueError: ``root`` is no position of the axis.

    Example:
        >>> from dtensor.collectives.simulate import simulate
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> from dtensor.mesh.world import get_rank
        >>> mesh = init_device_mesh("cpu", (3,))
        >>> simulate(lambda: broadcast(torch.tensor(get_rank()), mesh, 1).item(), 3)
        [1, 1, 1]
    """
    x, comm = plain(x), _resolve(group, "broadcast")
    if _bare(x):
        return comm.broadcast(x, root)
    return _apply(_Broadcast, x, comm, root)


def permute(x: torch.Tensor, group: Group, shift: int) -> torch.Tensor:
    """Pass the tensors on around the ring of ranks.

    forward   rank 0: a  rank 1: b  rank 2: c  ->  rank 0: c  1: a  2: b   (shift 1)
    adjoint   rank 0: d  rank 1: e  rank 2: f  ->  rank 0: e  1: f  2: d

    Args:
        x: Tensor of one shape on all ranks.
        group: Communicator, or mesh of one axis; every rank of it must call.
        shift: How many positions to pass it on; negative ones go back.

    Returns:
        A new tensor. Sends its bytes, or none where the shift is a whole turn.

    Example:
        >>> from dtensor.collectives.simulate import simulate
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> from dtensor.mesh.world import get_rank
        >>> mesh = init_device_mesh("cpu", (3,))
        >>> simulate(lambda: permute(torch.tensor(get_rank()), mesh, 1).item(), 3)
        [2, 0, 1]
    """
    x, comm = plain(x), _resolve(group, "permute")
    if _bare(x):
        return _shift(x, comm, shift)
    return _apply(_Permute, x, comm, shift)


def identity_all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Megatron's f: enter a parallel region with a value that is alike on all ranks.

    forward   both: a                       ->  both: a         (no communication)
    adjoint   rank 0: c        rank 1: d    ->  both: c+d

    Each rank then uses the value for its share of the work. The cotangents that come
    back are shares; summed, they are the gradient that a rank alone would have found.

    Args:
        x: The same values on every rank.
        group: Communicator, or mesh of one axis; every rank of it must call, and run
            the backward.

    Returns:
        A view of ``x``.

    Example:
        >>> from dtensor.collectives.simulate import simulate
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> from dtensor.mesh.world import get_rank
        >>> mesh = init_device_mesh("cpu", (2,))
        >>> def program():
        ...     x = torch.ones((), requires_grad=True)
        ...     (identity_all_reduce(x, mesh) * (1 + get_rank())).backward()
        ...     return x.grad.item()
        >>> simulate(program, ranks=2)
        [3.0, 3.0]
    """
    x, comm = plain(x), _resolve(group, "identity_all_reduce")
    if _bare(x):
        return x.view_as(x)
    return _apply(_IdentityAllReduce, x, comm)


def all_reduce_identity(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Megatron's g: leave a parallel region with the sum, alike on all ranks.

    forward   rank 0: a        rank 1: b    ->  both: a+b
    adjoint   both: c                       ->  both: c         (no communication)

    Every rank then computes the same from the sum, and the cotangent that comes back
    is the same on every rank: it counts once.

    Args:
        x: This rank's addend.
        group: Communicator, or mesh of one axis; every rank of it must call.

    Returns:
        A new tensor. Sends 2(n-1)/n of its bytes.

    Example:
        >>> from dtensor.collectives.simulate import simulate
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (2,))
        >>> def program():
        ...     x = torch.ones((), requires_grad=True)
        ...     all_reduce_identity(x, mesh).backward()
        ...     return x.grad.item()
        >>> simulate(program, ranks=2)
        [1.0, 1.0]
    """
    x, comm = plain(x), _resolve(group, "all_reduce_identity")
    if _bare(x):
        return comm.all_reduce(x)
    return _apply(_AllReduceIdentity, x, comm)


def _reduce_to(x: torch.Tensor, comm: Communicator, root: int) -> torch.Tensor:
    """The sum at ``root``, zeros elsewhere: the adjoint of ``broadcast``."""
    x = plain(x)
    if _bare(x):
        counts = [0] * comm.size
        counts[root] = x.numel()
        total = comm.reduce_scatter(x, counts)
        return total.view(x.shape) if comm.rank == root else torch.zeros_like(x)
    return _apply(_ReduceTo, x, comm, root)


# ------------------------------------------------- the verbs without autograd, on dims
def _gather(
    x: torch.Tensor, comm: Communicator, dim: int, sizes: tuple[int, ...]
) -> torch.Tensor:
    inner = _inner(x, dim)
    flat = comm.all_gather(x, [n * inner for n in sizes])
    return _join(flat, list(x.shape), dim, sizes)


def _scatter(
    x: torch.Tensor, comm: Communicator, dim: int, sizes: tuple[int, ...], op: str
) -> torch.Tensor:
    inner = _inner(x, dim)
    counts = [n * inner for n in sizes]
    flat = comm.reduce_scatter(_cut(x, dim, sizes), counts, op)
    return flat.view(_shape(x, dim, sizes[comm.rank]))


def _transpose(
    x: torch.Tensor,
    comm: Communicator,
    split_dim: int,
    concat_dim: int,
    sent: tuple[int, ...],
    received: tuple[int, ...],
) -> torch.Tensor:
    send_counts = [n * _inner(x, split_dim) for n in sent]
    shape = _shape(x, split_dim, sent[comm.rank])
    shape[concat_dim] = 1
    inner = math.prod(shape)
    recv_counts = [n * inner for n in received]
    flat = comm.all_to_all(_cut(x, split_dim, sent), send_counts, recv_counts)
    return _join(flat, shape, concat_dim, received)


def _shift(x: torch.Tensor, comm: Communicator, shift: int) -> torch.Tensor:
    n = comm.size
    dest, source = (comm.rank + shift) % n, (comm.rank - shift) % n
    return comm.permute(x, dest, source, x.numel()).view(x.shape)


def _cut(x: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """The pieces of ``x`` along ``dim``, one after another; no copy along dim 0."""
    if math.prod(x.shape[:dim]) == 1:
        return x
    pieces = x.split_with_sizes(list(sizes), dim)
    return torch.cat([piece.reshape(-1) for piece in pieces])


def _join(
    flat: torch.Tensor, shape: list[int], dim: int, sizes: tuple[int, ...]
) -> torch.Tensor:
    """Pieces of ``shape`` but for ``dim``, laid one after another, as one tensor."""
    if math.prod(shape[:dim]) == 1:
        return flat.view([*shape[:dim], sum(sizes), *shape[dim + 1 :]])
    inner = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    pieces = flat.split_with_sizes([n * inner for n in sizes])
    shaped = [
        piece.view([*shape[:dim], n, *shape[dim + 1 :]])
        for piece, n in zip(pieces, sizes, strict=True)
    ]
    return torch.cat(shaped, dim)


def _inner(x: torch.Tensor, dim: int) -> int:
    return math.prod(x.shape[:dim]) * math.prod(x.shape[dim + 1 :])


def _shape(x: torch.Tensor, dim: int, length: int) -> list[int]:
    return [*x.shape[:dim], length, *x.shape[dim + 1 :]]


# --------------------------------------------------------- the autograd of each verb
class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator, op: str) -> torch.Tensor:
        ctx.rest = comm, op
        return comm.all_reduce(x, op)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return all_reduce(grads[0], *ctx.rest), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return all_reduce(tangents[0], *ctx.rest)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Communicator, dim: int, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.rest = comm, dim, sizes
        return _gather(x, comm, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return reduce_scatter(grads[0], *ctx.rest), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return all_gather(tangents[0], *ctx.rest)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        comm: Communicator,
        dim: int,
        sizes: tuple[int, ...],
        op: str,
    ) -> torch.Tensor:
        ctx.rest = comm, dim, sizes, op
        return _scatter(x, comm, dim, sizes, op)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        comm, dim, sizes, op = ctx.rest
        whole = all_gather(grads[0], comm, dim, sizes)
        if op == "avg":
            whole = whole / comm.size
        return whole, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return reduce_scatter(tangents[0], *ctx.rest)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        comm: Communicator,
        split_dim: int,
        concat_dim: int,
        sent: tuple[int, ...],
        received: tuple[int, ...],
    ) -> torch.Tensor:
        ctx.rest = comm, split_dim, concat_dim, sent, received
        return _transpose(x, comm, split_dim, concat_dim, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        comm, split_dim, concat_dim, sent, received = ctx.rest
        back = all_to_all(grads[0], comm, concat_dim, split_dim, received, sent)
        return back, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return all_to_all(tangents[0], *ctx.rest)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Communicator, root: int
    ) -> torch.Tensor:
        ctx.rest = comm, root
        return comm.broadcast(x, root)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _reduce_to(grads[0], *ctx.rest), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return broadcast(tangents[0], *ctx.rest)


class _ReduceTo(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Communicator, root: int
    ) -> torch.Tensor:
        ctx.rest = comm, root
        return _reduce_to(x, comm, root)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return broadcast(grads[0], *ctx.rest), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _reduce_to(tangents[0], *ctx.rest)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Communicator, shift: int
    ) -> torch.Tensor:
        ctx.rest = comm, shift
        return _shift(x, comm, shift)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        comm, shift = ctx.rest
        return permute(grads[0], comm, -shift), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return permute(tangents[0], *ctx.rest)


class _IdentityAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return all_reduce_identity(grads[0], ctx.comm), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0].view_as(tangents[0])


class _AllReduceIdentity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return comm.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return identity_all_reduce(grads[0], ctx.comm), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return all_reduce_identity(tangents[0], ctx.comm)


def _apply(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


# ---------------------------------------------------------------------- the arguments
def plain(x: torch.Tensor) -> torch.Tensor:
    """The tensor without its Python subclass, still connected to its graph.

    Raises:
        TypeError: It is inside a torch.func transform, where its values are not at
            hand.
    """
    if type(x) is not torch.Tensor:
        if not isinstance(x, torch.Tensor):
            raise TypeError(
                f"collective: not a tensor, got {type(x).__name__}, expected a "
                f"torch.Tensor. Convert it with torch.as_tensor(x)."
            )
        with torch._C.DisableTorchFunctionSubclass():
            x = x.as_subclass(torch.Tensor)
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise TypeError(
            "collective: no values to send inside torch.func or vmap, got a wrapped "
            "tensor, expected one of the plain program. Call the collective outside "
            "of the transform, or use torch.autograd.grad."
        )
    return x


def _bare(x: torch.Tensor) -> bool:
    """Whether nothing is being differentiated, so that no graph node is needed."""
    recording = x.requires_grad and torch.is_grad_enabled()
    return not recording and forward_ad._current_level < 0


def _resolve(group: Group, verb: str) -> Communicator:
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(
            f"{verb}: a collective runs over one axis, got {group!r}, expected a mesh "
            f"of one. Pass mesh['name'], or mesh.flatten() for all ranks."
        )
    return communicator(group, 0)


def _exchange(length: int, comm: Communicator) -> tuple[int, ...]:
    """The lengths of all ranks."""
    mine = torch.tensor([length], dtype=torch.int64, device="cpu")
    return tuple(comm.all_gather(mine, (1,) * comm.size).tolist())


def _dim(verb: str, x: torch.Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        mend = "Use x.reshape(1) first" if x.ndim == 0 else "Name one of its dims"
        raise ValueError(
            f"{verb}: no such dim, got {dim} for shape {tuple(x.shape)}, expected "
            f"{-x.ndim} to {x.ndim - 1}. {mend}."
        )
    return dim % x.ndim


def _lengths(
    verb: str, name: str, sizes: Sequence[int], comm: Communicator
) -> tuple[int, ...]:
    lengths = tuple(int(n) for n in sizes)
    if len(lengths) != comm.size or min(lengths) < 0:
        raise ValueError(
            f"{verb}: {name} do not fit the axis, got {lengths} on axis "
            f"{comm.axis!r}, expected {comm.size} lengths of zero or more. "
            f"Give one length per rank."
        )
    return lengths


def _fits(verb: str, name: str, got: int, expected: int, dim: int) -> None:
    if got != expected:
        raise ValueError(
            f"{verb}: {name} does not fit dim {dim}, got {got}, expected {expected}. "
            f"Give the lengths of all ranks in rank order."
        )


def _check_linear(verb: str, x: torch.Tensor, op: str) -> None:
    row = REDUCTIONS.get(op)
    if row is not None and not row.linear and x.requires_grad:
        raise ValueError(
            f"{verb}: the reduction has no adjoint, got {op!r} for a tensor that "
            f"requires grad, expected sum or avg. Pass x.detach()."
        )
