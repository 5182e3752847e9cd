"""Largest and smallest: ``amax``, ``max``, ``argmax``, ``aminmax`` and their kind.

Along a cut dim every rank finds the extremum of its shard, and one all-reduce or
all-gather of results finds that of all. An empty shard contributes the identity. Equal
elements share the gradient, or the first of them has it, as torch does in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtensor.calls import Call, Operand, Rule
from dtensor.collectives.reductions import REDUCTIONS
from dtensor.notation import Layout, Notation
from dtensor.rules.partition import (
    Partition,
    Piece,
    ordered,
    reducing,
    sloped,
)
from dtensor.rules.reductions import dims_of, reduce_args, whole_dims

T = torch.Tensor
BIGGEST_INDEX = torch.iinfo(torch.int64).max


def lowest(x: T, dims: list[int], largest: bool) -> T:
    """The identity in place of an extremum, of an empty shard, tied to its graph."""
    identity = REDUCTIONS["max" if largest else "min"].identity(x.dtype)
    if x.dtype == torch.bool:
        return x.any(dims[0], keepdim=True).sum(dims, keepdim=True).bool() | identity
    if not x.is_floating_point():
        return x.sum(dims, keepdim=True).to(x.dtype) + identity
    return x.sum(dims, keepdim=True) + identity


def extremum(part: Partition, x: T, largest: bool) -> T:
    """The extremum over all pieces, no gradient."""
    if part.mine.size == 0:
        local = lowest(x, part.dims, largest)
    else:
        local = (torch.amax if largest else torch.amin)(x, part.dims, keepdim=True)
    local = local.to(x.dtype)
    return part.fold(local, "max" if largest else "min")


def share(part: Partition, x: T, value: T, nans: bool) -> T:
    """What each element has of the gradient: equal ones alike, all together 1."""
    mask = x == value
    if nans:
        mask = mask | (x.isnan() & value.isnan())
    exact = torch.promote_types(x.dtype, torch.float32)
    count = part.fold(mask.sum(part.dims, keepdim=True).to(exact), "sum")
    return mask / count


def shared(largest: bool, nans: bool) -> Callable[[Partition, T], T]:
    """The extremum, whose gradient equal elements share.

    Args:
        largest: The largest or the smallest.
        nans: Whether nans share the gradient of a nan (as in torch's ``max()``), or
            leave all of it undefined (as in torch's ``amax``).
    """

    def find(part: Partition, x: T) -> T:
        return extremum(part, x, largest)

    def slope(part: Partition, x: T, value: T) -> T:
        return share(part, x, value, nans)

    def program(part: Partition, x: T) -> T:
        return sloped(x, part, find, slope)

    return program


def amax(largest: bool) -> Rule:
    """The rule of ``amax`` and ``amin``. One all-reduce of results."""
    find = shared(largest, nans=False)
    return reducing(
        lambda call: reduce_args(call, 1, 2),
        lambda part, x, args, kwargs: find(part, x),
        ordered,
        whole_dims(1, 2),
    )


def place_of(spec_shape: torch.Size, dims: list[int], piece: Piece, local: T) -> T:
    """Index among all elements of those dims, from an index within a piece."""
    at = torch.zeros_like(local)
    stride = 1
    for d, offset, n in reversed(
        list(zip(dims, piece.offsets, piece.lengths, strict=True))
    ):
        at = at + (local % max(1, n) + offset) * stride
        local = local // max(1, n)
        stride *= spec_shape[d]
    return at


def first_of(part: Partition, x: T, largest: bool) -> tuple[T, T]:
    """The extremum over all pieces, and the first index at which it is.

    The value is differentiable; its gradient goes to that index. Of several dims the
    index is that of the flattened tensor. One all-gather of values, one of indices.
    """
    dims = part.dims
    if part.mine.size == 0:
        value = lowest(x, dims, largest).to(x.dtype)
        at = torch.full(value.shape, BIGGEST_INDEX, device=x.device)
    elif len(dims) == 1:
        value, local = (torch.max if largest else torch.min)(x, dims[0], keepdim=True)
        at = local + part.mine.offsets[0]
    else:
        flat = x.reshape(-1)
        value, local = (torch.max if largest else torch.min)(flat, 0)
        at = place_of(part.spec.shape, dims, part.mine, local).reshape((1,) * x.ndim)
        value = value.reshape((1,) * x.ndim)
    values, places = part.stacked(value), part.stacked(at)
    with torch.no_grad():
        best = (torch.amax if largest else torch.amin)(values, 0, keepdim=True)
        wins = values == best
        if x.is_floating_point():
            wins = wins | (values.isnan() & best.isnan())
        places = places.masked_fill(~wins, BIGGEST_INDEX)
        # of an all-identity result, such as all -inf, empty pieces are no winners
        first, who = places.min(0, keepdim=True)
    return values.gather(0, who)[0], first[0]


def with_index(largest: bool) -> Rule:
    """The rule of ``max`` and ``min`` in all forms."""
    gathers = whole_dims(1, 2, outs=2, needs_dim=True)
    find = shared(largest, nans=True)
    alone = reducing(
        lambda call: (dims_of(None, call.operands[0].ndim), False),
        lambda part, x, args, kwargs: find(part, x),
        ordered,
        gathers,
    )
    along = reducing(
        lambda call: reduce_args(call, 1, 2),
        lambda part, x, args, kwargs: first_of(part, x, largest),
        ordered,
        gathers,
        outs=2,
    )

    def rule(call: Call) -> Notation | Layout | None:
        other = call.arg(1, "other")
        if isinstance(other, Operand):
            return gathers(call)
        dim = call.arg(1, "dim", call.kwargs.get("axis"))
        return alone(call) if dim is None else along(call)

    return rule


def arg(largest: bool) -> Rule:
    """The rule of ``argmax`` and ``argmin``."""

    def orders(dtype: torch.dtype) -> bool:
        return ordered(dtype) and dtype != torch.bool

    return reducing(
        lambda call: reduce_args(call, 1, 2),
        lambda part, x, args, kwargs: first_of(part, x.detach(), largest)[1],
        orders,
        whole_dims(1, 2),
    )


def both_parse(call: Call) -> tuple[list[int], bool]:
    """``aminmax(x, *, dim, keepdim)``."""
    keep = bool(call.kwargs.get("keepdim", False))
    return dims_of(call.kwargs.get("dim"), call.operands[0].ndim), keep


def both_whole(call: Call) -> Notation:
    """``aminmax`` with whole dims."""
    dims, keep = both_parse(call)
    n = call.operands[0].ndim
    out = tuple(
        ("kept", d) if d in dims else d for d in range(n) if keep or d not in dims
    )
    return Notation([tuple(range(n))], [out] * 2, whole=set(dims))


def both(part: Partition, x: T, args: Any, kwargs: Any) -> tuple[T, T]:
    """``aminmax``: the two extrema of all pieces."""
    return shared(False, nans=False)(part, x), shared(True, nans=False)(part, x)


aminmax = reducing(both_parse, both, ordered, both_whole, outs=2)
