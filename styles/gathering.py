"""One flat buffer for the parameters of a unit: gathered, and its gradients scattered.

Each rank holds a piece of every parameter, cut along one dim. What travels lies in the
order of the ranks, what a module computes with in the order of the parameters::

    rank 0: a0 b0    rank 1: a1 b1     shards
    a0 b0 a1 b1                        as it is gathered, or to be scattered
    a0 a1 b0 b1                        a = [a0 a1] and b = [b0 b1], each in one piece

So one all-gather serves any number of parameters, and its adjoint is one
reduce-scatter. With one parameter the two orders are the same and nothing is copied.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dtensor.collectives import functional
from dtensor.collectives.communicator import Communicator

T = torch.Tensor


class Packing:
    """How pieces of some tensors lie in one buffer.

    Args:
        shapes: Shape of each tensor where it is whole (along the ranks of ``comm``).
        sizes: For each, the length of the dim that is cut, on each rank.
        dims: For each, that dim. In the buffer it is the first one.
        comm: Communicator of the ranks that share them.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        dims: Sequence[int],
        comm: Communicator,
    ) -> None:
        self.dims = list(dims)
        # As they lie in the buffer, the dim that is cut in front.
        self.shapes = [
            (s[d], *s[:d], *s[d + 1 :])
            for s, d in zip(map(tuple, shapes), dims, strict=True)
        ]
        self.sizes = [tuple(s) for s in sizes]
        self.comm = comm
        self.inner = [math.prod(s[1:]) for s in self.shapes]
        self._count()

    def _count(self) -> None:
        self.counts = [
            sum(cut[r] * n for cut, n in zip(self.sizes, self.inner, strict=True))
            for r in range(self.comm.size)
        ]
        self.even = all(len(set(cut)) == 1 for cut in self.sizes)
        self.total = sum(self.counts)

    def part(self, chosen: Sequence[int]) -> Packing:
        """How some of the tensors lie in a buffer of their own."""
        found = copy.copy(self)
        for name in ("shapes", "sizes", "dims", "inner"):
            setattr(found, name, [getattr(self, name)[i] for i in chosen])
        found._count()
        return found

    def gather(self, shards: Sequence[T], dtype: torch.dtype) -> T:
        """All tensors, one after another, on every rank.

        Args:
            shards: This rank's pieces.
            dtype: What they are cast to before they are sent.

        Returns:
            A new buffer. Sends (n-1)/n of its bytes. For a moment two of its size are
            held: what came, and the same in order.
        """
        shards = self._fronted(shards)
        if len(shards) == 1 and shards[0].dtype is dtype:
            sent = shards[0].reshape(-1)
        else:
            sent = shards[0].new_empty(self.counts[self.comm.rank], dtype=dtype)
            lengths = [s.numel() for s in shards]
            for place, shard in zip(torch.split(sent, lengths), shards, strict=True):
                place.view(shard.shape).copy_(shard)
        came = self.comm.all_gather(sent, self.counts) if self.comm.size > 1 else sent
        if len(shards) == 1:
            return came.clone() if came is sent else came
        whole = torch.empty_like(came)
        for piece, place in self._pairs(came, self._fronted(self.views(whole))):
            place.copy_(piece)
        return whole

    def views(self, whole: T) -> list[T]:
        """The tensors in a buffer. To autograd they are no views of one another."""
        found, at = [], whole.storage_offset()
        for shape, dim in zip(self.shapes, self.dims, strict=True):
            size, stride = list(shape[1:]), list(_strides(shape))
            step = stride.pop(0)
            size.insert(dim, shape[0])
            stride.insert(dim, step)
            x = whole.new_empty(0)
            x.set_(whole.untyped_storage(), at, size, stride)
            found.append(x)
            at += math.prod(shape)
        return found

    def scatter(
        self,
        grads: Sequence[T | None],
        like: Sequence[torch.dtype],
        dtype: torch.dtype | None,
    ) -> list[T]:
        """This rank's pieces of the sums of all ranks' tensors; differentiable.

        Args:
            grads: Whole tensors; None is zero.
            like: Dtypes of the results.
            dtype: What is summed; that of the tensors by default.

        Returns:
            Pieces. One reduce-scatter, which sends (n-1)/n of the bytes of the buffer.
        """
        given = next(g for g in grads if g is not None)
        dtype = given.dtype if dtype is None else dtype
        whole = [
            given.new_zeros(shape) if g is None else g.movedim(dim, 0)
            for g, shape, dim in zip(grads, self.shapes, self.dims, strict=True)
        ]
        if torch.is_grad_enabled() and any(g.requires_grad for g in whole):
            rows = [
                g.narrow(0, sum(cut[:r]), cut[r]).reshape(-1).to(dtype)
                for r in range(self.comm.size)
                for g, cut in zip(whole, self.sizes, strict=True)
            ]
            flat = torch.cat(rows)
        else:
            flat = given.new_empty(self.total, dtype=dtype)
            for place, piece in self._pairs(flat, whole):
                place.copy_(piece)
        del whole, grads, given
        if self.comm.size > 1:
            flat = functional.reduce_scatter(flat, self.comm, 0, self.counts)
        found, mine = [], self.comm.rank
        lengths = [cut[mine] * n for cut, n in zip(self.sizes, self.inner, strict=True)]
        for i, piece in enumerate(torch.split(flat, lengths)):
            shape = [self.sizes[i][mine], *self.shapes[i][1:]]
            # No view to autograd: what a leaf gets may be detached in place.
            piece = torch.ops.aten._unsafe_view(piece, shape).to(like[i])
            dim = self.dims[i]
            found.append(piece.movedim(0, dim).contiguous() if dim else piece)
        return found

    def _fronted(self, xs: Sequence[T]) -> list[T]:
        return [x.movedim(d, 0) for x, d in zip(xs, self.dims, strict=True)]

    def _pairs(self, ranked: T, whole: Sequence[T]) -> Iterator[tuple[T, T]]:
        """Each stretch of a buffer in the order of ranks, and where it belongs."""
        at = 0
        if self.even:
            n = self.comm.size
            table = ranked.view(n, -1) if self.total else ranked.view(n, 0)
            for x, cut, inner in zip(whole, self.sizes, self.inner, strict=True):
                length = cut[0] * inner
                rest = x.shape[1:]
                if length:
                    stretch = torch.unflatten(
                        table[:, at : at + length], 1, (cut[0], *rest)
                    )
                    yield stretch, torch.unflatten(x, 0, (n, cut[0]))
                at += length
            return
        for r in range(self.comm.size):
            for x, cut, inner in zip(whole, self.sizes, self.inner, strict=True):
                length = cut[r] * inner
                stretch = ranked[at : at + length].view(cut[r], *x.shape[1:])
                yield stretch, x.narrow(0, sum(cut[:r]), cut[r])
                at += length


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    found, step = [], 1
    for n in reversed(shape):
        found.append(step)
        step *= max(1, n)
    return tuple(reversed(found))


class Gathered(torch.autograd.Function):
    """From this rank's shards to whole parameters that lie in a gathered buffer.

    forward   rank 0: a0       rank 1: a1       ->  both: [a0 a1]
    adjoint   rank 0: [c0 c1]  rank 1: [d0 d1]  ->  rank 0: c0+d0  rank 1: c1+d1

    The buffer comes from outside, so that backward can use it again; the node keeps
    nothing of it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        packing: Packing,
        whole: T,
        reduce_dtype: torch.dtype | None,
        done: Callable[[], None],
        *shards: T,
    ) -> tuple[T, ...]:
        """The parameters."""
        needs = ctx.needs_input_grad[4:]
        ctx.needs = needs
        ctx.packing = packing
        if not all(needs):
            ctx.packing = packing.part([i for i, n in enumerate(needs) if n])
        ctx.like = [x.dtype for x, n in zip(shards, needs, strict=True) if n]
        ctx.reduce_dtype, ctx.done = reduce_dtype, done
        ctx.set_materialize_grads(False)
        found = packing.views(whole)
        ctx.mark_non_differentiable(
            *[x for x, n in zip(found, needs, strict=True) if not n]
        )
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: T | None) -> tuple[Any, ...]:
        """Let go of the parameters, then sum the cotangents and keep a piece."""
        ctx.done()
        wanted = [g for g, n in zip(grads, ctx.needs, strict=True) if n]
        del grads
        if all(g is None for g in wanted):
            return (None,) * (4 + len(ctx.needs))
        pieces = iter(ctx.packing.scatter(wanted, ctx.like, ctx.reduce_dtype))
        return None, None, None, None, *(next(pieces) if n else None for n in ctx.needs)
