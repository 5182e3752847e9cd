"""Redistribution: the plan between two specs of one tensor, made ready for this rank.

``plan`` finds the cheapest steps, ``moves`` knows what a rank does in each, ``costs``
what it takes; here they are put together and kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dtensor.costs import LATENCY, SECONDS_PER_BYTE, costs_of
from dtensor.moves import Mask, Move, alias, move_of, plain
from dtensor.plan import local_elements, plan_steps
from dtensor.spec import Spec
from dtensor.steps import Step


@dataclass(frozen=True, slots=True)
class Transition:
    """A plan made ready for this rank: the steps and what to do in each.

    Attributes:
        src: Spec before.
        dst: Spec after.
        steps: The steps, alike on all ranks.
        moves: This rank's part in each step.
    """

    src: Spec
    dst: Spec
    steps: tuple[Step, ...]
    moves: tuple[Move, ...]

    @property
    def communicates(self) -> bool:
        """Whether any step moves data between ranks."""
        return any(s.verb != "local" for s in self.steps)

    @property
    def elements(self) -> float:
        """Elements sent per rank, all steps together (an average)."""
        return sum(s.elements for s in self.steps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run the steps on a local shard; the result is a plain local tensor."""
        x = plain(x)
        for move in self.moves:
            x = move(x)
        return x


def transition(src: Spec, dst: Spec, itemsize: int = 4) -> Transition:
    """The cached transition between two specs of one tensor on one mesh.

    Args:
        src: Spec before.
        dst: Spec after.
        itemsize: Bytes per element, for the choice of the plan; op plans, which serve
            all dtypes, leave it at 4.
    """
    key = ("transition", dst, itemsize)
    found = src.memo.get(key)
    if found is None:
        if src.coordinate is None:
            found = Transition(src, dst, (), ())
        else:
            costs = costs_of(src.mesh, src.world)
            steps = plan_steps(
                src.mesh, src.placements, dst.placements, src.shape, itemsize, costs
            )
            moves = [move_of(src.replace(step.src), step, itemsize) for step in steps]
            found = Transition(src, dst, steps, tuple(moves))
        src.memo[key] = found
    return found


__all__ = [
    "LATENCY",
    "SECONDS_PER_BYTE",
    "Mask",
    "Step",
    "Transition",
    "alias",
    "local_elements",
    "plain",
    "plan_steps",
    "transition",
]
