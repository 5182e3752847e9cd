"""Reductions and ops along dims: which letters are summed, which must stay whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch

from dtensor.calls import Call, Operand, Rule
from dtensor.notation import Letters, Notation
from dtensor.redistribute import plain
from dtensor.rules.partition import Partition, anything, reducing
from dtensor.rules.pointwise import broadcast_letters, whole_ones
from dtensor.spec import Spec


def dims_of(value: Any, ndim: int) -> list[int]:
    """Dims from an argument: None or empty stands for all of them."""
    if value is None or isinstance(value, (list, tuple)) and len(value) == 0:
        return list(range(ndim))
    given = [value] if isinstance(value, int) else list(value)
    for d in given:
        if not -max(1, ndim) <= d < max(1, ndim):
            raise IndexError(
                f"dim {d} is out of range for a tensor of {ndim} dims, expected "
                f"{-ndim} to {ndim - 1}"
            )
    return [d % ndim for d in given] if ndim else []


def out_letters(ndim: int, dims: list[int], keepdim: bool) -> Letters:
    """Letters of a reduced result; a kept dim of size 1 gets a fresh one."""
    out: list[Hashable] = []
    for d in range(ndim):
        if d not in dims:
            out.append(d)
        elif keepdim:
            out.append(("kept", d))
    return tuple(out)


def first(call: Call) -> Operand:
    """The reduced tensor."""
    return call.operands[0]


def reduce_args(
    call: Call, dim_at: int, keep_at: int, default: int | None = None
) -> tuple[list[int], bool]:
    """The dims and ``keepdim`` of a call."""
    dim = call.arg(dim_at, "dim", default)
    if "axis" in call.kwargs:
        dim = call.kwargs["axis"]
    keep = bool(call.arg(keep_at, "keepdim", False))
    if isinstance(dim, bool):  # var(x, unbiased)
        dim = None
    if isinstance(dim, torch.dtype):
        dim = None
    return dims_of(dim, first(call).ndim), keep


def summed(call: Call) -> Notation:
    """``sum``: sharded dims leave addends, linear."""
    dims, keep = reduce_args(call, 1, 2)
    n = first(call).ndim
    truth = call.kwargs.get("dtype") == torch.bool  # whether any: no addends
    return Notation(
        [tuple(range(n))],
        [out_letters(n, dims, keep)],
        whole=set(dims) if truth else set(),
        contracted=set() if truth else set(dims),
        linear=[] if truth or whole_numbers(call) else [{0}],
    )


def whole_numbers(call: Call) -> bool:
    """Whether the call rounds its floating operand to whole numbers first."""
    dtype = call.kwargs.get("dtype")
    given = first(call).dtype
    exact = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    return exact and (given.is_floating_point or given.is_complex)


def nansummed(call: Call) -> Notation:
    """``nansum``: as ``sum``, but not linear: nan is an addend of its own."""
    n = summed(call)
    n.linear = []
    return n


def averaged(call: Call) -> Notation:
    """``mean``: each shard's mean, weighted by its share of the elements."""
    dims, keep = reduce_args(call, 1, 2)
    n = first(call).ndim

    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        local = math.prod(ins[0].local_shape[d] for d in dims)
        whole = math.prod(ins[0].shape[d] for d in dims)

        def mean(func: Any, args: Any, kwargs: Any) -> Any:
            if local == whole:
                return func(*args, **kwargs)
            if local == 0:  # the mean of nothing is nan; its share is zero
                kwargs = {k: v for k, v in kwargs.items() if k == "dtype"}
                return torch.sum(args[0], dims, keepdim=keep, **kwargs)
            return func(*args, **kwargs) * (local / whole)

        return mean

    return Notation(
        [tuple(range(n))],
        [out_letters(n, dims, keep)],
        contracted=set(dims),
        linear=[{0}],
        run=run,
    )


def whole_dims(
    dim_at: int,
    keep_at: int,
    outs: int = 1,
    needs_dim: bool = False,
    default: int | None = None,
) -> Callable[[Call], Notation]:
    """Rule of an op that needs the reduced dims whole (max, var, argmax ...).

    Args:
        dim_at: Position of ``dim``.
        keep_at: Position of ``keepdim``.
        outs: Results when a dim is given.
        needs_dim: Without a dim the op is another one with a single result.
        default: The dim where none is given; None stands for all of them.
    """

    def rule(call: Call) -> Notation:
        other = call.arg(dim_at, "other")
        if needs_dim and isinstance(other, Operand):  # max(x, y) is pointwise
            subs, out, shape = broadcast_letters(
                [o.shape for o in call.operands], call.name
            )
            return Notation(subs, [out], whole=whole_ones(subs), shapes=[shape])
        dims, keep = reduce_args(call, dim_at, keep_at, default)
        single = needs_dim and call.arg(dim_at, "dim") is None
        n = first(call).ndim
        count = 1 if single else outs
        return Notation(
            [tuple(range(n))],
            [out_letters(n, dims, keep)] * count,
            whole=set(dims),
        )

    return rule


def along_dim(
    dim_at: int, default: int | None = None, outs: int = 1, linear: bool = False
) -> Callable[[Call], Notation]:
    """Rule of an op along one dim that keeps the number of dims (softmax, sort ...)."""

    def rule(call: Call) -> Notation:
        x = first(call)
        dim = call.arg(dim_at, "dim", default)
        dims = dims_of(dim, x.ndim)
        letters: Letters = tuple(range(x.ndim))
        result: Letters = tuple(("new", d) if d in dims else d for d in letters)
        return Notation(
            [letters],
            [result] * outs,
            whole=set(dims),
            linear=[{0}] if linear and not whole_numbers(call) else [],
        )

    return rule


def nanaveraged(call: Call) -> Notation:
    """``nanmean``: each shard's sum, divided by how many are no nan in all shards."""
    dims, keep = reduce_args(call, 1, 2)
    n = first(call).ndim

    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        part = Partition(ins[0], dims)

        def mean(func: Any, args: Any, kwargs: Any) -> Any:
            if not part.axes:
                return func(*args, **kwargs)
            x = plain(args[0])
            count = part.fold((~x.isnan()).sum(dims, keepdim=keep), "sum")
            named = {k: v for k, v in kwargs.items() if k == "dtype"}
            return torch.nansum(x, dims, keepdim=keep, **named) / count

        return mean

    return Notation(
        [tuple(range(n))], [out_letters(n, dims, keep)], contracted=set(dims), run=run
    )


def counted(call: Call) -> Notation:
    """``count_nonzero``: the counts of the shards are addends."""
    dims = dims_of(call.arg(1, "dim"), first(call).ndim)
    n = first(call).ndim
    return Notation(
        [tuple(range(n))], [out_letters(n, dims, False)], contracted=set(dims)
    )


def truth(op: str) -> Rule:
    """The rule of ``any`` and ``all``: reduced at once, by one all-reduce of results.

    The result could wait as addends of bor or band; but hardly an op takes truth values
    without reducing them first, and several such ops would each reduce anew.
    """

    def program(part: Partition, x: torch.Tensor, args: Any, kwargs: Any) -> Any:
        find = torch.any if op == "max" else torch.all
        return part.fold(find(x, part.dims, keepdim=True), op)

    return reducing(
        lambda call: reduce_args(call, 1, 2), program, anything, whole_dims(1, 2)
    )


def product(part: Partition, x: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """``prod``: torch's own product of the shards' products, so zeros are right."""
    dtype = kwargs.get("dtype")
    if len(part.dims) == 1:
        local = torch.prod(x, part.dims[0], keepdim=True, dtype=dtype)
    else:
        local = torch.prod(x, dtype=dtype).reshape((1,) * x.ndim)
    if not local.requires_grad:
        return part.fold(local, "product")
    return torch.prod(part.stacked(local), 0, dtype=dtype)


prod: Rule = reducing(
    lambda call: reduce_args(call, 1, 2), product, anything, whole_dims(1, 2)
)
