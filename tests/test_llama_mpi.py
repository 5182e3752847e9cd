"""The tutorial's model over MPI: the checks of tests/programs/tutorial_over_mpi.py."""

from __future__ import annotations

from typing import Any

import pytest

CHECKS = ("trained", "filled")


@pytest.mark.parametrize("ranks", [2, 4])
def test_tutorial(ranks: int, mpi_run: Any) -> None:
    done = mpi_run("tutorial_over_mpi.py", ranks, CHECKS)
    assert done.stdout.splitlines() == [f"ok {c}" for c in CHECKS], (
        done.stdout + done.stderr
    )
    assert done.returncode == 0
