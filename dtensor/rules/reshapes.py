"""Reshapes: which cuts of the dims before are cuts of the dims after.

In row-major order an index of a tensor is one number, and a shard is a set of such
numbers. A cut goes with a reshape where some placements cut the result into the same
sets: then each shard, reshaped by itself, is the shard of the result. Dims fall into
groups of equal product, and each group is judged by itself.

Where all pieces are even, an index is written in digits: the coordinates of the axes
that cut a dim, the outermost first, then what is left of the dim. An axis keeps its
place in the row of digits, so it must become the outermost of what its new dim has left:

    (2, 6) by (S(0), S(1))    digits  [a:2] [b:2] 3    ->  (12,) by (S(0), S(0))
    (8, 6) by (S(0), S(1))    digits  [a:2] 4 [b:2] 3  ->  (48,) cannot: 4 before b
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from dtensor.calls import Operand
from dtensor.costs import costs_of
from dtensor.custom_placement import CustomPlacement
from dtensor.placement import Placement, Placements, Replicate, Shard, axes_of, normal
from dtensor.plan import plan_steps
from dtensor.spec import block_of
from dtensor.steps import nestings

R = Replicate()
Sizes = tuple[int, ...]


def groups_of(before: Sizes, after: Sizes) -> list[tuple[range, range]]:
    """Dims before and after that make each other up, in order.

    Dims of size 1 that have no counterpart go with their neighbours.

    Example:
        >>> groups_of((2, 3, 4), (6, 1, 4))
        [(range(0, 2), range(0, 1)), (range(2, 3), range(1, 3))]
    """
    found = []
    i = j = i0 = j0 = 0
    while i < len(before) and j < len(after):
        if before[i] == 1 and after[j] != 1:
            i += 1
            continue
        if after[j] == 1 and before[i] != 1:
            j += 1
            continue
        a, b = before[i], after[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b and i < len(before):
                a, i = a * before[i], i + 1
            elif j < len(after):
                b, j = b * after[j], j + 1
            else:  # a tensor without elements
                i = len(before)
                break
        found.append((range(i0, i), range(j0, j)))
        i0, j0 = i, j
    if i0 < len(before) or j0 < len(after):
        if found:
            i0, j0 = found[-1][0].start, found[-1][1].start
            found.pop()
        found.append((range(i0, len(before)), range(j0, len(after))))
    return found


def carried(
    before: Sizes, after: Sizes, mesh_shape: Sizes, places: Placements
) -> Placements | None:
    """Placements of a reshaped tensor whose shards are the reshaped shards.

    Args:
        before: Shape before.
        after: Shape afterwards, of as many elements.
        mesh_shape: Sizes of the axes.
        places: Placements before. Addends and copies stay what they are.

    Returns:
        The placements, or None where some cut does not go with the reshape.
    """
    if before == after:
        return places
    out = list(places)
    ones = [d for d, n in enumerate(after) if n == 1]
    for old, new in groups_of(before, after):
        mine: list[Placement] = [R] * len(places)
        for axis, p in enumerate(places):
            if isinstance(p, Shard) and p.dim in old:
                if ones and before[p.dim] == 1:  # all lies on coordinate 0, as there
                    out[axis] = Shard(next((d for d in ones if d in new), ones[0]))
                    continue
                mine[axis] = Shard(p.dim - old.start, p.depth)
            if isinstance(p, CustomPlacement) and p.along is not None:
                if p.along not in old:
                    continue
                twin = _twin(before, after, old, new)
                if twin is not None and before[p.along] != 1:
                    out[axis] = p.at_dim(twin)
                    continue
                own = _of_custom(p, axis, before, after, old, new, mesh_shape, places)
                if own is None:
                    return None
                out[axis] = own
        if any(p is not R for p in mine):
            there = _of_group(
                tuple(before[d] for d in old),
                tuple(after[d] for d in new),
                mesh_shape,
                normal(tuple(mine)),
            )
            if there is None:
                return None
            for axis, p in enumerate(there):
                if isinstance(p, Shard):
                    out[axis] = Shard(p.dim + new.start, p.depth)
    if any(isinstance(p, CustomPlacement) and p.along is None for p in places):
        return None
    return normal(tuple(out))


def _of_custom(
    p: CustomPlacement,
    axis: int,
    before: Sizes,
    after: Sizes,
    old: range,
    new: range,
    mesh_shape: Sizes,
    places: Placements,
) -> Placement | None:
    """What a custom placement itself says of a group; it must cut the group alone."""
    assert p.along is not None, "see carried"
    for other, q in enumerate(places):
        dim = q.along if isinstance(q, CustomPlacement) else None
        if isinstance(q, Shard):
            dim = q.dim
        if other != axis and dim in old:
            return None
    there = p.at_dim(p.along - old.start).viewed(
        tuple(before[d] for d in old), tuple(after[d] for d in new), mesh_shape[axis]
    )
    if isinstance(there, Shard):
        return Shard(there.dim + new.start)
    if isinstance(there, CustomPlacement) and there.along is not None:
        return there.at_dim(there.along + new.start)
    return None


def _twin(before: Sizes, after: Sizes, old: range, new: range) -> int | None:
    """The dim after that is the one dim of a group, save those of size 1."""
    mine = [d for d in old if before[d] != 1]
    theirs = [d for d in new if after[d] != 1]
    same = len(mine) == len(theirs) == 1 and before[mine[0]] == after[theirs[0]]
    return theirs[0] if same else None


@lru_cache(maxsize=8192)
def _of_group(
    before: Sizes, after: Sizes, mesh_shape: Sizes, places: Placements
) -> Placements | None:
    """``carried`` for one group; the placements are shards of it, or Replicate."""
    if before == after:
        return places
    cuts = [(d, axis) for d in range(len(before)) for axis in axes_of(places, d)]
    even = True
    for d, n in enumerate(before):
        parts = math.prod(mesh_shape[a] for a in axes_of(places, d))
        even = even and n > 0 and n % parts == 0
    if even:
        return _by_digits(before, after, mesh_shape, cuts)
    # Digits keep their order, uneven ones too, as long as every rank has its piece.
    dims = tuple(range(len(after)))
    axes = tuple(axis for _, axis in cuts)
    usual = itertools.combinations_with_replacement(dims, len(cuts))
    ways: list[list[tuple[int, int]]] = [[*zip(w, axes, strict=True)] for w in usual]
    ways += [[(d, a) for d, mine in cut for a in mine] for cut in nestings(axes, dims)]
    for way in ways:
        there = _cut(len(places), way)
        if _same_sets(before, after, mesh_shape, places, there, cuts):
            return there
    return None


def _cut(axes: int, cuts: Sequence[tuple[int, int]]) -> Placements:
    """Placements by (dim, axis), the outermost axis of a dim first."""
    out: list[Placement] = [R] * axes
    for depth, (dim, axis) in enumerate(cuts):
        out[axis] = Shard(dim, depth)
    return normal(tuple(out))


def _by_digits(
    before: Sizes, after: Sizes, mesh_shape: Sizes, cuts: list[tuple[int, int]]
) -> Placements | None:
    """Where even cuts go: each axis to the dim that begins with its digit."""
    above = [math.prod(after[:d]) for d in range(len(after))]  # digits above a dim
    left = list(after)  # what axes have not taken of a dim
    taken: list[int] = [0] * len(before)
    found = []
    for dim, axis in cuts:
        parts = mesh_shape[axis]
        here = math.prod(before[:dim]) * max(1, taken[dim])
        taken[dim] = max(1, taken[dim]) * parts
        fits = [
            d
            for d, n in enumerate(left)
            if parts == 1 or above[d] == here and n % parts == 0
        ]
        if not fits:
            return None
        to = fits[0]
        if parts == 1:  # cuts nothing: as near as can be to where it was
            to = max((d for d in fits if above[d] <= here), default=to)
        above[to] *= parts
        left[to] //= parts
        found.append((to, axis))
    return _cut(len(mesh_shape), found)


def _same_sets(
    before: Sizes,
    after: Sizes,
    mesh_shape: Sizes,
    places: Placements,
    there: Placements,
    cuts: list[tuple[int, int]],
) -> bool:
    """Whether each coordinate holds the same indices before and afterwards."""
    axes = [axis for _, axis in cuts]
    for where in itertools.product(*(range(mesh_shape[a]) for a in axes)):
        at = [0] * len(mesh_shape)
        for axis, c in zip(axes, where, strict=True):
            at[axis] = c
        if _indices(before, places, mesh_shape, at) != _indices(
            after, there, mesh_shape, at
        ):
            return False
    return True


def _indices(
    shape: Sizes, places: Placements, mesh_shape: Sizes, at: Sequence[int]
) -> tuple[int, list[tuple[int, int]]] | None:
    """The row-major indices of a block, in the one way to write them.

    The first of them, and (count, stride) of the runs, the innermost first; a run that
    continues the one inside is part of it. None for no indices.
    """
    first, stride = 0, 1
    runs: list[tuple[int, int]] = []
    for dim in reversed(range(len(shape))):
        start, size = block_of(shape[dim], dim, places, mesh_shape, at)
        if size == 0:
            return None
        first += start * stride
        if size > 1:
            if runs and runs[-1][0] * runs[-1][1] == stride:
                runs[-1] = (runs[-1][0] * size, runs[-1][1])
            else:
                runs.append((size, stride))
        stride *= shape[dim]
    return first, runs


def kept(x: Operand, shape: Sizes) -> tuple[Placements, Placements]:
    """What an operand keeps through a reshape to ``shape``, and what becomes of it.

    Cuts that cannot go with the reshape are given up: no more of them than must be,
    and of several such choices the cheapest.

    Returns:
        Placements wanted of the operand, and those of the result.
    """
    mesh, places = x.spec.mesh, x.placements
    found = list(_choices(tuple(x.shape), shape, mesh.shape, places))

    def seconds(wanted: Placements) -> float:
        costs = costs_of(mesh, x.spec.world)
        size = x.dtype.itemsize
        steps = plan_steps(mesh, places, wanted, x.shape, size, costs)
        return sum(s.seconds for s in steps)

    if len(found) == 1:
        return found[0]
    return min(found, key=lambda choice: seconds(choice[0]))


def _choices(
    before: Sizes, after: Sizes, mesh_shape: Sizes, places: Placements
) -> Iterator[tuple[Placements, Placements]]:
    """Every smallest set of cuts to give up, as placements before and afterwards."""
    cut = [axis for axis, p in enumerate(places) if p.is_cut()]
    enough: list[set[int]] = []
    for count in range(len(cut) + 1):
        for gone in itertools.combinations(cut, count):
            if any(less <= set(gone) for less in enough):
                continue
            wanted = normal(
                tuple(R if axis in gone else p for axis, p in enumerate(places))
            )
            there = carried(before, after, mesh_shape, wanted)
            if there is not None:
                enough.append(set(gone))
                yield wanted, there
