"""What moving bytes costs on each axis of a mesh: the planner's one source of prices.

A collective over some axes costs the latency of the slowest of them and its bytes per
rank over the bandwidth of the slowest. The numbers are the same on all ranks, else the
ranks would make unlike plans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.mesh.world import World, current_world

LATENCY = 20e-6  # seconds per collective
SECONDS_PER_BYTE = 1e-9


@dataclass(frozen=True, slots=True)
class CostTable:
    """Prices of one mesh.

    Attributes:
        latency: Seconds per collective, for each axis.
        seconds_per_byte: Seconds per byte that a rank sends, for each axis.
        local_latency: Seconds per local copy.
        local_seconds_per_byte: Seconds per byte copied inside a rank.
    """

    latency: tuple[float, ...]
    seconds_per_byte: tuple[float, ...]
    local_latency: float = 1e-7
    local_seconds_per_byte: float = 1e-11

    def __post_init__(self) -> None:
        numbers = (
            *self.latency,
            *self.seconds_per_byte,
            self.local_latency,
            self.local_seconds_per_byte,
        )
        if len(self.latency) != len(self.seconds_per_byte):
            raise ValueError(
                f"CostTable: one latency and one bandwidth per axis are needed, got "
                f"{len(self.latency)} and {len(self.seconds_per_byte)}. Give as many "
                "of the one as of the other."
            )
        if not all(math.isfinite(x) and x >= 0 for x in numbers):
            raise ValueError(
                f"CostTable: seconds must be finite and not negative, got {self!r}. "
                "Give zero for what costs nothing."
            )

    def collective(self, axes: Sequence[int], sent: float, copied: float) -> float:
        """Seconds of one collective.

        Args:
            axes: The mesh axes it runs over; none for a local step.
            sent: Bytes a rank sends.
            copied: Bytes a rank copies.
        """
        seconds = self.local_latency + copied * self.local_seconds_per_byte
        if axes:
            slowest = max(self.seconds_per_byte[a] for a in axes)
            seconds += max(self.latency[a] for a in axes) + sent * slowest
        return seconds


@lru_cache(maxsize=64)
def default_costs(axes: int) -> CostTable:
    """The prices taken where a mesh has not been measured."""
    return CostTable((LATENCY,) * axes, (SECONDS_PER_BYTE,) * axes)


def costs_of(mesh: DeviceMesh, world: World | None = None) -> CostTable:
    """The prices of a mesh: those set for it, else the defaults."""
    world = current_world() if world is None else world
    found: CostTable | None = world.memo.get(("costs", mesh))
    return default_costs(mesh.ndim) if found is None else found


def set_costs(mesh: DeviceMesh, table: CostTable | None) -> None:
    """Let this rank plan with these prices from now on.

    Every rank of the mesh must set the same; None brings the defaults back. Plans
    made before are forgotten.

    Args:
        mesh: The mesh.
        table: Its prices.

    Raises:
        ValueError: Prices for another number of axes.
    """
    if table is not None and len(table.latency) != mesh.ndim:
        raise ValueError(
            f"set_costs: one latency and one bandwidth per mesh axis are needed, got "
            f"{len(table.latency)} for {mesh!r}. Give {mesh.ndim}."
        )
    memo = current_world().memo
    if table is None:
        memo.pop(("costs", mesh), None)
    else:
        memo[("costs", mesh)] = table
    for key, spec in list(memo.items()):
        if type(key) is tuple and key[:2] == ("spec", mesh):
            for known in [k for k in spec.memo if k[0] == "transition"]:
                del spec.memo[known]
    memo.get("plans", {}).clear()
