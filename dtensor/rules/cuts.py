"""Cuts along one dim, and the ops that put a dim in another order.

``narrow``, ``select``, ``split``, ``chunk``, ``unbind``, ``flip``, ``roll``: each is
described by what elements of the dim go where (see ``taking``). A cut dim stays cut, and
only the elements that change owner move.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from dtensor.calls import Call, NoRule, Operand
from dtensor.custom_placement import lies_along
from dtensor.notation import Layout, Letters, Notation
from dtensor.placement import Placement, Replicate, Shard
from dtensor.redistribute import plain
from dtensor.rules.entries import parsed
from dtensor.rules.indexing import average, cut_axes, read_by
from dtensor.rules.pointwise import built_in
from dtensor.rules.reductions import dims_of
from dtensor.rules.runs import run_slices, runs_of
from dtensor.spec import Spec
from dtensor.taking import Progression, take_plan

Results = Sequence[tuple[int, Sequence[Progression]]]


def whole_dim(
    call: Call,
    dim: int,
    drop: bool,
    many: bool,
    shapes: Sequence[Sequence[int]] | None = None,
) -> Notation:
    """The notation of a cut along a dim that must be whole."""
    x = call.operands[0]
    letters: Letters = tuple(range(x.ndim))
    rest: Letters = () if drop else ("cut",)
    out: Letters = (*letters[:dim], *rest, *letters[dim + 1 :])
    shapes = call.shapes() if shapes is None else shapes
    extra: list[Letters] = [
        tuple(("index", i, d) for d in range(o.ndim))
        for i, o in enumerate(call.operands[1:])
    ]
    return Notation(
        [letters, *extra],
        [out] * len(shapes),
        whole={dim, *(n for s in extra for n in s)},
        linear=[{0}],
        shapes=shapes,
        view=True,
        many=many,
    )


def narrow(call: Call) -> Notation | Layout:
    """``narrow(x, dim, start, length)``: a slice."""
    x = call.operands[0]
    dim = dims_of(call.arg(1, "dim", 0), x.ndim)[0]
    start, length = call.arg(2, "start"), call.arg(3, "length")
    if isinstance(start, Operand) or not isinstance(length, int):
        cut = [*x.shape[:dim], int(length), *x.shape[dim + 1 :]]
        return whole_dim(call, dim, drop=False, many=False, shapes=[cut])
    shape = call.shapes()[0]
    start = start + x.shape[dim] if start < 0 else start
    index = (slice(None),) * dim + (slice(start, start + length),)
    items = parsed(x.shape, index)
    assert items is not None, "one slice"
    return read_by(call, items, shape, lambda args, kwargs: index)


def select(call: Call) -> Notation | Layout:
    """``select(x, dim, index)``: a number."""
    x = call.operands[0]
    dim = dims_of(call.arg(1, "dim", 0), x.ndim)[0]
    shape = call.shapes()[0]
    at = call.arg(2, "index")
    if isinstance(at, Operand) or not hasattr(at, "__index__"):
        return whole_dim(call, dim, drop=True, many=False)
    index = (slice(None),) * dim + (int(at),)
    items = parsed(x.shape, index)
    assert items is not None, "one number"
    return read_by(call, items, shape, lambda args, kwargs: index)


def along(
    call: Call,
    taken: Mapping[int, Results],
    shapes: Sequence[Sequence[int]],
    view: bool,
) -> Notation:
    """The notation of taking elements along some dims, one after another.

    Args:
        call: The call.
        taken: For each dim the results and what they take; several results of one.
        shapes: Global shapes of the results.
        view: Whether torch's results are views.
    """
    x = call.operands[0]
    letters: Letters = tuple(range(x.ndim))
    cut = lies_along(x.placements, taken)

    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        spec = ins[0]
        plans = [(d, take_plan(spec, d, results)) for d, results in taken.items()]

        def take(func: Any, args: Any, kwargs: Any) -> Any:
            parts = [plain(args[0])]
            for dim, plan in plans:
                parts = [piece for part in parts for piece in plan(part, dim)]
            if view:
                return tuple(parts)
            # An op that copies gives no alias of its operand.
            return parts[0].clone() if parts[0]._is_view() else parts[0]

        return take

    def sends(ins: list[Spec], outs: list[Spec]) -> float:
        elements = average(ins[0])
        plans = [take_plan(ins[0], d, results) for d, results in taken.items()]
        return sum(p.moved * elements for p in plans)

    return Notation(
        [letters],
        [letters] * len(shapes),
        linear=[{0}],
        shapes=shapes,
        run=run if cut else None,
        sends=sends if cut else None,
        view=view,
        many=view,
        copies=True,
        reads=(lambda args, kwargs: slices_of(taken)) if view else None,
    )


def slices_of(taken: Mapping[int, Results]) -> list[tuple[slice, ...]]:
    """For each result of a split the index that it has of the operand."""
    found = []
    for dim, results in taken.items():
        for _, runs in results:
            stop = runs[0].start + runs[0].count
            found.append((slice(None),) * dim + (slice(runs[0].start, stop),))
    return found


def split(call: Call) -> Notation | Layout:
    """``split``, ``chunk``, ``tensor_split`` ...: slices, one after another."""
    x = call.operands[0]
    if len(call.operands) > 1:
        raise NoRule("the cuts depend on data")
    dim = dims_of(call.arg(2, "dim", 0), x.ndim)[0]
    shapes = call.shapes()
    lengths = [s[dim] for s in shapes]
    if sum(lengths) != x.shape[dim]:  # tensor_split may repeat or skip elements
        return whole_dim(call, dim, drop=False, many=True)
    slices, start = [], 0
    for n in lengths:
        slices.append((start, n))
        start += n
    kept = runs_of(x, dim, slices)
    if kept is not None:
        return run_slices(call, dim, kept, shapes, many=True)
    results = [(n, [Progression(0, start, n)]) for start, n in slices]
    return along(call, {dim: results}, shapes, view=True)


def unbind(call: Call) -> Notation | Layout:
    """``unbind(x, dim)``, iteration: the cut goes over to another dim that has room.

    Then every row is cut, and no rank has all of them. Where there is none, the rows
    are gathered in one go.
    """
    x = call.operands[0]
    dim = dims_of(call.arg(1, "dim", 0), x.ndim)[0]
    found = whole_dim(call, dim, drop=True, many=True)
    mesh = x.spec.mesh
    cutting = [a for a, p in enumerate(x.placements) if p.is_shard(dim)]
    if not any(mesh.shape[a] > 1 for a in cutting):
        if not cutting and lies_along(x.placements, (dim,)):
            return found
        found.whole = set()
        return found if not cutting else _unbound(call, x, dim, {}, found)
    taken = {p.dim for p in x.placements if isinstance(p, Shard)}
    free = [d for d in range(x.ndim) if d not in taken]
    goal: dict[int, int] = {}
    for a in cutting:
        roomy = [d for d in free if x.shape[d] >= mesh.shape[a]]
        if not roomy:
            return found
        goal[a] = max(roomy, key=lambda d: x.shape[d])
        free.remove(goal[a])
    return _unbound(call, x, dim, goal, found)


def _unbound(
    call: Call, x: Operand, dim: int, goal: dict[int, int], found: Notation
) -> Layout:
    """The layout of ``unbind`` where some axes cut other dims instead."""
    ins: list[Placement] = list(built_in(x.placements))
    for a, d in goal.items():
        ins[a] = Shard(d)
    outs: list[Placement] = []
    for p in ins:
        if isinstance(p, Shard):
            p = Replicate() if p.dim == dim else Shard(p.dim - (p.dim > dim), p.depth)
        outs.append(p)
    shapes = found.shapes
    assert shapes is not None, "found on the meta device"
    return Layout(
        [tuple(ins)], [tuple(outs)] * len(shapes), shapes, view=True, many=True
    )


def flip(call: Call) -> Notation:
    """``flip``: each dim backwards."""
    x = call.operands[0]
    fixed = {"fliplr": (1,), "flipud": (0,)}.get(call.name)
    given = call.arg(1, "dims") if fixed is None else fixed
    rest = call.args[2:] if fixed is None else ()
    dims = [given, *rest] if isinstance(given, int) and rest else given
    shape = call.shapes()[0]
    empty = isinstance(dims, (list, tuple)) and not dims  # flips nothing
    found = [] if empty else dims_of(dims, x.ndim)
    backwards = {
        d: [(x.shape[d], [Progression(0, x.shape[d] - 1, x.shape[d], -1)])]
        for d in found
    }
    return along(call, backwards, [shape], view=False)


def roll(call: Call) -> Notation:
    """``roll``: each dim around by a shift; without dims, all elements in a row."""
    x = call.operands[0]
    shifts, dims = call.arg(1, "shifts"), call.arg(2, "dims")
    shape = call.shapes()[0]
    by = [shifts] if isinstance(shifts, int) else list(shifts)
    if dims is None or isinstance(dims, (list, tuple)) and not dims:
        if x.ndim != 1:
            letters: set[Hashable] = set(range(x.ndim))
            subs = [tuple(range(x.ndim))]
            return Notation(subs, subs, whole=letters, linear=[{0}], shapes=[shape])
        dims = 0
    around: dict[int, int] = {}
    for d, k in zip(dims_of(dims, x.ndim), by, strict=True):
        around[d] = around.get(d, 0) + k
    results: dict[int, Results] = {}
    for d, k in around.items():
        n = x.shape[d]
        k = k % n if n else 0
        halves = [Progression(0, n - k, k), Progression(k, 0, n - k)]
        results[d] = [(n, [p for p in halves if p.count])]
    return along(call, results, [shape], view=False)


def diff(call: Call) -> Notation:
    """``diff`` of first order: each element less the one before it."""
    x = call.operands[0]
    if call.arg(1, "n", 1) != 1 or len(call.operands) > 1 or not x.ndim:
        raise NoRule("differences of differences, or with ends given")
    dim = dims_of(call.arg(2, "dim", -1), x.ndim)[0]
    n = x.shape[dim]
    if n == 0:
        raise NoRule("nothing to take differences of")
    shape = call.shapes()[0]
    letters: Letters = tuple(range(x.ndim))
    after: Results = [
        (n - 1, [Progression(0, 1, n - 1)]),
        (n - 1, [Progression(0, 0, n - 1)]),
    ]

    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        if not cut_axes(ins[0], dim):
            return lambda func, args, kwargs: func(*args, **kwargs)
        plan = take_plan(ins[0], dim, after)

        def subtract(func: Any, args: Any, kwargs: Any) -> Any:
            later, sooner = plan(plain(args[0]), dim)
            if later.dtype == torch.bool:
                return later ^ sooner
            return later - sooner

        return subtract

    def sends(ins: list[Spec], outs: list[Spec]) -> float:
        if not cut_axes(ins[0], dim):
            return 0.0
        elements = average(outs[0])
        return 2 * take_plan(ins[0], dim, after).moved * elements

    cut = lies_along(x.placements, (dim,))
    return Notation(
        [letters],
        [letters],
        linear=[{0}],
        shapes=[shape],
        run=run if cut else None,
        sends=sends if cut else None,
    )
