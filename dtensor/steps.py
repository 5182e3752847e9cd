"""The steps of plans: every way to change a layout by one collective, or by none.

A state is one placement per mesh axis, with the nesting order of axes that cut one dim
(see ``placement.normal``). A step changes one axis, or several at once by one
collective over all of them.

=============  =============  ===================  ===========================
from           to             step                 axes at once
=============  =============  ===================  ===========================
Shard(d)       Replicate      all-gather           the innermost of d
Partial(op)    Replicate      all-reduce           any of the same op
Partial(op)    Shard(d)       reduce-scatter       any of the same op
Shard(i)       Shard(j)       all-to-all           any, in any new order
Replicate      Shard(d)       slice, no sending    one
Replicate      Partial(op)    fill, no sending     one
Shard(d)       Partial(op)    pad, no sending      one, or with new cuts of d
Partial(sum)   Partial(avg)   scale, no sending    one
=============  =============  ===================  ===========================

Only the innermost axis of a dim may give it up, and an axis that takes a dim cuts
inside those that have it: what a step sees is always one block, even or not. Addends
of reductions that do not commute are reduced the last axis first. A path passes through
addends only of kinds that one of its ends has: padding with zeros and summing up again
would lose the sign of -0.0, and bools have no sum. Nor does it pass through shards larger
than both its ends: no rank holds the whole tensor unless an end does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dtensor.costs import CostTable
from dtensor.custom_placement import CustomPlacement
from dtensor.placement import (
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    axes_of,
    placed,
)

R = Replicate()


@dataclass(frozen=True, slots=True)
class Step:
    """One transition between two layouts by one collective, or by none.

    Attributes:
        axes: The mesh axes whose placements change, ascending.
        src: Placements before.
        dst: Placements after.
        verb: The collective, or ``"local"``.
        elements: Elements sent per rank (an average, alike on all ranks).
        seconds: Modelled time.
        held: Elements a rank holds at once: the shard before and the one after.
    """

    axes: tuple[int, ...]
    src: Placements
    dst: Placements
    verb: str
    elements: float
    seconds: float
    held: float

    @property
    def axis(self) -> int:
        """The (first) mesh axis."""
        return self.axes[0]


def average_shard(
    mesh_shape: Sequence[int], placements: Placements, elements: int
) -> float:
    """Elements of a shard of average size of a tensor of so many elements."""
    n = float(elements)
    for parts, p in zip(mesh_shape, placements, strict=True):
        if p.is_cut():
            n /= parts
    return n


VERBS: dict[tuple[type[Placement], type[Placement]], str] = {
    (Shard, Replicate): "all_gather",
    (Shard, Shard): "all_to_all",
    (Shard, Partial): "local",
    (Partial, Replicate): "all_reduce",
    (Partial, Shard): "reduce_scatter",
    (Partial, Partial): "local",
    (Replicate, Shard): "local",
    (Replicate, Partial): "local",
}


def sent_by(verb: str, size: float, parts: int) -> float:
    """Elements that a rank sends, from the size of its shard before."""
    if verb == "all_gather":
        return size * (parts - 1)
    if verb == "all_reduce":
        return 2 * size * (parts - 1) / parts
    if verb == "local":
        return 0.0
    return size * (parts - 1) / parts


@dataclass(frozen=True, slots=True)
class Edge:
    """A step that can be taken from a state, whatever the tensor and the prices.

    Attributes:
        axes: The mesh axes whose placements change, ascending.
        dst: Placements after.
        verb: The collective, or ``"local"``.
        sent: Elements that a rank sends, as a part of the global tensor.
        before: Elements of a shard before, likewise.
        after: Elements of a shard afterwards, likewise.
    """

    axes: tuple[int, ...]
    dst: Placements
    verb: str
    sent: float
    before: float
    after: float

    def seconds(self, nbytes: float, costs: CostTable) -> float:
        """The price of the step for a tensor of so many bytes."""
        over = () if self.verb == "local" else self.axes
        copied = max(self.before, self.after) * nbytes
        return costs.collective(over, self.sent * nbytes, copied)

    def step(self, src: Placements, elements: int, seconds: float) -> Step:
        """The step for one tensor."""
        held = (self.before + self.after) * elements
        sent = self.sent * elements
        return Step(self.axes, src, self.dst, self.verb, sent, seconds, held)


@lru_cache(maxsize=16384)
def edges(
    mesh_shape: tuple[int, ...], state: Placements, targets: tuple[Placement, ...]
) -> tuple[Edge, ...]:
    """Every step that can be taken from a state, in a fixed order.

    Args:
        mesh_shape: Sizes of the axes.
        state: Placements before.
        targets: Placements that an axis may go to, in a fixed order.
    """
    before = average_shard(mesh_shape, state, 1)
    found = []

    def add(
        axes: tuple[int, ...], dst: Placements, verb: str, share: float | None = None
    ) -> None:
        parts = math.prod(mesh_shape[a] for a in axes)
        if parts == 1:
            verb = "local"
        if share is None or verb == "local":
            sent = sent_by(verb, before, parts)
        else:
            sent = before * share
        after = average_shard(mesh_shape, dst, 1)
        found.append(Edge(axes, dst, verb, sent, before, after))

    custom = [a for a, p in enumerate(state) if isinstance(p, CustomPlacement)]
    last = custom[-1] if custom else -1
    for axis, dst, verb, share in custom_ways(mesh_shape, state, targets, last):
        add((axis,), placed(state, (axis,), dst), verb, share)
    if custom:  # they are dealt out last, and given up first
        return tuple(found)
    for axis, src in enumerate(state):
        if isinstance(src, Shard) and axes_of(state, src.dim)[-1] != axis:
            continue
        for dst in targets:
            if isinstance(dst, CustomPlacement):
                continue
            if type(src) is type(dst) is Partial:
                allowed = src != dst and src.linear and dst.linear
            elif isinstance(src, Shard) and isinstance(dst, Shard):
                allowed = src.dim != dst.dim
            else:
                allowed = type(src) is not type(dst)
            if isinstance(src, Shard) and not may_pad(dst, targets):
                continue
            if allowed and innermost(state, (axis,), src, dst):
                verb = VERBS[type(src), type(dst)]
                add((axis,), placed(state, (axis,), dst), verb)
    for axes, after in slices_into_addends(state, targets):
        add(axes, after, "local")
    wide = [a for a, n in enumerate(mesh_shape) if n > 1]
    for count in range(2, len(wide) + 1):
        for axes in itertools.combinations(wide, count):
            kinds = [state[a] for a in axes]
            first = kinds[0]
            if isinstance(first, Partial) and all(k == first for k in kinds):
                for dst in targets:
                    if isinstance(dst, (Partial, CustomPlacement)):
                        continue
                    if not innermost(state, axes, first, dst):
                        continue
                    orders = itertools.permutations(axes)
                    for order in orders if isinstance(dst, Shard) else (axes,):
                        add(axes, placed(state, order, dst), VERBS[Partial, type(dst)])
            elif all(isinstance(k, Shard) for k in kinds):
                inside = cut_by(state, axes)
                if inside is None:
                    continue
                if len(inside) == 1:
                    add(axes, placed(state, axes, R), "all_gather")
                for after, share in exchanges(mesh_shape, state, axes, inside, targets):
                    add(axes, after, "all_to_all", share)
    return tuple(found)


def custom_ways(
    mesh_shape: tuple[int, ...],
    state: Placements,
    targets: tuple[Placement, ...],
    last: int,
) -> Iterator[tuple[int, Placement, str, float | None]]:
    """Steps from and to custom placements: axis, placement after, verb, share sent.

    Args:
        mesh_shape: Sizes of the axes.
        state: Placements before.
        targets: Placements that an axis may go to.
        last: The last axis with a custom placement, -1 if there is none.
    """
    for axis, src in enumerate(state):
        if axis < last:
            continue
        parts = mesh_shape[axis]
        if isinstance(src, Shard) and axes_of(state, src.dim)[-1] != axis:
            continue
        if isinstance(src, CustomPlacement):
            yield axis, R, "all_gather", None
        for dst in targets:
            if dst == src:
                continue
            if isinstance(src, CustomPlacement):
                share = src.sends_to(dst, parts)
                if share is not None:
                    yield axis, dst, "all_to_all", share
            if isinstance(dst, CustomPlacement):
                if isinstance(src, Replicate):
                    yield axis, dst, "local", None
                share = dst.sends_from(src, parts)
                if share is not None:
                    yield axis, dst, "all_to_all", share


Cut = tuple[tuple[int, tuple[int, ...]], ...]


def cut_by(state: Placements, axes: tuple[int, ...]) -> Cut | None:
    """For each dim that ``axes`` cut, those axes; None unless they are innermost."""
    found = []
    for dim in sorted({p.dim for a in axes if isinstance(p := state[a], Shard)}):
        nest = axes_of(state, dim)
        mine = tuple(a for a in nest if a in axes)
        if nest[len(nest) - len(mine) :] != mine:
            return None
        found.append((dim, mine))
    return tuple(found)


def slices_into_addends(
    state: Placements, targets: tuple[Placement, ...]
) -> Iterator[tuple[tuple[int, ...], Placements]]:
    """Local steps that cut copies and pad shards of one dim at once.

    Axes that cut the dim come to hold addends, replicated axes cut it instead: each
    rank keeps what it has of its new piece. Neither step alone would do: cut first, the
    pieces would be inside those to pad; padded first, they would be large.
    """
    whole = [a for a, p in enumerate(state) if isinstance(p, Replicate)]
    for dim in sorted({p.dim for p in targets if isinstance(p, Shard)}):
        nest = axes_of(state, dim)
        for count in range(1, len(nest) + 1):
            given_up = nest[len(nest) - count :]
            for p in targets:
                if not isinstance(p, Partial) or not may_pad(p, targets):
                    continue
                if not innermost(state, sorted(given_up), p, p):
                    continue
                padded = placed(state, given_up, p)
                for n in range(1, len(whole) + 1):
                    for taking in itertools.permutations(whole, n):
                        axes = tuple(sorted((*given_up, *taking)))
                        yield axes, placed(padded, taking, Shard(dim))


def exchanges(
    mesh_shape: tuple[int, ...],
    state: Placements,
    axes: tuple[int, ...],
    inside: Cut,
    targets: tuple[Placement, ...],
) -> Iterator[tuple[Placements, float]]:
    """States that one all-to-all over ``axes`` leads to, and what part is sent."""
    outer = placed(state, axes, R)
    dims = tuple(p.dim for p in targets if isinstance(p, Shard))
    for cut in nestings(axes, dims):
        if cut == inside:
            continue
        after = outer
        for dim, mine in cut:
            after = placed(after, mine, Shard(dim))
        yield after, 1 - kept_share(mesh_shape, axes, inside, cut)


def may_pad(dst: Placement, targets: tuple[Placement, ...]) -> bool:
    """Whether shards may be padded to such addends.

    Not with the infinities of max and min where products are on the way: the second
    derivative of a product with an infinite factor is not a number.
    """
    infinite = dst in (Partial("max"), Partial("min"))
    return not infinite or Partial("product") not in targets


def innermost(
    state: Placements, axes: Sequence[int], src: Placement, dst: Placement
) -> bool:
    """Whether addends on ``axes`` may come or go: all later axes commute with them."""
    ends = [p for p in (src, dst) if isinstance(p, Partial)]
    later = [p for a, p in enumerate(state) if a > axes[0] and a not in axes]
    return all(end.commutes(p) for end in ends for p in later)


@lru_cache(maxsize=256)
def nestings(axes: tuple[int, ...], dims: tuple[int, ...]) -> tuple[Cut, ...]:
    """Every way for ``axes`` to cut ``dims``: for each dim its axes, outermost first."""
    found: list[Cut] = []
    for where in itertools.product(dims, repeat=len(axes)):
        groups = {
            d: [a for a, w in zip(axes, where, strict=True) if w == d]
            for d in sorted(set(where))
        }
        for orders in itertools.product(
            *(itertools.permutations(g) for g in groups.values())
        ):
            found.append(tuple(zip(groups, orders, strict=True)))
    return tuple(found)


@lru_cache(maxsize=16384)
def kept_share(
    mesh_shape: tuple[int, ...], axes: tuple[int, ...], before: Cut, after: Cut
) -> float:
    """The part of its shard that an average rank keeps, all cuts being even.

    Args:
        mesh_shape: Sizes of all axes.
        axes: The axes that take part.
        before: For each dim, those that cut it, the outermost first.
        after: Likewise, afterwards.
    """
    was, becomes = dict(before), dict(after)
    sizes = [mesh_shape[a] for a in axes]

    def span(cut: tuple[int, ...], at: dict[int, int]) -> tuple[float, float]:
        start, width = 0.0, 1.0
        for axis in cut:
            width /= mesh_shape[axis]
            start += width * at[axis]
        return start, start + width

    total = 0.0
    for where in itertools.product(*(range(n) for n in sizes)):
        at = dict(zip(axes, where, strict=True))
        part = 1.0
        for dim in {**was, **becomes}:
            a, b = span(was.get(dim, ()), at)
            c, d = span(becomes.get(dim, ()), at)
            part *= max(0.0, min(b, d) - max(a, c))
        total += part
    return round(total, 12)  # the shares of all ranks, over their number
