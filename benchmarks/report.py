"""A run as a Markdown page, with its plots beside it."""

from __future__ import annotations

import os
from pathlib import Path

from dtensor.benchmarks import plots, tables
from dtensor.benchmarks.registry import SUITES
from dtensor.benchmarks.results import Result

_INTRO = """\
# Benchmarks

Written by `python -m benchmarks --report {name}`; do not edit.

All candidates of a row are timed in turn within each round, in an order drawn for the
round; the slowest rank counts. Shown are medians; `spread` is the distance of ours'
quartiles by its median; a ratio is the median over the rounds of ours by the peer's,
with its 90 % interval (moving-block bootstrap). Lower is better. What misses its bar
is shown as such.
"""


def render(result: Result, images: dict[str, str]) -> str:
    """The page.

    Args:
        result: A run.
        images: Address of a suite's plot, by the suite's name.
    """
    parts = [_INTRO, "## Where this was measured\n"]
    rows = tuple((k, v) for k, v in result.environment.items())
    parts.append(tables.as_markdown(tables.Table("", ("what", "value"), rows)))
    for name, suite in result.suites.items():
        reached, total = tables.count_bars(suite)
        about = SUITES[name].about if name in SUITES else ""
        before, after = suite.load
        parts.append(f"## {name}: {about}\n" if about else f"## {name}\n")
        told = f"{suite.ranks} rank{'s' * (suite.ranks != 1)}, {suite.seconds:.0f} s"
        told += f", load average {before:.1f} before and {after:.1f} after"
        told += f"; {reached} of {total} bars reached." if total else "."
        parts.append(told + "\n")
        if name in images:
            parts.append(f"![{name}]({images[name]})\n")
        for table in tables.tables_of(suite):
            parts.append(f"### {table.title}\n")
            parts.append(tables.as_markdown(table))
    for name, why in result.failures.items():
        parts.append(f"## {name}: failed\n")
        parts.append(f"```\n{why}\n```\n")
    return "\n".join(parts)


def write(result: Result, path: Path) -> None:
    """Write the page; where there is matplotlib, plots into a folder of its name.

    Args:
        result: A run.
        path: Of the page, such as ``docs/benchmarks.md``; folders are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    images = {}
    if plots.has_matplotlib():
        drawn = plots.plot(result, path.with_suffix(""))
        images = {
            name: Path(os.path.relpath(image, path.parent)).as_posix()
            for name, image in drawn.items()
        }
    text = render(result, images)
    path.write_text(text.replace("{name}", path.as_posix()))
