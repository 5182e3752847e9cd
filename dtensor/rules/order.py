"""Order: ``topk``, ``quantile``, ``searchsorted``, ``histc`` and their kind."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from dtensor.calls import Call, Operand
from dtensor.notation import Layout, Letters, Notation
from dtensor.redistribute import plain
from dtensor.rules.extrema import extremum
from dtensor.rules.partition import Partition, ordered, reduced_layout, travels
from dtensor.rules.reductions import along_dim, dims_of, out_letters
from dtensor.spec import Spec

T = torch.Tensor


def topk(call: Call) -> Notation | Layout:
    """``topk`` along a cut dim: the best of each shard travel, then the best of these.

    Bytes sent: k values and k indices for every other rank. Of equal elements any may
    be chosen, as in torch; here those of earlier shards come first. Unsorted results
    come in an order of torch's own, so that for them the dim is made whole.
    """
    x = call.operands[0]
    dims = dims_of(call.arg(2, "dim", -1), x.ndim)
    k, largest = call.arg(1, "k"), call.arg(3, "largest", True)
    whole = along_dim(2, -1, outs=2)
    if not travels(call, dims, ordered) or not call.arg(4, "sorted", True):
        return whole(call)
    if k * x.spec.shards(dims[0]) >= x.shape[dims[0]]:  # nearly all would travel
        return whole(call)
    shapes = call.shapes()
    dim = dims[0]
    places, out = reduced_layout(call, dims, list(range(x.ndim)))

    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        part = Partition(ins[0], dims)
        lengths = [min(k, p.size) for p in part.pieces]

        def together(func: Any, args: Any, kwargs: Any) -> Any:
            local = plain(args[0])
            values, at = torch.topk(local, lengths[part.index], dim, largest)
            at = at + part.mine.offsets[0]
            values = part.joined(values, dim, lengths)
            at = part.joined(at, dim, lengths)
            # stable, so that which of equal elements is taken does not depend on k
            order = values.detach().sort(dim=dim, descending=largest, stable=True)[1]
            order = order.narrow(dim, 0, k)
            found = values.gather(dim, order), at.gather(dim, order)
            return torch.return_types.topk(found)

        return together

    return Layout([places], [out] * 2, shapes, run=run)


def kthvalue(call: Call) -> Notation:
    """``kthvalue(x, k, dim, keepdim)``: the dim whole."""
    x = call.operands[0]
    dims = dims_of(call.arg(2, "dim", -1), x.ndim)
    out = out_letters(x.ndim, dims, bool(call.arg(3, "keepdim", False)))
    return Notation([tuple(range(x.ndim))], [out] * 2, whole=set(dims))


def msort(call: Call) -> Notation:
    """``msort``: sorted along dim 0."""
    x = call.operands[0]
    letters: Letters = tuple(range(x.ndim))
    return Notation([letters], [letters], whole=set(letters[:1]))


def sort(outs: int) -> Callable[[Call], Notation]:
    """``sort`` and ``argsort``: also where ``stable`` comes before ``dim``."""
    plainly = along_dim(1, -1, outs=outs)
    stably = along_dim(2, -1, outs=outs)

    def rule(call: Call) -> Notation:
        stable = len(call.args) > 1 and isinstance(call.args[1], bool)
        return (stably if stable else plainly)(call)

    return rule


def quantile(call: Call) -> Notation:
    """``quantile(x, q, dim, keepdim)``: the dim whole, quantiles in front."""
    x, q = call.operands[0], call.arg(1, "q")
    dims = dims_of(call.arg(2, "dim"), x.ndim)
    keep = bool(call.arg(3, "keepdim", False))
    out = out_letters(x.ndim, dims, keep)
    ins: list[Letters] = [tuple(range(x.ndim))]
    whole: set[Hashable] = set(dims)
    if isinstance(q, Operand):
        ins.append(("q",) * q.ndim)
        whole.add("q")
        out = (*ins[1], *out)
    return Notation(ins, [out], whole=whole)


def searchsorted(call: Call) -> Notation:
    """``searchsorted(sequence, values, sorter=)``: the sequence whole, values free."""
    sequence, values = call.args[0], call.arg(1, "input", call.kwargs.get("self"))
    batch = sequence.ndim > 1
    ins: list[Letters] = []
    lead: Letters = tuple(range(sequence.ndim - 1)) if batch else ()
    out: Letters = ()
    for o in call.operands:
        if o is values:
            tail = own(o.ndim - len(lead), "value")
            out = (*lead, *tail)
            ins.append(out)
        else:  # the sequence, or what sorts it
            ins.append((*lead, "sequence"))
    return Notation(ins, [out], whole={"sequence"})


def own(count: int, *name: Hashable) -> Letters:
    """Letters that occur nowhere else."""
    return tuple((*name, d) for d in range(count))


def bucketize(call: Call) -> Notation:
    """``bucketize(values, boundaries)``: the boundaries whole."""
    values = call.arg(0, "input")
    free = own(values.ndim, "value") if isinstance(values, Operand) else ()
    ins = [free if o is values else ("boundary",) for o in call.operands]
    return Notation(ins, [free], whole={"boundary"})


def histc(call: Call) -> Notation:
    """``histc(x, bins, min, max)``: counts of the shards are addends.

    Where no range is given it is that of all shards, found by two all-reduces of one
    number.
    """
    x = call.operands[0]
    letters: Letters = tuple(range(x.ndim))
    shapes = call.shapes()
    exact = x.dtype.is_floating_point
    whole = set() if exact and x.shape.numel() else set(letters)

    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        part = Partition(ins[0], range(x.ndim))

        def together(func: Any, args: Any, kwargs: Any) -> Any:
            if not part.axes:
                return func(*args, **kwargs)
            given = dict(zip(("bins", "min", "max"), args[1:], strict=False)) | kwargs
            low, high = float(given.get("min", 0)), float(given.get("max", 0))
            local = plain(args[0])
            if low == high:
                low = float(extremum(part, local, False))
                high = float(extremum(part, local, True))
                if low == high:
                    low, high = low - 1, high + 1
            return torch.histc(local, given.get("bins", 100), low, high)

        return together

    return Notation(
        [letters],
        [("bin",)],
        whole=whole | {"bin"},
        contracted=set(letters) - whole,
        shapes=shapes,
        run=run,
    )
