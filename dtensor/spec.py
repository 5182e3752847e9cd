"""Spec: the type of a DTensor, interned so that it is compared by identity.

A spec says on which mesh a tensor lies, how, and which global shape it has. It
belongs to one rank (its ``World``), so it can also hold what that rank alone
knows: its coordinate, the shape of its shard, its communicators and the cache of
op plans. Nothing that holds a spec has to ask a contextvar who it is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from dtensor.collectives.communicator import Communicator
from dtensor.collectives.registry import communicator
from dtensor.custom_placement import CustomPlacement
from dtensor.mesh.chunks import chunk_offset, chunk_sizes
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.mesh.world import World, current_world
from dtensor.placement import (
    Placement,
    Placements,
    Replicate,
    axes_of,
    dual,
    normal,
    show,
)

_LOCK = threading.Lock()


class Spec:
    """Mesh, placements and global shape of a DTensor, as one rank sees them.

    Make one with ``spec_of``; equal specs of one rank are the same object.

    Attributes:
        world: The rank this spec belongs to.
        mesh: The mesh.
        placements: One placement per mesh axis.
        shape: Global shape.
        coordinate: This rank's coordinate in the mesh, None outside of it.
        local_shape: Shape of this rank's shard.
        plans: This rank's cache of op plans.
    """

    __slots__ = (
        "world",
        "mesh",
        "placements",
        "shape",
        "coordinate",
        "local_shape",
        "plans",
        "memo",
    )
    world: World
    mesh: DeviceMesh
    placements: Placements
    shape: torch.Size
    coordinate: tuple[int, ...] | None
    local_shape: torch.Size
    plans: dict[Any, Any]
    memo: dict[Any, Any]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Spec is immutable; got an assignment to {name!r}")

    def __repr__(self) -> str:
        return f"Spec({tuple(self.shape)}, {show(self.placements)}, {self.mesh!r})"

    def __copy__(self) -> Spec:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Spec:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return spec_of, (self.mesh, self.placements, tuple(self.shape))

    @property
    def ndim(self) -> int:
        """Number of dims of the tensor."""
        return len(self.shape)

    def replace(
        self,
        placements: Placements | None = None,
        shape: Sequence[int] | None = None,
    ) -> Spec:
        """The spec of the same rank with other placements or another shape."""
        return spec_of(
            self.mesh,
            self.placements if placements is None else placements,
            self.shape if shape is None else shape,
            self.world,
        )

    def dual(self) -> Spec:
        """The spec of a cotangent of a tensor of this spec."""
        found = self.memo.get("dual")
        if found is None:
            found = self.replace(tuple(dual(p) for p in self.placements))
            self.memo["dual"] = found
        return found

    def replicated(self) -> Spec:
        """The same tensor, whole on every rank."""
        found = self.memo.get("replicated")
        if found is None:
            found = self.replace((Replicate(),) * self.mesh.ndim)
            self.memo["replicated"] = found
        return found

    def block(self, dim: int, axis: int | None = None) -> tuple[int, int]:
        """The (offset, length) of ``dim`` that ``axis`` cuts, or would cut next.

        That is what the axes outside of it leave on this rank; where it does not cut
        the dim, or is None, it is this rank's own piece.
        """
        return block_of(
            self.shape[dim],
            dim,
            self.placements,
            self.mesh.shape,
            self.coordinate or (0,) * self.mesh.ndim,
            axis,
        )

    def comm(self, axis: int) -> Communicator:
        """The communicator of this rank's row along ``axis``."""
        return communicator_in(self.world, self.mesh, axis)

    def shards(self, dim: int) -> int:
        """Number of pieces that ``dim`` is cut into, over all axes."""
        n = 1
        for axis in axes_of(self.placements, dim):
            n *= self.mesh.shape[axis]
        return n


def block_of(
    length: int,
    dim: int,
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    before: int | None = None,
) -> tuple[int, int]:
    """The (offset, length) that one coordinate holds of a dim of ``length``.

    The outermost axis cuts first, each other one what is left. ``before`` stops at an
    axis: what that one cuts.
    """
    offset = 0
    for axis in axes_of(placements, dim):
        if axis == before:
            break
        parts, at = mesh_shape[axis], coordinate[axis]
        offset += chunk_offset(length, parts, at)
        length = chunk_sizes(length, parts)[at]
    return offset, length


def local_shape_at(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> tuple[int, ...]:
    """Shape of the shard at one coordinate."""
    local = tuple(
        block_of(n, d, placements, mesh_shape, coordinate)[1]
        for d, n in enumerate(shape)
    )
    for p, parts, at in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(p, CustomPlacement):
            local = tuple(p.local_shape(local, parts, at))
    return local


def check_custom(what: str, mesh: DeviceMesh, places: Placements, shape: Any) -> None:
    """Ask custom placements whether they fit, for all ranks, on every rank alike."""
    if not any(isinstance(p, CustomPlacement) for p in places):
        return
    for rank in mesh.ranks:
        at = mesh.coordinate_of(rank) or ()
        local = tuple(
            block_of(n, d, places, mesh.shape, at)[1] for d, n in enumerate(shape)
        )
        for p, parts, index in zip(places, mesh.shape, at, strict=True):
            if isinstance(p, CustomPlacement):
                p.check(what, local, parts)
                local = tuple(p.local_shape(local, parts, index))


def communicator_in(world: World, mesh: DeviceMesh, axis: int) -> Communicator:
    """``communicator(mesh, axis)`` of a given rank, kept in its memo."""
    key = ("comm", mesh, axis)
    found = world.memo.get(key)
    if found is None:
        found = world.memo[key] = communicator(mesh, axis)
    return found


def spec_of(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    world: World | None = None,
) -> Spec:
    """The one spec of these values on this rank.

    Args:
        mesh: The mesh.
        placements: One per axis, checked already (see ``placements_of``).
        shape: Global shape in elements.
        world: The rank; the current one by default.
    """
    if world is None:
        world = current_world()
    key = ("spec", mesh, tuple(placements), tuple(shape))
    found = world.memo.get(key)
    if found is not None:
        return found  # type: ignore[no-any-return]
    places = normal(key[2])
    if places != key[2]:
        found = spec_of(mesh, places, shape, world)
        return world.memo.setdefault(key, found)  # type: ignore[no-any-return]
    check_custom("spec", mesh, places, tuple(shape))
    spec = object.__new__(Spec)
    put = object.__setattr__
    put(spec, "world", world)
    put(spec, "mesh", mesh)
    put(spec, "placements", key[2])
    put(spec, "shape", torch.Size(shape))
    put(spec, "coordinate", mesh.coordinate_of(world.rank))
    put(spec, "memo", {})
    if spec.coordinate is None:
        local = (0,) * max(1, len(spec.shape))
    else:
        at = spec.coordinate
        local = local_shape_at(spec.shape, spec.placements, mesh.shape, at)
    put(spec, "local_shape", torch.Size(local))
    with _LOCK:
        put(spec, "plans", world.memo.setdefault("plans", {}))
        return world.memo.setdefault(key, spec)  # type: ignore[no-any-return]
