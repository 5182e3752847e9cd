"""Results on disk: every sample of every measure, and where they were taken."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtensor.benchmarks.harness import Bar, Measure

FORMAT = 1


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """What one suite gave.

    Attributes:
        name: Of the suite.
        measures: In the order of the table.
        ranks: How many measured.
        seconds: The whole took.
        load: Load average (1 minute) before and after.
    """

    name: str
    measures: tuple[Measure, ...]
    ranks: int = 1
    seconds: float = 0.0
    load: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Result:
    """A run of the benchmarks.

    Attributes:
        environment: Versions and machine, as ``environment.describe`` gives them.
        suites: By name.
        failures: By name of a suite that gave nothing: why.
    """

    environment: Mapping[str, str]
    suites: Mapping[str, SuiteResult]
    failures: Mapping[str, str] = field(default_factory=dict)


def pack_measure(m: Measure) -> dict[str, Any]:
    """As JSON knows it."""
    return {
        "label": m.label,
        "group": m.group,
        "unit": m.unit,
        "x": m.x,
        "samples": {name: list(values) for name, values in m.samples.items()},
        "bars": [
            {"peer": b.peer, "ratio": b.ratio, "plus": b.plus, "upper": b.upper}
            for b in m.bars
        ],
        "extras": dict(m.extras),
    }


def unpack_measure(data: Mapping[str, Any]) -> Measure:
    """The inverse of ``pack_measure``."""
    rest = {k: v for k, v in data.items() if k != "bars"}
    return Measure(bars=tuple(Bar(**bar) for bar in data["bars"]), **rest)


def pack_suite(suite: SuiteResult) -> dict[str, Any]:
    """As JSON knows it."""
    return {
        "ranks": suite.ranks,
        "seconds": suite.seconds,
        "load": list(suite.load),
        "measures": [pack_measure(m) for m in suite.measures],
    }


def unpack_suite(name: str, data: Mapping[str, Any]) -> SuiteResult:
    """The inverse of ``pack_suite``."""
    measures: Sequence[Any] = data["measures"]
    before, after = data["load"]
    return SuiteResult(
        name,
        tuple(map(unpack_measure, measures)),
        data["ranks"],
        data["seconds"],
        (before, after),
    )


def save(result: Result, path: Path) -> None:
    """Write a run to a file; its folder is made."""
    data = {
        "format": FORMAT,
        "environment": dict(result.environment),
        "suites": {name: pack_suite(s) for name, s in result.suites.items()},
        "failures": dict(result.failures),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def load(path: Path) -> Result:
    """Read a run that ``save`` wrote.

    Raises:
        ValueError: It is of another format.
    """
    data = json.loads(path.read_text())
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        raise ValueError(
            f"load: {path} is no result of these benchmarks, got format {found!r}, "
            f"expected {FORMAT}. Write it with `python -m benchmarks --json {path}`."
        )
    suites = {name: unpack_suite(name, d) for name, d in data["suites"].items()}
    return Result(data["environment"], suites, data["failures"])
