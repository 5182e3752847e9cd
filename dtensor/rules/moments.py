"""Mean and variance over cut dims: each shard's moments, put together.

Pieces with n_i elements, means m_i and sums of squared deviations s_i have together the
mean m = sum(n_i m_i) / n and the sum of squares sum(s_i + n_i (m_i - m)^2) (Chan, Golub
and LeVeque 1983, "Algorithms for computing the sample variance"). No square of a large
number is subtracted from another; each mean travels as two numbers, a near one and the rest, so
that no digit of the deviations is lost where they are small beside the mean. Bytes sent:
three numbers per result and rank.
"""

from __future__ import annotations

from typing import Any

import torch

from dtensor.calls import Call, Rule
from dtensor.rules.partition import Partition, empty_shards, inexact, reducing
from dtensor.rules.reductions import reduce_args, whole_dims

T = torch.Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which moments are put together."""
    return torch.complex128 if dtype.is_complex else torch.float64


def narrow_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a shard's squares are summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def moments(
    part: Partition, x: T, inner: list[int] | None = None, each: int = 1
) -> tuple[T, T]:
    """Mean and sum of squared deviations over all pieces, reduced dims kept.

    Differentiable; both of the dtype ``wide(x.dtype)``, squares real.

    Args:
        part: The partition.
        x: This rank's shard.
        inner: The dims, where they are not those of the partition but stand for them.
        each: Elements that they have for each element of the partition.
    """
    dims = part.dims if inner is None else inner
    exact = wide(x.dtype)
    if part.mine.size and x.numel():
        local = x.to(narrow_of(x.dtype))
        near = local.mean(dims, keepdim=True).detach()
        variance, rest = torch.var_mean(local - near, dims, correction=0, keepdim=True)
        squares = variance.to(exact) * (part.mine.size * each)
    else:
        rest = x.sum(dims, keepdim=True)
        squares = rest.to(exact) * 0
        near = rest.detach()
    if not part.axes:
        return near.to(exact) + rest, squares.real
    found = part.stacked(torch.stack([near.to(exact), rest.to(exact), squares]))
    sizes = [p.size * each for p in part.pieces]
    counts = torch.tensor(sizes, dtype=torch.float64, device=x.device)
    counts = counts.reshape(-1, *(1,) * near.ndim)
    # as distances from one of the means: nothing large is subtracted from a sum
    centre = found[next(i for i, n in enumerate(sizes) if n), 0].detach()
    means = (found[:, 0] - centre) * (counts > 0) + found[:, 1]
    mean = (means * (counts / sum(sizes))).sum(0)
    away = means - mean
    squares = found[:, 2].sum(0).real + (counts * (away * away.conj()).real).sum(0)
    return centre + mean, squares


def root(x: T) -> T:
    """The square root, with the gradient zero at zero, as torch's ``std`` has it."""
    zero = x == 0
    return x.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def correction_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The correction of ``var(x, dim, unbiased, keepdim)`` and its other forms."""
    given = kwargs.get("correction")
    if given is not None:
        return float(given)
    unbiased = kwargs.get("unbiased")
    if args and isinstance(args[0], bool):  # var(x, unbiased)
        unbiased = args[0]
    elif len(args) > 1 and isinstance(args[1], bool):
        unbiased = args[1]
    return 1.0 if unbiased is None else float(unbiased)


def spread(deviation: bool, with_mean: bool) -> Rule:
    """The rule of ``var`` (``std``), with the mean or without."""

    def program(
        part: Partition, x: T, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        mean, squares = moments(part, x)
        left = part.size - correction_of(args, kwargs)
        out = squares / left
        if left < 0:  # infinite in torch, but with the derivative of the quotient
            out = out - out.detach() + torch.inf
        if deviation:
            out = root(out)
        out = out.to(torch.empty((), dtype=x.dtype).abs().dtype)
        return (out, mean.to(x.dtype)) if with_mean else out

    outs = 2 if with_mean else 1
    gathers = empty_shards(whole_dims(1, 3, outs=outs))
    return reducing(parse, program, inexact, gathers, outs=outs)


def parse(call: Call) -> tuple[list[int], bool]:
    """Dims and ``keepdim`` of ``var`` and its kind."""
    return reduce_args(call, 1, 3)
