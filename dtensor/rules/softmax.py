"""``softmax`` and ``logsumexp`` along cut dims: two small all-reduces.

The largest of all shards is subtracted, then the exponentials are summed over all:
bytes sent are those of the operand divided by the length of the dim, twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtensor.calls import Call, Rule
from dtensor.notation import Layout, Notation
from dtensor.redistribute import plain
from dtensor.rules.extrema import extremum
from dtensor.rules.partition import (
    Partition,
    floating,
    inexact,
    reduced_layout,
    reducing,
    travels,
)
from dtensor.rules.reductions import along_dim, dims_of, reduce_args, whole_dims
from dtensor.spec import Spec

T = torch.Tensor


def exact_of(x: T) -> T:
    """Half precision as float32, in which torch sums exponentials too."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def summed_exponentials(part: Partition, x: T) -> tuple[T, T]:
    """``x`` less the largest of all pieces, and the sum of the exponentials of it."""
    shifted = x - extremum(part, x, True)
    return shifted, part.sum(shifted.exp().sum(part.dims, keepdim=True))


def softmax(log: bool) -> Rule:
    """The rule of ``softmax(x, dim, dtype)`` and ``log_softmax``."""
    gathers = along_dim(1)

    def rule(call: Call) -> Notation | Layout:
        x = call.operands[0]
        dims = dims_of(call.arg(1, "dim"), x.ndim)
        dtype = call.arg(2, "dtype")
        if not travels(call, dims, floating if dtype is None else lambda _: True):
            return gathers(call)
        if dtype is not None and not dtype.is_floating_point:
            return gathers(call)
        places, _ = reduced_layout(call, [], list(range(x.ndim)))

        def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
            part = Partition(ins[0], dims)

            def together(func: Any, args: Any, kwargs: Any) -> Any:
                local = plain(args[0])
                result = dtype or local.dtype
                shifted, total = summed_exponentials(part, exact_of(local.to(result)))
                if log:
                    return (shifted - total.log()).to(result)
                return (shifted.exp() / total).to(result)

            return together

        return Layout([places], [places], [x.shape], run=run)

    return rule


def log_of_sum(part: Partition, x: T, args: Any, kwargs: Any) -> T:
    """``logsumexp``: where the largest is infinite it is not subtracted."""
    if not inexact(x.dtype):
        x = x.to(torch.get_default_dtype())
    exact = exact_of(x)
    largest = extremum(part, exact.real, True)
    largest = largest.masked_fill(largest.isinf(), 0)
    total = part.sum((exact - largest).exp().sum(part.dims, keepdim=True))
    return (total.log() + largest).to(x.dtype)


logsumexp: Rule = reducing(
    lambda call: reduce_args(call, 1, 2),
    log_of_sum,
    lambda dtype: True,
    whole_dims(1, 2),
)
