"""The suites by name. A suite is loaded when it is run."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from dtensor.benchmarks.harness import Measure, Options

Run = Callable[[Options], list[Measure]]


@dataclass(frozen=True, slots=True)
class Suite:
    """One suite: the function ``run`` of ``benchmarks/suites/NAME.py``.

    Attributes:
        name: Of the suite and its module.
        about: What it compares, in one line.
        ranks: Ranks that it needs; None: as many as the command line says. A suite
            of one rank is started without MPI.
        timeout: Seconds after which its job is ended.
    """

    name: str
    about: str
    ranks: int | None = None
    timeout: float = 1800.0

    @property
    def module(self) -> str:
        """Where it is."""
        return f"dtensor.benchmarks.suites.{self.name}"

    def exists(self) -> bool:
        """Whether its module is there."""
        return importlib.util.find_spec(self.module) is not None

    def load(self) -> Run:
        """Its function."""
        run: Run = importlib.import_module(self.module).run
        return run


SUITES = {
    suite.name: suite
    for suite in (
        Suite("dispatch", "what an op costs, against plain torch and DTensor", 1),
        Suite("collectives", "each verb, against raw mpi4py and torch's gloo or NCCL"),
        Suite("redistribute", "every pair of placements, against PyTorch's DTensor"),
        Suite("train", "transformer steps, against hand-written code and PyTorch"),
        Suite("scale", "dry worlds of up to 65,536 ranks: meshes and plans", 1),
        Suite("memory", "peak memory of a rank, against what theory says"),
        Suite("startup", "import and init", 1),
    )
}


def available() -> list[Suite]:
    """The suites that are there."""
    return [suite for suite in SUITES.values() if suite.exists()]


def choose(names: list[str]) -> list[Suite]:
    """Suites by name; all that there are, for no names.

    Raises:
        ValueError: There is no such suite.
    """
    if not names:
        return available()
    for name in names:
        if name not in SUITES or not SUITES[name].exists():
            raise ValueError(
                f"choose: there is no such suite, got {name!r}, expected one of "
                f"{', '.join(s.name for s in available())}. "
                f"Run `python -m benchmarks --list`."
            )
    return [SUITES[name] for name in dict.fromkeys(names)]
