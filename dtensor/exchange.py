"""Blocks from rank to rank: the all-to-all of arbitrary boxes of a tensor.

Each rank holds one box of the global tensor before and one afterwards; what goes from
one rank to another is the intersection of two boxes. Where several ranks want the same
part they all get it, and the adjoint adds what they send back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.collectives.communicator import Communicator
from dtensor.kernels.pack import pack, unpack

Box = tuple[tuple[int, int], ...]
Slices = tuple[slice, ...]


def meet(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None where there is none."""
    out = []
    for (start, stop), (begin, end) in zip(a, b, strict=True):
        low, high = max(start, begin), min(stop, end)
        if low >= high:
            return None
        out.append((low, high))
    return tuple(out)


def inside(part: Box, box: Box) -> Slices:
    """A part of a box as slices of the tensor that holds the box."""
    return tuple(
        slice(low - start, high - start)
        for (low, high), (start, _) in zip(part, box, strict=True)
    )


def shape_of(box: Box) -> tuple[int, ...]:
    """Lengths of a box."""
    return tuple(stop - start for start, stop in box)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's part in an exchange of boxes.

    Attributes:
        comm: The ranks that take part.
        sends: For each rank, what it gets of this rank's tensor; None: nothing.
        receives: For each rank, where in the result its part goes.
        before: Shape of this rank's tensor.
        after: Shape of the result.
        adds: Whether parts are added up (in the adjoint) or put in their places.
        one_by_one: Send block after block, holding one at a time, rather than all.
        agree: Whether the ranks may differ in what autograd knows, and must agree.
    """

    comm: Communicator
    sends: tuple[Slices | None, ...]
    receives: tuple[Slices | None, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    adds: bool
    one_by_one: bool
    agree: bool = False

    @classmethod
    def between(
        cls,
        before: Sequence[Box],
        after: Sequence[Box],
        comm: Communicator,
        one_by_one: bool,
        owners: Sequence[Sequence[int]] | None = None,
    ) -> Exchange:
        """The part of this rank in going from boxes to boxes, one of each per rank.

        Args:
            before: The box of each rank of ``comm`` before; no two overlap, unless
                ``owners`` is given.
            after: The box of each rank afterwards.
            comm: The ranks, in order.
            one_by_one: See the attribute.
            owners: For each rank, the ranks whose boxes it reads.
        """
        me = comm.rank
        sends: list[Slices | None] = []
        receives: list[Slices | None] = []
        for rank in range(comm.size):
            out = meet(before[me], after[rank])
            if owners is not None and me not in owners[rank]:
                out = None
            sends.append(None if out is None else inside(out, before[me]))
            come = meet(before[rank], after[me])
            if owners is not None and rank not in owners[me]:
                come = None
            receives.append(None if come is None else inside(come, after[me]))
        return cls(
            comm,
            tuple(sends),
            tuple(receives),
            shape_of(before[me]),
            shape_of(after[me]),
            False,
            one_by_one,
        )

    def adjoint(self) -> Exchange:
        """The way back; parts that several ranks got are added up."""
        return Exchange(
            self.comm,
            self.receives,
            self.sends,
            self.after,
            self.before,
            True,
            self.one_by_one,
            self.agree,
        )

    def all_record(self, x: torch.Tensor) -> bool:
        """Whether autograd knows what every rank sends; all ranks learn the same."""
        flag = torch.tensor([x.requires_grad], dtype=torch.uint8, device=x.device)
        return bool(self.comm.all_reduce(flag, "min").item())

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Send and receive; no autograd."""
        out = x.new_zeros(self.after)
        if not self.one_by_one:
            sent = [0 if s is None else x[s].numel() for s in self.sends]
            came = [0 if s is None else out[s].numel() for s in self.receives]
            flat = self.comm.all_to_all(pack(x, self.sends), sent, came)
            if not self.adds:
                return unpack(flat, out, self.receives)
            for where, piece in zip(
                self.receives, torch.split(flat, came), strict=True
            ):
                self._put(out, where, piece)
            return out
        n, me = self.comm.size, self.comm.rank
        for shift in range(n):
            dest, source = (me + shift) % n, (me - shift) % n
            what, where = self.sends[dest], self.receives[source]
            if shift == 0:
                if what is not None:
                    self._put(out, where, x[what])
                continue
            piece = x.new_empty(0) if what is None else x[what].reshape(-1)
            count = 0 if where is None else out[where].numel()
            self._put(out, where, self.comm.permute(piece, dest, source, count))
        return out

    def _put(self, out: torch.Tensor, where: Slices | None, part: torch.Tensor) -> None:
        if where is None:
            return
        place = out[where]
        if self.adds:
            place.add_(part.view(place.shape))
        else:
            place.copy_(part.view(place.shape))

    @property
    def sent(self) -> int:
        """Elements that this rank sends to others."""
        return sum(
            math.prod(s.stop - s.start for s in what)
            for rank, what in enumerate(self.sends)
            if what is not None and rank != self.comm.rank
        )


class Exchanged(torch.autograd.Function):
    """An exchange; its adjoint is the exchange the other way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: Exchange) -> torch.Tensor:
        """The result of ``plan.run``."""
        ctx.plan = plan
        return plan.run(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The cotangents on their way back."""
        from dtensor.moves import plain

        g, back = plain(grads[0]), ctx.plan.adjoint()
        if back.agree and torch.is_grad_enabled() and not back.all_record(g):
            g = g.detach()  # placeholders hang on more than the tensors do
        return exchange(g, back), None


def exchange(x: torch.Tensor, plan: Exchange) -> torch.Tensor:
    """Run an exchange, differentiably; every rank of it must call."""
    if x.requires_grad and torch.is_grad_enabled():
        return Exchanged.apply(x, plan)  # type: ignore[no-any-return,no-untyped-call]
    return plan.run(x)
