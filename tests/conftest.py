"""What the tests share: the helpers beside them, one thread, and jobs under MPI."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


@pytest.fixture
def mpi_run() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``mpi_run(script, ranks, args, timeout)``: see ``mpi_jobs.run_job``."""
    from mpi_jobs import run_job

    return run_job
