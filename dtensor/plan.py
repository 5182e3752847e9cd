"""The planner: the cheapest path between two layouts of one tensor.

States are layouts, ``steps`` lists the ways from each to the next, ``costs`` prices
them. The plan is Dijkstra's shortest path; it depends on its arguments alone, so all
ranks find the same one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache

from dtensor.costs import CostTable, default_costs
from dtensor.custom_placement import CustomPlacement
from dtensor.errors import ShardingError
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import (
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    normal,
    show,
)
from dtensor.steps import Edge, Step, average_shard, edges

R = Replicate()


def local_elements(
    mesh: DeviceMesh, placements: Placements, shape: Sequence[int]
) -> float:
    """Elements of a shard of average size; the same number on all ranks."""
    return average_shard(mesh.shape, placements, math.prod(shape))


def targets_for(
    mesh_shape: Sequence[int],
    src: Placements,
    dst: Placements,
    shape: Sequence[int],
) -> tuple[Placement, ...]:
    """Placements worth passing through.

    All dims that neither end cuts cost the same, so as many of them as there are axes
    are enough; those that the mesh cuts evenly come first, and one too short for every
    rank to get a piece is no help.
    """
    ends = {*src, *dst}
    dims = {p.dim for p in ends if isinstance(p, Shard)}
    whole = math.prod(mesh_shape)
    others = [d for d in range(len(shape)) if d not in dims and shape[d] >= whole]
    others.sort(key=lambda d: (shape[d] % whole != 0, d))
    dims.update(others[: sum(n > 1 for n in mesh_shape)])
    others_too = (Partial, CustomPlacement)
    more = sorted({p for p in ends if isinstance(p, others_too)}, key=repr)
    return (R, *(Shard(d) for d in sorted(dims)), *more)


def plan_steps(
    mesh: DeviceMesh,
    src: Placements,
    dst: Placements,
    shape: Sequence[int],
    itemsize: int = 4,
    costs: CostTable | None = None,
) -> tuple[Step, ...]:
    """The cheapest steps from ``src`` to ``dst``.

    Args:
        mesh: The mesh.
        src: Placements before, one per axis.
        dst: Placements after.
        shape: Global shape in elements.
        itemsize: Bytes per element, for the cost.
        costs: Prices; the defaults if None.

    Raises:
        ShardingError: No path (never for Shard, Replicate and Partial).
    """
    src, dst = normal(src), normal(dst)
    prices = default_costs(mesh.ndim) if costs is None else costs
    targets = targets_for(mesh.shape, src, dst, shape)
    elements = math.prod(shape)
    limit = max(average_shard(mesh.shape, built_in(p), 1) for p in (src, dst))
    for most in (limit, 1.0):
        steps = cheapest(
            mesh.shape, src, dst, elements, itemsize, prices, targets, most
        )
        if steps is not None:
            return steps
    raise ShardingError(
        f"redistribute: there is no way from {show(src)} to {show(dst)} on {mesh!r}. "
        "Redistribute to Replicate() first."
    )


def built_in(places: Placements) -> Placements:
    """Placements with Replicate in the place of user-defined ones."""
    return tuple(R if isinstance(p, CustomPlacement) else p for p in places)


Priced = dict[Placements, tuple[tuple[Edge, float], ...]]


@lru_cache(maxsize=64)
def price_list(
    mesh_shape: tuple[int, ...],
    targets: tuple[Placement, ...],
    nbytes: float,
    prices: CostTable,
) -> Priced:
    """For states seen so far: every step with its price, for so many bytes."""
    return {}


def cheapest(
    mesh_shape: tuple[int, ...],
    src: Placements,
    dst: Placements,
    elements: int,
    itemsize: int,
    prices: CostTable,
    targets: tuple[Placement, ...],
    most: float,
) -> tuple[Step, ...] | None:
    """Dijkstra's shortest path through shards of no more than a part of the tensor.

    Args:
        mesh_shape: Sizes of the axes.
        src: Placements before.
        dst: Placements after.
        elements: Elements of the tensor.
        itemsize: Bytes per element.
        prices: Prices.
        targets: Placements that an axis may go to.
        most: The largest shard on the way, as a part of the tensor.
    """
    nbytes = float(elements * itemsize)
    known = price_list(mesh_shape, targets, nbytes, prices)
    best: dict[Placements, float] = {src: 0.0}
    came: dict[Placements, tuple[Placements, Edge, float]] = {}
    queue: list[tuple[float, int, Placements]] = [(0.0, 0, src)]
    pushed, least = 0, math.inf  # the cheapest way found so far
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state == dst:
            steps: list[Step] = []
            while state != src:
                before, edge, seconds = came[state]
                steps.append(edge.step(before, elements, seconds))
                state = before
            return tuple(reversed(steps))
        if cost > best[state]:
            continue
        ways = known.get(state)
        if ways is None:
            ways = known[state] = tuple(
                (edge, edge.seconds(nbytes, prices))
                for edge in edges(mesh_shape, state, targets)
            )
        for edge, seconds in ways:
            total = cost + seconds
            if edge.after > most or total >= least:
                continue
            if total < best.get(edge.dst, math.inf):
                best[edge.dst] = total
                came[edge.dst] = (state, edge, seconds)
                if edge.dst == dst:
                    least = total
                pushed += 1
                heapq.heappush(queue, (total, pushed, edge.dst))
    return None
