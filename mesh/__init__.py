"""Meshes of ranks: their layout, their slices, and the ambient one."""

from dtensor.mesh.ambient import current_mesh, use_mesh
from dtensor.mesh.chunks import chunk_offset, chunk_sizes
from dtensor.mesh.device_mesh import DeviceMesh, init_device_mesh
from dtensor.mesh.world import (
    World,
    current_world,
    get_rank,
    get_world_size,
    use_world,
)

__all__ = [
    "DeviceMesh",
    "World",
    "chunk_offset",
    "chunk_sizes",
    "current_mesh",
    "current_world",
    "get_rank",
    "get_world_size",
    "init_device_mesh",
    "use_mesh",
    "use_world",
]
