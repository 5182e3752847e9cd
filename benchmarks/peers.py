"""The peers that suites measure against: raw mpi4py, torch.distributed, plain torch.

All share the ranks of one MPI job. torch's process groups meet over a file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh

from dtensor import DeviceMesh, init_device_mesh
from dtensor.benchmarks.harness import Alone, Ranks
from dtensor.collectives import mpi
from dtensor.mesh.world import get_world_size

# torch's names beside ours, in tables and bars.
PLAIN = "plain torch"
PYTORCH = "PyTorch DTensor"
RAW = "mpi4py, numpy"
RAW_TENSOR = "mpi4py, tensor"
GLOO = "gloo"
HAND = "hand-written"
FSDP2 = "FSDP2"


class MpiRanks:
    """The ranks of the MPI job, on a communicator that only the harness uses."""

    def __init__(self) -> None:
        self._module = mpi.start()
        self._comm = self._module.COMM_WORLD.Dup()
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size

    def barrier(self) -> None:
        """Wait for all."""
        self._comm.Barrier()

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Largest over the ranks, one by one."""
        mine = list(values)
        return [max(row) for row in zip(*self._comm.allgather(mine))]

    def share(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        return self._comm.bcast(value)


def join_ranks() -> Ranks:
    """The ranks of this job: one alone, or those of MPI. Called by all."""
    return Alone() if get_world_size() == 1 else MpiRanks()


def raw_comm() -> Any:
    """An mpi4py communicator of all ranks, for hand-written peers. Called by all."""
    return mpi.start().COMM_WORLD.Dup()


@contextmanager
def torch_world(ranks: Ranks, device: str = "cpu") -> Iterator[None]:
    """torch.distributed over the same ranks: gloo, on CUDA NCCL as well.

    Called by all ranks.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    store: dist.Store
    folder = None
    if ranks.size == 1:
        store = dist.HashStore()
    else:
        if ranks.rank == 0:
            folder = tempfile.TemporaryDirectory(prefix="dtensor-bench-")
        path = ranks.share(folder and os.path.join(folder.name, "store"))
        store = dist.FileStore(path, ranks.size)
    dist.init_process_group(
        backend, store=store, rank=ranks.rank, world_size=ranks.size
    )
    try:
        yield
    finally:
        ranks.barrier()
        dist.destroy_process_group()
        ranks.barrier()
        if folder is not None:
            folder.cleanup()


def meshes(
    shape: tuple[int, ...],
    names: tuple[str, ...] | None = None,
    device: str = "cpu",
) -> tuple[DeviceMesh, TorchMesh]:
    """Our mesh and PyTorch's, of one shape; inside of ``torch_world``."""
    ours = init_device_mesh(device, shape, mesh_dim_names=names)
    return ours, init_torch_mesh(device, shape, mesh_dim_names=names)


def wait_for(device: str) -> Any:
    """What ``interleave`` takes as ``wait`` on this device."""
    return torch.cuda.synchronize if device == "cuda" else None
