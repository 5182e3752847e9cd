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
    counts: dict[str, dict[str, list[int]]] = {"pairs": {}, "plans": {}}
    for report in terminalreporter.stats.get("passed", ()):
        for name, (where, *numbers) in getattr(report, "user_properties", ()):
            so_far = counts[name].get(where, [0] * len(numbers))
            counts[name][where] = [a + b for a, b in zip(so_far, numbers, strict=True)]
    for name, found in counts.items():
        if not found:
            continue
        terminalreporter.section(f"{name} of placements")
        for where, (count, *adjoints) in sorted(found.items()):
            more = f", {adjoints[0]} of them by the adjoint" if any(adjoints) else ""
            terminalreporter.line(f"{count} {name} on {where}{more}")
        total = sum(count for count, *_ in found.values())
        terminalreporter.line(f"{total} {name} in all")
