"""Running sums, products and extrema along a cut dim.

Each rank scans its shard; the last slices of the shards before it, which travel in one
all-gather, are put in front. Bytes sent per rank: one slice for every other rank.

``logcumsumexp`` is not here, its dim is made whole: torch's derivative adds logarithms
of cotangents and loses digits where values are large; which ones depends on all of the
cotangents along the dim, so that shards would not find the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtensor.calls import Call, Rule
from dtensor.notation import Layout, Notation
from dtensor.redistribute import plain
from dtensor.rules.partition import (
    Partition,
    anything,
    ordered,
    reduced_layout,
    travels,
)
from dtensor.rules.reductions import along_dim, dims_of
from dtensor.spec import Spec

T = torch.Tensor
Scan = Callable[[Partition, Any, T, int, dict[str, Any]], Any]


def scanning(
    scan: Scan, fits: Callable[[torch.dtype], bool], otherwise: Rule, outs: int = 1
) -> Rule:
    """The rule of a scan.

    Args:
        scan: Gets the partition, torch's function, the shard, the dim and the named
            arguments; gives the results.
        fits: Dtypes that it takes.
        otherwise: The rule where the dim is not cut.
        outs: Number of results.
    """

    def rule(call: Call) -> Notation | Layout | None:
        x = call.operands[0]
        dims = dims_of(call.arg(1, "dim"), x.ndim)
        dtype = call.arg(2, "dtype")
        if not travels(call, dims, fits) or call.inplace and dtype is not None:
            return otherwise(call)
        places, _ = reduced_layout(call, [], list(range(x.ndim)))
        if call.inplace and places != x.placements:
            return otherwise(call)

        def run(ins: list[Spec], results: list[Spec]) -> Callable[..., Any]:
            part = Partition(ins[0], dims)

            def together(func: Any, args: Any, kwargs: Any) -> Any:
                named = {} if dtype is None else {"dtype": dtype}
                # by its own name: in place or not, the scan makes a new tensor
                x = plain(args[0])
                if call.inplace:  # what is saved for backward is not written to
                    x = x.clone()
                found = scan(part, getattr(torch, call.name), x, dims[0], named)
                if not call.inplace:
                    return found
                args[0].copy_(found)
                return args[0]

            return together

        return Layout([places], [places] * outs, [x.shape] * outs, run=run)

    return rule


def last(x: T, dim: int) -> T:
    """The last slice; zeros, tied to the graph, of an empty shard."""
    if x.shape[dim]:
        return x.narrow(dim, x.shape[dim] - 1, 1)
    return x.sum(dim, keepdim=True).to(x.dtype)


def scan_sum(part: Partition, func: Any, x: T, dim: int, named: dict[str, Any]) -> T:
    """``cumsum``."""
    local: T = func(x, dim, **named)
    each = part.stacked(last(local, dim))
    return local + each[: part.index].sum(0, dtype=local.dtype)


def scan_product(
    part: Partition, func: Any, x: T, dim: int, named: dict[str, Any]
) -> T:
    """``cumprod``; zeros are right since each product is one of torch's own."""
    local: T = func(x, dim, **named)
    total = torch.prod(x, dim, keepdim=True, dtype=local.dtype)
    each = part.stacked(total)
    return local * torch.prod(each[: part.index], 0, dtype=local.dtype)


def scan_extrema(largest: bool) -> Scan:
    """``cummax`` and ``cummin``: of equal elements the last, a nan beats all."""

    def scan(part: Partition, func: Any, x: T, dim: int, named: dict[str, Any]) -> Any:
        if x.shape[dim]:
            values, at = func(x, dim)
            at = at + part.mine.offsets[0]
        else:  # of nothing, torch's has a derivative that forgets its cotangent
            values = x * 1 if x.is_floating_point() else x.clone()
            at = torch.zeros(x.shape, dtype=torch.int64, device=x.device)
        ends, places = part.stacked(last(values, dim)), part.stacked(last(at, dim))
        before = part.before()
        front, who = func(ends[before] if before else ends[:1], 0)
        front, who = front[-1], who[-1:]
        place = (places[before] if before else places[:1]).gather(0, who)[0]
        if x.is_floating_point():
            beats = values >= front if largest else values <= front
            own = values.isnan() | (~front.isnan() & beats)
        else:
            own = values >= front if largest else values <= front
        if not before:
            own = torch.ones_like(own)
        family = getattr(torch.return_types, "cummax" if largest else "cummin")
        return family((torch.where(own, values, front), torch.where(own, at, place)))

    return scan


cumsum = scanning(scan_sum, anything, along_dim(1, linear=True))
cumprod = scanning(scan_product, anything, along_dim(1))
cummax = scanning(scan_extrema(True), ordered, along_dim(1, outs=2), outs=2)
cummin = scanning(scan_extrema(False), ordered, along_dim(1, outs=2), outs=2)
