"""Which GPU a rank takes, and what a machine without one is told."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

from dtensor.mesh.device_mesh import device_checks
from dtensor.mesh.world import World, current_world
from dtensor.rank_environment import local_rank


def prepare_gpu(ranks: int) -> None:
    """Take the GPU of this rank, for ``init_device_mesh("cuda", ...)``.

    Args:
        ranks: Number of ranks of the mesh; from two on they need NCCL.

    Raises:
        RuntimeError: Something is missing; the message says what.
    """
    world = current_world()
    problem = missing_gpu() or _missing_nccl(world, ranks)
    if problem is not None:
        raise RuntimeError(f"init_device_mesh: {problem}")
    place = local_rank(os.environ)
    cuda: Any = torch.cuda
    # A program that has used a GPU has chosen it.
    if not cuda.is_initialized() and place is not None and world.kind == "mpi":
        cuda.set_device(place[0] % cuda.device_count())


def missing_gpu() -> str | None:
    """What keeps this process from using a GPU, in words; None if nothing does."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return (
            "this machine has no NVIDIA driver, got no libcuda.so.1, expected one. "
            "Use a machine with a GPU, or init_device_mesh('cpu', ...)."
        )
    if torch.version.cuda is None:
        return (
            f"torch was built without CUDA, got torch {torch.__version__}, expected a "
            f"build for CUDA. Install one (see pytorch.org), or use "
            f"init_device_mesh('cpu', ...)."
        )
    if torch.cuda.device_count() == 0:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        return (
            f"no GPU is visible, got CUDA_VISIBLE_DEVICES={shown!r}, expected at least "
            f"one. Unset it, or use init_device_mesh('cpu', ...)."
        )
    return None


def _missing_nccl(world: World, ranks: int) -> str | None:
    if ranks == 1 or world.kind != "mpi":
        return None
    from dtensor.collectives.nccl import missing_binding

    return missing_binding()


device_checks["cuda"] = prepare_gpu
