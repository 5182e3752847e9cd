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

Those of the other convention, in which a value that is alike on all ranks counts once,
are in ``conjugate.py``.

A collective inside a backward must be reached by every rank: a tensor has to require
grad on all ranks of the axis or on none. The communicator is looked up in forward and
kept; backward, which may run on another thread, reads no context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from dtensor.collectives import arguments, dims
from dtensor.collectives.arguments import Group
from dtensor.collectives.communicator import Communicator
from dtensor.mesh.chunks import chunk_sizes


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
    x, comm = arguments.plain(x), arguments.resolve(group, "all_reduce")
    if bare(x):
        return comm.all_reduce(x, op)
    arguments.check_linear("all_reduce", x, op)
    return applied(_AllReduce, x, comm, op)


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
    x, comm = arguments.plain(x), arguments.resolve(group, "all_gather")
    dim = arguments.dim("all_gather", x, dim)
    if sizes is None:
        lengths = arguments.exchange(x.shape[dim], comm)
    else:
        lengths = arguments.lengths("all_gather", "sizes", sizes, comm)
        arguments.fits("all_gather", "sizes", lengths[comm.rank], x.shape[dim], dim)
    if bare(x):
        return dims.gather(x, comm, dim, lengths)
    return applied(_AllGather, x, comm, dim, lengths)


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
    x, comm = arguments.plain(x), arguments.resolve(group, "reduce_scatter")
    dim = arguments.dim("reduce_scatter", x, dim)
    if sizes is None:
        lengths = chunk_sizes(x.shape[dim], comm.size)
    else:
        lengths = arguments.lengths("reduce_scatter", "sizes", sizes, comm)
        arguments.fits(
            "reduce_scatter", "sum of sizes", sum(lengths), x.shape[dim], dim
        )
    if bare(x):
        return dims.scatter(x, comm, dim, lengths, op)
    arguments.check_linear("reduce_scatter", x, op)
    return applied(_ReduceScatter, x, comm, dim, lengths, op)


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
    x, comm = arguments.plain(x), arguments.resolve(group, "all_to_all")
    split_dim = arguments.dim("all_to_all", x, split_dim)
    concat_dim = arguments.dim("all_to_all", x, concat_dim)
    if split_sizes is None:
        sent = chunk_sizes(x.shape[split_dim], comm.size)
    else:
        sent = arguments.lengths("all_to_all", "split_sizes", split_sizes, comm)
        total = sum(sent)
        arguments.fits(
            "all_to_all", "sum of split_sizes", total, x.shape[split_dim], split_dim
        )
    own = sent[comm.rank] if split_dim == concat_dim else x.shape[concat_dim]
    if concat_sizes is not None:
        received = arguments.lengths("all_to_all", "concat_sizes", concat_sizes, comm)
        arguments.fits(
            "all_to_all", "own concat_sizes", received[comm.rank], own, concat_dim
        )
    elif split_dim == concat_dim:
        one = (1,) * comm.size
        lengths = torch.tensor(sent, dtype=torch.int64, device="cpu")
        received = tuple(comm.all_to_all(lengths, one, one).tolist())
    else:
        received = arguments.exchange(own, comm)
    if bare(x):
        return dims.transpose(x, comm, split_dim, concat_dim, sent, received)
    return applied(_AllToAll, x, comm, split_dim, concat_dim, sent, received)


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
    x, comm = arguments.plain(x), arguments.resolve(group, "broadcast")
    if bare(x):
        return comm.broadcast(x, root)
    return applied(_Broadcast, x, comm, root)


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
    x, comm = arguments.plain(x), arguments.resolve(group, "permute")
    if bare(x):
        return dims.shift(x, comm, shift)
    return applied(_Permute, x, comm, shift)


def _reduce_to(x: torch.Tensor, comm: Communicator, root: int) -> torch.Tensor:
    """The sum at ``root``, zeros elsewhere: the adjoint of ``broadcast``."""
    x = arguments.plain(x)
    if bare(x):
        counts = [0] * comm.size
        counts[root] = x.numel()
        total = comm.reduce_scatter(x, counts)
        return total.view(x.shape) if comm.rank == root else torch.zeros_like(x)
    return applied(_ReduceTo, x, comm, root)


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
        return dims.gather(x, comm, dim, sizes)

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
        return dims.scatter(x, comm, dim, sizes, op)

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
        return dims.transpose(x, comm, split_dim, concat_dim, sent, received)

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
        return dims.shift(x, comm, shift)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        comm, shift = ctx.rest
        return permute(grads[0], comm, -shift), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return permute(tangents[0], *ctx.rest)


def applied(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    """What a function of autograd gives, typed."""
    result: torch.Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def bare(x: torch.Tensor) -> bool:
    """Whether nothing is being differentiated, so that no graph node is needed."""
    recording = x.requires_grad and torch.is_grad_enabled()
    return not recording and forward_ad._current_level < 0
