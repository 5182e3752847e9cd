"""Ops along dims that are cut: what each rank has of them, and rules built on that.

An op that reduces a cut dim need not gather it. Each rank reduces its shard, the small
results travel, and every rank finishes the same way. ``reducing`` makes such a rule from
a program of that kind; the program sees a ``Partition``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.calls import Call, Rule
from dtensor.collectives import functional
from dtensor.notation import Layout, Notation
from dtensor.placement import Placement, Placements, Replicate, Shard, axes_of
from dtensor.redistribute import plain
from dtensor.rules.pointwise import built_in, without_partial
from dtensor.spec import Spec, block_of

T = torch.Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """What one coordinate of the cutting axes has.

    Attributes:
        offsets: Per dim of the partition, the global index of its first element.
        lengths: Per dim of the partition, its number of elements.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its number of elements, over the dims of the partition."""
        return math.prod(self.lengths)


class Partition:
    """How some dims of a tensor are cut, as one rank sees it.

    Attributes:
        spec: Layout of the tensor.
        dims: The dims, not negative.
        axes: The mesh axes that cut them; of one dim, the outermost first.
        pieces: What each coordinate of these axes has, in the order of ``stacked``; for
            one dim this is the order of its elements.
        index: This rank's place in ``pieces``.
    """

    __slots__ = ("spec", "dims", "axes", "pieces", "index")

    def __init__(self, spec: Spec, dims: Sequence[int]) -> None:
        self.spec = spec
        self.dims = list(dims)
        self.axes = [a for d in dims for a in axes_of(spec.placements, d)]
        mesh, places = spec.mesh.shape, spec.placements
        here = spec.coordinate or (0,) * len(mesh)
        self.pieces: list[Piece] = []
        self.index = 0
        for at in itertools.product(*[range(mesh[a]) for a in self.axes]):
            coordinate = list(here)
            for axis, i in zip(self.axes, at, strict=True):
                coordinate[axis] = i
            if tuple(coordinate) == tuple(here):
                self.index = len(self.pieces)
            blocks = [
                block_of(spec.shape[d], d, places, mesh, coordinate) for d in self.dims
            ]
            self.pieces.append(
                Piece(tuple(o for o, _ in blocks), tuple(n for _, n in blocks))
            )

    @property
    def mine(self) -> Piece:
        """What this rank has."""
        return self.pieces[self.index]

    @property
    def size(self) -> int:
        """Elements of the whole tensor along the dims."""
        return math.prod(self.spec.shape[d] for d in self.dims)

    def sum(self, x: T) -> T:
        """The sum over all pieces, differentiable."""
        for axis in reversed(self.axes):
            x = functional.all_reduce(x, self.spec.comm(axis))
        return x

    def fold(self, x: T, op: str) -> T:
        """A reduction over all pieces that carries no gradient."""
        x = x.detach()
        for axis in reversed(self.axes):
            x = self.spec.comm(axis).all_reduce(x.contiguous(), op)
        return x

    def stacked(self, x: T) -> T:
        """What all pieces have, along a new dim 0, differentiable."""
        x, count = x[None], 1
        for axis in reversed(self.axes):
            n = self.spec.mesh.shape[axis]
            x = functional.all_gather(x, self.spec.comm(axis), 0, (count,) * n)
            count *= n
        return x

    def joined(self, x: T, dim: int, lengths: Sequence[int]) -> T:
        """What all pieces have, along ``dim``; ``lengths`` has one per piece."""
        rest = list(lengths)
        at = self.index
        for axis in reversed(self.axes):
            n = self.spec.mesh.shape[axis]
            start = at // n * n
            x = functional.all_gather(
                x, self.spec.comm(axis), dim, rest[start : start + n]
            )
            rest = [sum(rest[i : i + n]) for i in range(0, len(rest), n)]
            at //= n
        return x

    def before(self) -> list[int]:
        """Pieces that come before this rank's and are not empty, for one dim."""
        return [i for i in range(self.index) if self.pieces[i].size]


Program = Callable[[Partition, T, tuple[Any, ...], dict[str, Any]], Any]
Dims = Callable[[Call], "tuple[list[int], bool]"]


def floating(dtype: torch.dtype) -> bool:
    """Whether a dtype is of real floating numbers."""
    return dtype.is_floating_point


def ordered(dtype: torch.dtype) -> bool:
    """Whether a dtype has a greater and a smaller."""
    return not dtype.is_complex


def inexact(dtype: torch.dtype) -> bool:
    """Whether a dtype is of floating or complex numbers."""
    return dtype.is_floating_point or dtype.is_complex


def anything(dtype: torch.dtype) -> bool:
    """Every dtype."""
    return True


def cut_axes(call: Call, dims: Sequence[int]) -> list[int]:
    """The axes that cut some of the dims of the first operand."""
    x = call.operands[0]
    return [a for d in dims for a in axes_of(x.placements, d)]


def travels(
    call: Call, dims: Sequence[int], fits: Callable[[torch.dtype], bool]
) -> bool:
    """Whether small results travel: some of ``dims`` is cut, and there are elements.

    Everything else is torch's own function on whole dims: without elements nothing
    moves, and each error comes from it, on every rank alike.
    """
    x = call.operands[0]
    if x.shape.numel() == 0 or not fits(x.dtype):
        return False
    return bool(cut_axes(call, dims))


def reduced_layout(
    call: Call, dims: Sequence[int], letters: Sequence[Any]
) -> tuple[Placements, Placements]:
    """Placements of the operand, cut dims left alone, and of what it reduces to.

    Args:
        call: The call.
        dims: The dims that are reduced.
        letters: The operand's dims in the order in which the result has them.
    """
    x = call.operands[0]
    places = built_in(without_partial(x.placements))
    out: list[Placement] = []
    for p in places:
        if isinstance(p, Shard) and p.dim not in dims:
            out.append(p.at_dim(letters.index(p.dim)))
        else:
            out.append(Replicate())
    return places, tuple(out)


def reducing(
    parse: Dims,
    program: Program,
    fits: Callable[[torch.dtype], bool],
    otherwise: Rule,
    outs: int = 1,
) -> Rule:
    """The rule of a reduction whose small results travel.

    Args:
        parse: Dims and ``keepdim`` of a call.
        program: Reduces this rank's shard together with the other ranks. It gets the
            partition, the shard as a plain tensor, the arguments after it and the named
            ones, and gives the results with the reduced dims kept.
        fits: Dtypes that the program takes.
        otherwise: The rule where no reduced dim is cut, or the program does not fit.
        outs: Number of results.
    """

    def rule(call: Call) -> Notation | Layout | None:
        dims, keep = parse(call)
        if not travels(call, dims, fits):
            return otherwise(call)
        n = call.operands[0].ndim
        kept = [d if d not in dims else ("kept", d) for d in range(n)]
        letters = kept if keep else [d for d in range(n) if d not in dims]
        places, out = reduced_layout(call, dims, letters)
        shapes = call.shapes()
        family = getattr(torch.return_types, call.name, None) if outs > 1 else None

        def run(ins: list[Spec], results: list[Spec]) -> Callable[..., Any]:
            part = Partition(ins[0], dims)

            def together(func: Any, args: Any, kwargs: Any) -> Any:
                found = program(part, plain(args[0]), args[1:], kwargs)
                if outs == 1:
                    return found.reshape(results[0].local_shape)
                shaped = [
                    f.reshape(s.local_shape)
                    for f, s in zip(found, results, strict=True)
                ]
                return family(shaped) if family is not None else tuple(shaped)

            return together

        return Layout([places], [out] * len(shapes), shapes, run=run)

    return rule


class Sloped(torch.autograd.Function):
    """A function of a cut tensor that is found without autograd, with its slope.

    forward   x -> value          (whole on every rank; ``find`` communicates)
    backward  c -> sum over the pieces of c, times ``slope(x, value)``

    ``slope`` is differentiable in both; so the second derivative is right as well.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: T,
        part: Partition,
        find: Callable[[Partition, T], T],
        slope: Callable[[Partition, T, T], T],
    ) -> T:
        value = find(part, x.detach())
        ctx.rest = part, slope
        ctx.save_for_backward(x, value)
        ctx.save_for_forward(x, value)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: T) -> Any:
        part, slope = ctx.rest
        x, value = map(plain, ctx.saved_tensors)
        back = part.sum(plain(grads[0])) * slope(part, x, value)
        return back.to(x.dtype), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        part, slope = ctx.rest
        x, value = ctx.saved_tensors
        along = tangents[0] * slope(part, x, value).conj()
        moved = part.sum(along.sum(part.dims, keepdim=True))
        return (moved.real if not value.is_complex() else moved).to(value.dtype)


def sloped(
    x: T,
    part: Partition,
    find: Callable[[Partition, T], T],
    slope: Callable[[Partition, T, T], T],
) -> T:
    """Apply ``Sloped``."""
    out: T = Sloped.apply(x, part, find, slope)  # type: ignore[no-untyped-call]
    return out
