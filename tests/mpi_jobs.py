"""Starting programs on several ranks, for the tests that need real MPI."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from dtensor.launch import LaunchError, find_mpiexec

TESTS = Path(__file__).parent
PROGRAMS = TESTS / "programs"

Done = subprocess.CompletedProcess[str]
MpiRun = Callable[..., Done]


def job_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a job: one thread a rank, and waiting ranks give way."""
    environ = dict(os.environ)
    environ.setdefault("OMP_NUM_THREADS", "1")
    environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
    # The tests run the tree that they lie in, installed or not.
    path = [str(TESTS.parent), environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return environ | dict(extra or {})


def launch_command(launcher: str, ranks: int) -> list[str]:
    """The beginning of a command that starts a Python program on ``ranks`` ranks.

    Args:
        launcher: ``"mpiexec"`` or ``"dtensor-run"``.
        ranks: Number of ranks.
    """
    try:
        mpiexec = find_mpiexec()
    except LaunchError as error:
        pytest.skip(f"no MPI launcher: {error}")
    if launcher == "mpiexec":
        return [mpiexec, "-n", str(ranks), sys.executable]
    return [sys.executable, "-m", "dtensor.launch", "-n", str(ranks)]


def run_job(
    script: str | Path,
    ranks: int = 2,
    args: Sequence[object] = (),
    timeout: float = 120,
    *,
    launcher: str = "mpiexec",
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Done:
    """Run a program on several ranks, and wait for its end.

    Args:
        script: A file of ``tests/programs``, or a path.
        ranks: Number of ranks.
        args: Arguments of the program.
        timeout: Seconds after which the job is ended, and the test fails with what
            the job printed.
        launcher: ``"mpiexec"`` or ``"dtensor-run"``.
        options: Further options of the launcher.
        env: Further variables.
    """
    command = [*launch_command(launcher, ranks)]
    at = len(command) - (launcher == "mpiexec")  # before the interpreter
    command[at:at] = options
    command += [str(PROGRAMS / script), *map(str, args)]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=job_environment(env),
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # mpiexec takes its ranks along
            out, err = process.communicate()
            pytest.fail(f"{command} ran beyond {timeout} s; it printed\n{out}\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)
