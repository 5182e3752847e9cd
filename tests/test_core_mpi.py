"""DTensors over MPI: the checks of tests/programs/core_over_mpi.py."""

from __future__ import annotations

from typing import Any

import pytest

CHECKS = ("pairs", "training", "disagreement", "subset", "unlike_seeds")


@pytest.mark.parametrize("ranks", [2, 4])
def test_core(ranks: int, mpi_run: Any) -> None:
    done = mpi_run("core_over_mpi.py", ranks, CHECKS)
    assert done.stdout.splitlines() == [f"ok {c}" for c in CHECKS], (
        done.stdout + done.stderr
    )
    assert done.returncode == 0
