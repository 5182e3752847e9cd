"""The communicators over MPI: programs of tests/programs, run under mpiexec."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

HERE = Path(__file__).parent
LIMIT = 120  # seconds
CHECKS = {
    2: (
        "lazy",
        "on_start",
        "values",
        "large",
        "dtypes",
        "rounding",
        "same_bits",
        "gradients",
        "counts",
        "errors",
        "activity",
        "peers",
        "results_are_new",
        "forbidden",
        "notices",
    ),
    4: (
        "meshes",
        "values",
        "large",
        "dtypes",
        "same_bits",
        "gradients",
        "peers",
        "forbidden",
        "notices",
    ),
}


def mpiexec() -> str:
    """The launcher of this environment, else the one in PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.skip("no mpiexec beside this Python or in PATH: pip install mpich")
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install mpi4py")
    return found


@cache
def job(ranks: int) -> subprocess.CompletedProcess[str]:
    """Run all checks for so many ranks, in one job: starting one takes seconds."""
    path = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in path if p),
    }
    program = str(HERE / "programs" / "collectives_over_mpi.py")
    return subprocess.run(
        [mpiexec(), "-n", str(ranks), sys.executable, program, *CHECKS[ranks]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.mark.parametrize(
    ("ranks", "check"), [(n, check) for n, checks in CHECKS.items() for check in checks]
)
def test_check(ranks: int, check: str) -> None:
    done = job(ranks)
    assert f"ok {check}" in done.stdout.splitlines(), done.stdout + done.stderr


@pytest.mark.parametrize("ranks", CHECKS)
def test_the_job_ends_by_itself(ranks: int) -> None:
    done = job(ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"ok {check}" for check in CHECKS[ranks]]
