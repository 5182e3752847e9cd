"""Vector norms over cut dims: the norm of the shards' norms, with torch's gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dtensor.calls import Call, Rule
from dtensor.notation import Layout, Notation
from dtensor.redistribute import plain
from dtensor.rules.extrema import extremum, share
from dtensor.rules.partition import (
    Partition,
    inexact,
    reduced_layout,
    reducing,
    sloped,
    travels,
)
from dtensor.rules.reductions import reduce_args, whole_dims
from dtensor.spec import Spec

T = torch.Tensor
Find = Callable[[Partition, T], T]
Slope = Callable[[Partition, T, T], T]


def find_norm(order: float) -> Find:
    """The norm over all pieces, no gradient; one all-gather of norms."""

    def find(part: Partition, x: T) -> T:
        if math.isinf(order):
            return extremum(part, x.abs(), order > 0)
        if part.mine.size:
            local = torch.linalg.vector_norm(x, order, part.dims, True)
        else:  # the norm of nothing: what adds nothing to the others
            none = math.inf if order < 0 else 0.0
            local = x.abs().sum(part.dims, keepdim=True) + none
        if order == 0:
            return part.fold(local, "sum")
        together: T = torch.linalg.vector_norm(part.stacked(local), order, 0)
        return together

    return find


def slope_of_norm(order: float) -> Slope:
    """The derivative by each element; zero where the norm or the element forbids it."""

    def slope(part: Partition, x: T, norm: T) -> T:
        if math.isinf(order):
            return x.sgn() * share(part, x.abs(), norm, nans=True)
        if order == 0:
            return torch.zeros_like(x)
        if order == 1:
            return x.sgn()
        if order == 2:
            return (x / norm).masked_fill(norm == 0, 0)
        if order < 1:
            size = x.abs().pow(order - 1).masked_fill(x == 0, 0)
            return x.sgn() * size * norm.pow(1 - order)
        if order < 2:
            size = x.sgn() * x.abs().pow(order - 1)
        else:
            size = x * x.abs().pow(order - 2)
        return size * norm.pow(order - 1).reciprocal().masked_fill(norm == 0, 0)

    return slope


def together(part: Partition, x: T, args: Any, kwargs: Any) -> T:
    """``linalg.vector_norm(x, ord, dim, keepdim)`` of all pieces."""
    order = float(args[0] if args else kwargs.get("ord", 2))
    result = kwargs.get("dtype") or x.dtype
    x = x.to(result)
    if x.dtype in (torch.float16, torch.bfloat16):  # as torch's own accumulator
        x = x.float()
    out = sloped(x, part, find_norm(order), slope_of_norm(order))
    real = torch.empty((), dtype=result).abs().dtype
    return out.to(real)


norm: Rule = reducing(
    lambda call: reduce_args(call, 2, 3),
    together,
    inexact,
    whole_dims(2, 3),
)


def dist(call: Call) -> Notation | Layout:
    """``dist(x, y, p)``: the norm of a difference; nothing but norms travels."""
    x, y = call.operands[:2]
    letters = tuple(range(x.ndim))
    cut = travels(call, letters, inexact) and x.shape == y.shape and x.dtype == y.dtype
    if not cut:
        ins = [letters, tuple(("other", d) for d in range(y.ndim))]
        return Notation(ins, [()], whole={a for sub in ins for a in sub})
    places, out = reduced_layout(call, letters, ())

    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        part = Partition(ins[0], letters)

        def of_difference(func: Any, args: Any, kwargs: Any) -> Any:
            order = args[2] if len(args) > 2 else kwargs.get("p", 2)
            away = plain(args[0]) - plain(args[1])
            return together(part, away, (order,), {}).reshape(())

        return of_difference

    return Layout([places] * 2, [out], [()], run=run)
