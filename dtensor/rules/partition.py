"""Ops along dims that are cut: what each rank has of them, and rules built on that.

An op that reduces a cut dim need not gather it. Each rank reduces its shard, the small
results travel, and every rank finishes the same way. ``reducing`` makes such a rule from
a program of that kind; the program sees a ``Partition``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.calls import Call, Rule, meta_of, meta_run, tensors_in
from dtensor.collectives import functional
from dtensor.mesh.chunks import chunk_sizes
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
        nothing = any(call.operands[0].shape[d] == 0 for d in dims)
        if not travels(call, dims, fits) and not nothing:
            return otherwise(call)
        n = call.operands[0].ndim
        kept = [d if d not in dims else ("kept", d) for d in range(n)]
        letters = kept if keep else [d for d in range(n) if d not in dims]
        places, out = reduced_layout(call, dims, letters)
        shapes = call.shapes()
        if nothing:  # then every shard is of nothing: torch's answer, or its error
            return Layout([places], [out] * len(shapes), shapes)
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


def empty_shards(rule: Rule) -> Rule:
    """The rule, where torch's function may refuse a shard without elements.

    A rank whose shard is empty does not call it, but answers with an empty result, tied
    to the operands so that backward runs on this rank as on the others. For ops that
    keep every dim that may be cut.
    """

    def guarded(call: Call) -> Notation | Layout | None:
        n = rule(call)
        if not isinstance(n, Notation) or n.run is not None or call.inplace:
            return n
        if n.contracted or n.view or not may_be_empty(call):
            return n
        metas = meta_run(call.func, call.args, call.kwargs)
        dtypes = [m.dtype for m in metas]
        family = (
            getattr(torch.return_types, call.name, None) if len(metas) > 1 else None
        )

        def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
            if all(o.local_shape.numel() or not o.shape.numel() for o in outs):
                return lambda func, args, kwargs: func(*args, **kwargs)

            def nothing(func: Any, args: Any, kwargs: Any) -> Any:
                given = [plain(t) for _, t in tensors_in(args, kwargs)]
                made = []
                for i, spec in enumerate(outs):
                    out = given[0].new_zeros(spec.local_shape, dtype=dtypes[i])
                    for t, tied in zip(given, ties(call, given), strict=True):
                        if i in tied:
                            none = t.reshape(-1)[:0].sum()
                            none = none if out.is_complex() else none.abs()
                            out = out + none.to(out.dtype)
                    made.append(out)
                if len(made) == 1 and not n.many:
                    return made[0]
                return family(made) if family is not None else tuple(made)

            return nothing

        return dataclasses.replace(n, run=run)

    return guarded


def ties(call: Call, given: Sequence[T]) -> list[set[int]]:
    """Of each operand, the results that have a gradient for it, by a call on metas."""
    args = tuple(meta_of(a) for a in call.args)
    kwargs = {k: meta_of(v) for k, v in call.kwargs.items()}
    metas = [m for _, m in tensors_in(args, kwargs)]
    with torch.enable_grad():
        for t, m in zip(given, metas, strict=True):
            m.requires_grad_(t.requires_grad)
        asked = [m for m in metas if m.requires_grad]
        tied: list[set[int]] = [set() for _ in metas]
        if not asked:
            return tied
        out = call.func(*args, **kwargs)
        results = [out] if isinstance(out, T) else [o for o in out if isinstance(o, T)]
        for i, o in enumerate(results):
            if not o.requires_grad:
                continue
            found = torch.autograd.grad(
                o.sum().abs(), asked, allow_unused=True, retain_graph=True
            )
            by_id = {id(m): g for m, g in zip(asked, found, strict=True)}
            for k, m in enumerate(metas):
                if by_id.get(id(m)) is not None:
                    tied[k].add(i)
    return tied


def may_be_empty(call: Call) -> bool:
    """Whether some way to cut an operand over the mesh leaves an empty shard."""
    for o in call.operands:
        for length in o.shape:
            pieces = {length}
            for n in o.spec.mesh.shape:
                pieces |= {s for p in pieces for s in chunk_sizes(p, n)}
            if min(pieces) == 0 < length:
                return True
    return False
