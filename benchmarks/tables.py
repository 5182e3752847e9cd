"""Measures as tables: for a terminal, for Markdown, or plain."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dtensor.benchmarks.harness import OURS, Bar, Measure
from dtensor.benchmarks.results import SuiteResult

WORDS = {True: "reached", False: "NOT reached", None: "not measured"}
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def show_value(value: float, unit: str) -> str:
    """A value with a unit that suits it.

    Example:
        >>> show_value(0.00123, "s"), show_value(4096, "B"), show_value(0.5, "x")
        ('1.23 ms', '4 KiB', '0.50')
    """
    if unit == "x":
        return f"{value:.2f}"
    steps = {"s": _TIMES, "B": _BYTES}.get(unit)
    if steps is None:
        return f"{value:.4g} {unit}"
    size, name = next((s for s in steps if abs(value) >= s[0]), steps[-1])
    return (
        f"{value / size:.3g} {name}"
        if value < 1000 * size
        else f"{value / size:.0f} {name}"
    )


def show_bar(bar: Bar, unit: str = "s") -> str:
    """What must be reached, in words.

    Example:
        >>> show_bar(Bar("gloo", 0.5)), show_bar(Bar("raw", 1, 5e-6))
        ('<= 0.5 gloo', '<= 1 raw + 5 us')
    """
    parts = [f"{bar.ratio:g} {bar.peer}"] if bar.peer else []
    if bar.plus or not parts:
        parts.append(show_value(bar.plus, unit))
    text = "<= " + " + ".join(parts)
    return text + " (95 % bound)" if bar.upper else text


@dataclass(frozen=True, slots=True)
class Table:
    """Text in rows.

    Attributes:
        title: Above the table.
        head: Names of the columns.
        rows: As many cells each.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def verdicts(measure: Measure) -> list[tuple[Bar, bool | None]]:
    """Each bar, and whether it is reached."""
    return [(bar, measure.reached(bar)) for bar in measure.bars]


def row_of(measure: Measure, peers: Sequence[str], extras: Sequence[str]) -> list[str]:
    """A measure's cells: label, ours, each peer with the ratio, extras, bars."""
    unit, own = measure.unit, measure.spread()
    quartiles = (
        f"{100 * (own.third - own.first) / own.median:.0f} %" if own.median else ""
    )
    cells = [measure.label, show_value(own.median, unit), quartiles]
    for peer in peers:
        if peer not in measure.samples:
            cells += ["", ""]
            continue
        ratio = measure.ratio(peer)
        cells.append(show_value(measure.spread(peer).median, unit))
        cells.append(f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})")
    for name in extras:
        value = measure.extras.get(name, "")
        cells.append(value if isinstance(value, str) else f"{value:g}")
    told = [f"{show_bar(b, unit)}: {WORDS[ok]}" for b, ok in verdicts(measure)]
    return [*cells, "; ".join(told)]


def tables_of(suite: SuiteResult) -> list[Table]:
    """One table per group of a suite's measures."""
    out = []
    for group in dict.fromkeys(m.group for m in suite.measures):
        rows = [m for m in suite.measures if m.group == group]
        peers = list(dict.fromkeys(p for m in rows for p in m.peers))
        extras = list(dict.fromkeys(e for m in rows for e in m.extras))
        head = ["", OURS, "spread"]
        for peer in peers:
            head += [peer, "ours / it"]
        head += [*extras, "bar"]
        cells = [row_of(m, peers, extras) for m in rows]
        used = [i for i in range(len(head)) if i < 2 or any(row[i] for row in cells)]
        out.append(
            Table(
                f"{suite.name}: {group}" if group else suite.name,
                tuple(head[i] for i in used),
                tuple(tuple(row[i] for i in used) for row in cells),
            )
        )
    return out


def count_bars(suite: SuiteResult) -> tuple[int, int]:
    """(reached, all) of a suite's bars."""
    found = [ok for m in suite.measures for _, ok in verdicts(m)]
    return found.count(True), len(found)


def as_text(table: Table) -> str:
    """Plain columns."""
    widths = [max(map(len, column)) for column in zip(table.head, *table.rows)]
    lines = [table.title]
    for row in (table.head, *table.rows):
        first, *rest = (
            cell.ljust(w) if i in (0, len(row) - 1) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines) + "\n"


def as_markdown(table: Table) -> str:
    """A table for a page, without its title."""
    inner = len(table.head) - 1
    rule = ["---", *["---:"] * (inner - 1), "---"] if inner else ["---"]
    rows = (table.head, rule, *table.rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def print_table(table: Table) -> None:
    """Print to the terminal: with rich where it is installed, else plainly."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        print(as_text(table), flush=True)
        return
    from rich.console import Console
    from rich.table import Table as RichTable

    shown = RichTable(title=table.title, title_justify="left")
    for i, name in enumerate(table.head):
        ends = i in (0, len(table.head) - 1)
        shown.add_column(name, justify="left" if ends else "right")
    for row in table.rows:
        missed = WORDS[False] in row[-1]
        shown.add_row(*row, style="red" if missed else None)
    Console().print(shown)
