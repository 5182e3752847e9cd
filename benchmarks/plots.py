"""Plots of a run, one SVG per suite; needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from dtensor.benchmarks.harness import OURS, Measure
from dtensor.benchmarks.results import Result, SuiteResult

_COLUMNS = 2
_UNITS = {"s": "seconds", "B": "bytes", "x": "ratio"}


def has_matplotlib() -> bool:
    """Whether plots can be made."""
    return importlib.util.find_spec("matplotlib") is not None


def _draw_curves(axes: Any, rows: list[Measure]) -> None:
    """Each candidate over x, both logarithmic, with its quartiles."""
    for name in dict.fromkeys(n for m in rows for n in m.samples):
        found = sorted((m for m in rows if name in m.samples), key=lambda m: m.x or 0)
        x = [m.x for m in found]
        spreads = [m.spread(name) for m in found]
        width = 2.0 if name == OURS else 1.0
        axes.plot(x, [s.median for s in spreads], ".-", label=name, linewidth=width)
        low, high = [s.first for s in spreads], [s.third for s in spreads]
        axes.fill_between(x, low, high, alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylabel(_UNITS.get(rows[0].unit, rows[0].unit))


def _draw_ratios(axes: Any, rows: list[Measure]) -> None:
    """A point per measure and peer: ours by theirs, with the bounds of the median."""
    labels = [m.label for m in rows]
    for peer in dict.fromkeys(p for m in rows for p in m.peers):
        found = [(i, m.ratio(peer)) for i, m in enumerate(rows) if peer in m.samples]
        middle = [r.median for _, r in found]
        low = [max(0.0, r.median - r.low) for _, r in found]
        high = [max(0.0, r.high - r.median) for _, r in found]
        places = [i for i, _ in found]
        axes.errorbar(middle, places, xerr=[low, high], fmt="o", ms=3, label=peer)
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(labels)), labels, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("ours / peer")


def plot_suite(suite: SuiteResult, path: Path) -> None:
    """Write a suite's plots, one panel per group.

    Args:
        suite: Has at least one measure.
        path: Of the SVG; its folder is made.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(m.group for m in suite.measures))
    deep = max(sum(m.group == g for m in suite.measures) for g in groups)
    lines = -(-len(groups) // _COLUMNS)
    with rc_context({"svg.hashsalt": suite.name, "font.size": 8}):
        height = lines * max(2.4, min(0.14 * deep, 12.0))
        figure = Figure(figsize=(10, height), layout="constrained")
        panels = figure.subplots(lines, min(_COLUMNS, len(groups)), squeeze=False)
        for i, axes in enumerate(panels.flat):
            if i >= len(groups):
                axes.set_axis_off()
                continue
            rows = [m for m in suite.measures if m.group == groups[i]]
            if len(rows) > 1 and all(m.x is not None for m in rows):
                _draw_curves(axes, [m for m in rows if m.unit == rows[0].unit])
            else:
                _draw_ratios(axes, rows)
            axes.set_title(groups[i] or suite.name)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=6)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


def plot(result: Result, folder: Path) -> dict[str, Path]:
    """Write the plots of all suites.

    Returns:
        Path of each suite's SVG, by the suite's name.

    Raises:
        ValueError: matplotlib is not installed.
    """
    if not has_matplotlib():
        raise ValueError(
            "plot: no matplotlib, got --plot or --report, expected it installed. "
            "Install it with `pip install 'dtensor-runtime[bench]'`."
        )
    out = {}
    for name, suite in result.suites.items():
        if suite.measures:
            out[name] = folder / f"{name}.svg"
            plot_suite(suite, out[name])
    return out
