"""What a rank should find in its environment: threads, a way to wait, a GPU.

Each function returns the variables to add, and leaves out what the user has set. They
are read by libraries when these start, so they must be set before: by ``dtensor-run``
for its ranks, and by a rank for itself under a plain ``mpiexec``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

GPU_CHOICE = "DTENSOR_GPU"  # "local" makes a rank take the GPU of its local rank

# Without these a waiting rank spins on a core that the working ranks need: a small
# all-reduce among 4 ranks on 2 busy cores takes 0.5 ms with them, 5 ms without.
YIELD_VARIABLES = {
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",  # MPICH
    "I_MPI_THREAD_YIELD": "3",  # Intel MPI
    "I_MPI_THREAD_SLEEP": "10",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # Open MPI
}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# (rank on this host, ranks on this host), by launcher.
LOCAL_VARIABLES = (
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


def count_cores() -> int:
    """Number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not a Linux
        return os.cpu_count() or 1


def count_gpus(devices: Path = Path("/dev")) -> int:
    """Number of NVIDIA GPUs of this host, without starting CUDA.

    Args:
        devices: Folder of device files.
    """
    return sum(path.name[6:].isdigit() for path in devices.glob("nvidia*"))


def local_rank(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """This rank's number on its host, and the ranks there, as the launcher says.

    Args:
        environ: The environment of the rank.

    Returns:
        (local rank, local size), the size 1 where the launcher gives none; None where
        no launcher gives a local rank.

    Example:
        >>> local_rank({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"})
        (1, 4)
    """
    for rank_name, size_name in LOCAL_VARIABLES:
        rank, size = environ.get(rank_name, ""), environ.get(size_name, "")
        if rank.isdigit():
            return int(rank), int(size) if size.isdigit() else 1
    return None


def thread_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """One thread per rank for torch, OpenMP and BLAS, unless the user chose a number.

    Example:
        >>> thread_settings({"OMP_NUM_THREADS": "8"})
        {}
    """
    if "OMP_NUM_THREADS" in environ:
        return {}
    return {name: "1" for name in THREAD_VARIABLES if name not in environ}


def yield_settings(
    environ: Mapping[str, str], ranks: int, cores: int
) -> dict[str, str]:
    """Make waiting ranks give up their core, where ranks outnumber cores.

    Args:
        environ: The environment of the ranks.
        ranks: Ranks on a host.
        cores: Cores that they share.

    Example:
        >>> yield_settings({}, ranks=2, cores=2)
        {}
    """
    if ranks <= cores:
        return {}
    return {k: v for k, v in YIELD_VARIABLES.items() if k not in environ}


def gpu_settings(environ: Mapping[str, str], gpus: int) -> dict[str, str]:
    """Show a rank the one GPU of its local rank; ranks beyond the GPUs share them.

    Only where ``dtensor-run`` asked for it, and never against a user's own
    ``CUDA_VISIBLE_DEVICES``.

    Args:
        environ: The environment of the rank.
        gpus: GPUs of this host.

    Example:
        >>> gpu_settings({"DTENSOR_GPU": "local", "MPI_LOCALRANKID": "5"}, gpus=4)
        {'CUDA_VISIBLE_DEVICES': '1'}
    """
    place = local_rank(environ)
    if (
        environ.get(GPU_CHOICE) != "local"
        or "CUDA_VISIBLE_DEVICES" in environ
        or place is None
        or gpus == 0
    ):
        return {}
    return {"CUDA_VISIBLE_DEVICES": str(place[0] % gpus)}
