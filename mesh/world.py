"""Who this rank is: its number, the size of its world, and how its world talks.

A world is found, never configured: inside ``simulate`` it is the one of the rank's
thread, under an MPI launcher the one that the launcher's variables describe, and
everywhere else a world of one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

# One row per family of launchers, the more specific first: (rank, size). Hydra (MPICH,
# Intel MPI) and Slurm's PMI-2 share a row; prterun and Slurm's PMIx set PMIX_RANK.
LAUNCHER_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PALS_RANKID", "PALS_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
)


@dataclass(frozen=True, eq=False, slots=True)
class World:
    """One rank's view of all the ranks it can talk to; compared by identity.

    Attributes:
        rank: Number of this rank, from zero.
        size: Number of ranks.
        kind: How the ranks talk: ``"self"`` (alone), ``"mpi"``, ``"threads"``, or not
            at all, ``"dry"``.
        hub: What the ranks of a ``"threads"`` world share, else None.
        memo: Caches of this rank alone: communicators, the tally of calls.
    """

    rank: int
    size: int
    kind: Literal["self", "mpi", "threads", "dry"]
    hub: Any = None
    memo: dict[Any, Any] = field(default_factory=dict)


_world: ContextVar[World | None] = ContextVar("dtensor_world", default=None)


class _ProcessWorld:
    """The world of a process outside ``simulate``; made once, under a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.world: World | None = None

    def get(self) -> World:
        if self.world is None:
            with self.lock:
                if self.world is None:
                    found = launcher_world()
                    if found is None:
                        refuse_torchrun()
                        self.world = World(0, 1, "self")
                    else:
                        self.world = World(found[0], found[1], "mpi")
        return self.world


_process = _ProcessWorld()


def launcher_world() -> tuple[int, int] | None:
    """Rank and size as the launcher's environment variables give them.

    Returns:
        (rank, size), or None where no MPI launcher started this process.

    Raises:
        ValueError: A rank without a size, or numbers that do not fit each other.
    """
    for rank_name, size_name in LAUNCHER_VARIABLES:
        rank_text, size_text = os.environ.get(rank_name), os.environ.get(size_name)
        if rank_text is None or size_text is None:
            continue
        try:
            rank, size = int(rank_text), int(size_text)
        except ValueError:
            rank, size = -1, 0
        if not 0 <= rank < size:
            raise ValueError(
                f"current_world: the launcher's variables do not fit, got "
                f"{rank_name}={rank_text!r} and {size_name}={size_text!r}, expected "
                f"whole numbers with 0 <= rank < size. Start with `dtensor-run -n N`, "
                f"or unset both for a world of one."
            )
        return rank, size
    return None


def refuse_torchrun() -> None:
    """Say how to start, where torchrun started several processes.

    Its processes meet in ``torch.distributed``, which this runtime does not use: each
    would take itself for rank 0 of a world of one.

    Raises:
        RuntimeError: torchrun's variables tell of more than one process.
    """
    names = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "RANK", "WORLD_SIZE")
    elastic, local, rank, size = (os.environ.get(name) for name in names)
    if rank is None or size in (None, "1") or (elastic is None and local is None):
        return
    raise RuntimeError(
        f"current_world: torchrun started this process, got RANK={rank!r} and "
        f"WORLD_SIZE={size!r} without an MPI launcher's variables, expected an MPI job. "
        f"Start with `dtensor-run -n {size} script.py` (or `mpiexec -n {size} python "
        f"script.py`); where RANK and WORLD_SIZE are leftovers, unset them."
    )


def current_world() -> World:
    """The world of the calling thread.

    Returns:
        The world that ``use_world`` set in this context (``simulate`` does), else that
        of the process.

    Raises:
        RuntimeError: torchrun started the process; see ``refuse_torchrun``.
    """
    world = _world.get()
    return world if world is not None else _process.get()


@contextmanager
def use_world(world: World) -> Iterator[World]:
    """Make ``world`` the current one in this context, until the block ends."""
    token = _world.set(world)
    try:
        yield world
    finally:
        _world.reset(token)


def get_rank() -> int:
    """Number of this rank in its world.

    Example:
        >>> from dtensor.collectives.simulate import simulate
        >>> simulate(get_rank, ranks=3)
        [0, 1, 2]
    """
    return current_world().rank


def get_world_size() -> int:
    """Number of ranks in this rank's world.

    Example:
        >>> from dtensor.collectives.simulate import simulate
        >>> simulate(get_world_size, ranks=2)
        [2, 2]
    """
    return current_world().size
