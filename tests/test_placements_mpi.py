"""Placements over MPI: the checks of tests/programs/placements_over_mpi.py."""

from __future__ import annotations

from typing import Any


def test_placements(mpi_run: Any) -> None:
    done = mpi_run("placements_over_mpi.py", 4)
    checks = ["pairs", "gradients", "meshes", "prices"]
    assert done.stdout.splitlines() == [f"ok {c}" for c in checks], (
        done.stdout + done.stderr
    )
    assert done.returncode == 0
