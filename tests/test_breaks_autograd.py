"""Gradients that broke once: averages in no_grad_sync, writes after a gather, detach_."""

from __future__ import annotations

import itertools
from typing import Any

from guard_helpers import gen, ranks, same
from op_harness import place

from dtensor import (
    Partial,
    Replicate,
    Shard,
    init_device_mesh,
    redistribution,
)

AVG = Partial("avg")
ALL: tuple[Any, ...] = (Shard(0), Shard(1), Replicate(), Partial(), AVG)


@ranks(4)
def test_what_was_redistributed_may_be_written_on_every_rank() -> None:
    """A gathered buffer was a view on the ranks whose shard had one row only."""
    mesh = init_device_mesh("cpu", (2, 2))
    with redistribution("allow"):
        for rows in (1, 4):
            v = gen(rows, 4)
            for src, dst in itertools.product(
                itertools.product(ALL[:4], repeat=2), repeat=2
            ):
                x = place(v, mesh, src).requires_grad_()
                y = (x * 1.0).redistribute(  # type: ignore[attr-defined]
                    list(dst)
                )
                y.mul_(2.0)
                same(y, v * 2, (rows, src, dst))
