"""Slices of a dim that a custom placement deals out, where nothing has to move.

A custom placement may know that each rank holds a run of a slice (``slice_of``), as the
sections of a fused projection do: then the slice is a run of the local shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dtensor.calls import Call, Operand
from dtensor.custom_placement import CustomPlacement, lies_along
from dtensor.notation import Layout
from dtensor.placement import Placements, normal
from dtensor.redistribute import plain
from dtensor.spec import Spec

Kept = Sequence[tuple[Placements, int, int]]


def runs_of(x: Operand, dim: int, slices: Sequence[tuple[int, int]]) -> Kept | None:
    """For slices by start and length: placements and this rank's run of each, or None.

    Only where a custom placement, alone in cutting the dim, says that its ranks hold a
    run of every slice.
    """
    axes = [a for a, p in enumerate(x.placements) if lies_along((p,), (dim,))]
    custom = x.placements[axes[0]] if len(axes) == 1 else None
    if not isinstance(custom, CustomPlacement):
        return None
    found = []
    for start, count in slices:
        run = custom.slice_of(start, count, x.spec.mesh.shape[axes[0]])
        if run is None:
            return None
        places = list(x.placements)
        places[axes[0]] = run.placement
        found.append((normal(tuple(places)), run.start, run.count))
    return found


def run_slices(
    call: Call, dim: int, kept: Kept, shapes: Sequence[Sequence[int]], many: bool
) -> Layout:
    """The layout of slices that are runs of this rank's shard; one or many."""

    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        def pieces(func: Any, args: Any, kwargs: Any) -> Any:
            local = plain(args[0])
            found = tuple(local.narrow(dim, start, n) for _, start, n in kept)
            return found if many else found[0]

        return pieces

    return Layout(
        [call.operands[0].placements],
        [places for places, *_ in kept],
        shapes,
        run=run,
        view=True,
        many=many,
    )
