"""The NCCL backend without a GPU: CuPy's own binding over a double of the library.

The programs run on host memory under mpiexec; see ``nccl_double``. Each fault test
breaks one thing on purpose, and requires that the checks then fail, by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from mpi_jobs import run_job
from nccl_double import host_streams

CHECKS = {
    2: (
        "backend",
        "values",
        "dtypes",
        "same_bits",
        "gradients",
        "large",
        "short",
        "reductions",
        "training",
        "overlap",
        "pairs",
    ),
    4: (
        "backend",
        "values",
        "dtypes",
        "same_bits",
        "gradients",
        "meshes",
        "large",
        "short",
        "reductions",
        "training",
        "overlap",
        "pairs",
    ),
}
PAIRS = {2: 25, 4: 650}

Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def double() -> str:
    """Path of the built double; skips where it cannot be built or used."""
    lacks = host_streams.why_not()
    if lacks is not None:
        pytest.skip(lacks)
    return str(host_streams.library())


@cache
def job(ranks: int, double: str, log: str) -> Done:
    """All checks for so many ranks, in one job: starting one takes seconds."""
    args = [double, *CHECKS[ranks]]
    env = {"NCCL_DOUBLE_LOG": log}
    return run_job("nccl_over_double.py", ranks, args, timeout=300, env=env)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of the files in which the ranks of the jobs note what they post."""
    return str(tmp_path_factory.mktemp("nccl") / "posts")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "check"), [(n, check) for n, checks in CHECKS.items() for check in checks]
)
def test_check(ranks: int, check: str, double: str, log: str) -> None:
    done = job(ranks, double, f"{log}.{ranks}")
    assert f"ok {check}" in done.stdout.splitlines(), done.stdout + done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", CHECKS)
def test_the_job_ends_by_itself(ranks: int, double: str, log: str) -> None:
    done = job(ranks, double, f"{log}.{ranks}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"pairs {PAIRS[ranks]}" in done.stdout.splitlines()


def test_the_double_is_the_library_that_cupy_loads(double: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from nccl_double import host_streams; host_streams.load({double!r})\n"
        "from cupy.cuda import nccl\n"
        "print(nccl.available, nccl.get_version())"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ),
    )
    assert done.stdout.split() == ["True", "22803"], done.stderr
