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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many pairs of placements were checked, whichever worker did it."""
    found: dict[str, list[int]] = {}
    for report in terminalreporter.stats.get("passed", ()):
        for name, counts in getattr(report, "user_properties", ()):
            if name == "pairs":
                where, *numbers = counts
                total = found.setdefault(where, [0] * len(numbers))
                found[where] = [a + b for a, b in zip(total, numbers, strict=True)]
    if not found:
        return
    terminalreporter.section("pairs of placements")
    for where, (count, linear) in sorted(found.items()):
        more = f", {linear} of them with an adjoint" if linear else ""
        terminalreporter.line(f"{count} pairs on {where}{more}")
    total = sum(count for count, _ in found.values())
    terminalreporter.line(f"{total} pairs in all")
