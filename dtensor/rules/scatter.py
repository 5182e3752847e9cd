"""Writes at places that an index tensor names: scatter, index_add, put and their kind.

Dims that are not scattered along stay cut. Where the scattered dim is cut, each rank
writes what lands in its block; what lands elsewhere goes to a spare row behind it. Where
sources and indices are cut alike, sums are addends: each rank adds up what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from dtensor.calls import Call, NoRule, Operand
from dtensor.collectives import functional
from dtensor.custom_placement import lies_along
from dtensor.notation import Layout, Letters, Notation
from dtensor.redistribute import plain
from dtensor.rules.indexing import checked, comm_of, cut_axes, passed
from dtensor.rules.reductions import dims_of
from dtensor.rules.writing import written
from dtensor.spec import Spec


def added(call: Call, source: Any) -> str:
    """How sources meet what is there: ``put`` over it, ``add``ed to it, or ``other``."""
    if call.operands[0].dtype == torch.bool:  # sums of booleans are none
        return "other"
    if call.name in ("scatter_add", "index_add"):
        return "add" if isinstance(source, Operand) else "other"
    if call.name in ("scatter", "index_copy"):
        how = call.kwargs.get("reduce") or call.arg(4, "reduce")
        if not isinstance(source, Operand) or how == "multiply":
            return "other"
        return "add" if how == "add" else "put"
    if call.name == "scatter_reduce":
        how = call.arg(4, "reduce")
        if how == "sum" and call.arg(5, "include_self", True):
            return "add"
    return "other"


def landing(call: Call, dim: int, index_at: int) -> Callable[..., Any]:
    """What runs on the shards: indices counted from the block, others to a spare row.

    Args:
        call: The call.
        dim: The scattered dim.
        index_at: Position of the index among the arguments.
    """

    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        spec = ins[0]
        if not cut_axes(spec, dim):
            return lambda func, args, kwargs: func(*args, **kwargs)
        low, rows = spec.block(dim)
        length = spec.shape[dim]

        def land(func: Any, args: Any, kwargs: Any) -> Any:
            x = plain(args[0])
            index = plain(passed(args, kwargs, index_at, "index"))
            index = checked(index, length, call.name, call.name == "index_fill") - low
            index = index.masked_fill((index < 0) | (index >= rows), rows)
            shape = list(x.shape)
            shape[dim] = 1
            room = torch.cat([x, x.new_ones(shape)], dim)
            rest = [plain(a) if isinstance(a, torch.Tensor) else a for a in args[1:]]
            named = {
                k: plain(a) if isinstance(a, torch.Tensor) else a
                for k, a in kwargs.items()
            }
            if index_at <= len(rest):
                rest[index_at - 1] = index
            else:
                named["index"] = index
            out = getattr(torch.Tensor, call.name)(room, *rest, **named)
            out = out.narrow(dim, 0, rows)
            if not call.inplace:
                return out.contiguous()
            args[0].copy_(out)
            return args[0]

        return land

    return run


def scattered(
    call: Call,
    dim: int,
    index: Operand,
    source: Any,
    index_letters: Letters,
    source_letters: Letters,
    whole: set[Hashable],
) -> Notation:
    """The notation of a scatter along ``dim``; letters say where operands are alike."""
    x = call.operands[0]
    letters: Letters = tuple(range(x.ndim))
    ins: list[Letters] = []
    for k, o in enumerate(call.operands):
        if k == 0:
            ins.append(letters)
        elif o is index:
            ins.append(index_letters)
        elif o is source:
            ins.append(source_letters)
        else:
            ins.append(tuple(("other", k, d) for d in range(o.ndim)))
            whole = whole | set(ins[-1])
    how = added(call, source)
    at = next((k for k, o in enumerate(call.operands) if o is source), None)
    linear: list[set[int]] = []
    affine: set[int] = set()
    contracted: set[Hashable] = set()
    partial = any(p.is_partial() for p in x.placements)
    if how != "other" and at is not None:
        linear = [{0, at}]
        affine = {at} if partial else {0}
        if how == "add" and not partial:
            contracted = {n for n in ("along",) if n not in whole}
    return Notation(
        ins,
        [letters],
        whole=whole | ({"along"} - contracted),
        contracted=contracted,
        linear=linear,
        affine=affine,
        shapes=[x.shape],
        run=landing(call, dim, 2) if lies_along(x.placements, (dim,)) else None,
    )


def scatter(call: Call) -> Notation:
    """``scatter``, ``scatter_add``, ``scatter_reduce``: one index per element."""
    x, index = call.operands[0], call.arg(2, "index")
    source = call.arg(3, "src", call.kwargs.get("value"))
    dim = dims_of(call.arg(1, "dim"), x.ndim)[0] if x.ndim else 0
    tensor = isinstance(source, Operand) and source.ndim > 0
    if not x.ndim or index.ndim != x.ndim or tensor and source.ndim != x.ndim:
        raise NoRule("operands of unlike numbers of dims")
    call.shapes()
    whole: set[Hashable] = set()
    subs: list[list[Hashable]] = [[], []]
    for d in range(x.ndim):
        alike = not tensor or source.shape[d] == index.shape[d]
        if d == dim and alike and tensor:
            letters: tuple[Hashable, Hashable] = ("along", "along")
        elif d != dim and alike and index.shape[d] == x.shape[d]:
            letters = (d, d)
        else:
            letters = (("index", d), ("source", d))
            whole |= set(letters) | ({d} if d != dim else set())
        subs[0].append(letters[0])
        subs[1].append(letters[1])
    given = tuple(subs[1]) if tensor else ()
    return scattered(call, dim, index, source, tuple(subs[0]), given, whole)


def index_write(call: Call) -> Notation:
    """``index_add``, ``index_copy``, ``index_fill``, ``index_reduce``: one per row."""
    x, index = call.operands[0], call.arg(2, "index")
    source = call.arg(3, "source", call.kwargs.get("value"))
    dim = dims_of(call.arg(1, "dim"), x.ndim)[0] if x.ndim else 0
    rows = isinstance(source, Operand) and source.ndim > 0
    if not x.ndim or index.ndim != 1 or rows and source.ndim != x.ndim:
        raise NoRule("operands of unlike numbers of dims")
    call.shapes()
    letters: Letters = tuple("along" if d == dim else d for d in range(x.ndim))
    return scattered(
        call, dim, index, source, ("along",), letters if rows else (), set()
    )


def put(call: Call) -> Layout | None:
    """``put(x, index, source, accumulate)``: by numbers of elements, row-major."""
    x, index, source = call.operands[:3]
    if not x.ndim or not x.shape.numel():
        raise NoRule("nothing to tell apart")
    call.shapes()
    shape, total = tuple(x.shape), x.shape.numel()

    def index_of(args: Any, kwargs: Any) -> Any:
        flat = checked(plain(passed(args, kwargs, 1, "index")), total, "put")
        return torch.unravel_index(flat, shape)

    def value_of(args: Any, kwargs: Any) -> Any:
        return plain(passed(args, kwargs, 2, "source")).reshape(index.shape)

    return written(
        call,
        (index,) * x.ndim,
        source,
        index_of,
        value_of,
        call.inplace,
        bool(call.arg(3, "accumulate", False)),
    )


def masked_scatter(call: Call) -> Notation:
    """``masked_scatter(x, mask, source)``: sources go to the true places, in order.

    Cut along dim 0, each rank learns how many places the ranks before it have.
    """
    x, mask, source = call.operands[:3]
    if mask.shape != x.shape or not x.ndim:
        raise NoRule("a mask that is stretched")
    letters: Letters = tuple(range(x.ndim))
    rest: Letters = tuple(("source", d) for d in range(source.ndim))
    partial = any(p.is_partial() for p in x.placements)

    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        spec = ins[0]
        if not cut_axes(spec, 0):
            return lambda func, args, kwargs: func(*args, **kwargs)
        comm = comm_of(spec, 0)

        def fill(func: Any, args: Any, kwargs: Any) -> Any:
            mask = plain(passed(args, kwargs, 1, "mask"))
            source = plain(passed(args, kwargs, 2, "source")).reshape(-1)
            count = mask.sum().view(1)
            counts = functional.all_gather(count, comm, 0, (1,) * comm.size).tolist()
            if sum(counts) > source.numel():
                raise RuntimeError(
                    f"{call.name}: the mask has more true places than the source has "
                    f"elements, got {sum(counts)}, expected at most {source.numel()}."
                )
            start = sum(counts[: comm.rank])
            mine = source.narrow(0, start, counts[comm.rank])
            return func(args[0], mask, mine)

        return fill

    return Notation(
        [letters, letters, rest],
        [letters],
        whole={*letters[1:], *rest},
        linear=[{0, 2}],
        affine={2} if partial else {0},
        shapes=[x.shape],
        run=run,
    )
