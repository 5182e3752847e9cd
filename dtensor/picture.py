"""Who holds what, drawn: text in a terminal, a table or an image in a notebook."""

from __future__ import annotations

import dataclasses
import html
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtensor.custom_placement import CustomPlacement
from dtensor.placement import show
from dtensor.spec import Spec, block_of
from dtensor.tensor import DTensor

COLORS = (
    (158, 202, 225),
    (253, 208, 162),
    (161, 217, 155),
    (218, 218, 235),
    (252, 187, 161),
    (199, 233, 192),
    (188, 189, 220),
    (253, 224, 221),
)


Spans = tuple[tuple[int, int], ...]
MOST = 16  # slices that are drawn


@dataclass(frozen=True, slots=True)
class Panel:
    """One slice: a grid of blocks with the ranks that hold them.

    Attributes:
        label: Which slice, where there are several.
        down: Stretches of the dim that is drawn downwards; one of (0, 0) for none.
        across: Likewise across.
        cells: For each row, the ranks that hold each block.
    """

    label: str
    down: Spans
    across: Spans
    cells: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def rows(self) -> tuple[str, ...]:
        """Labels of the rows."""
        return tuple(_span(s) for s in self.down)

    @property
    def columns(self) -> tuple[str, ...]:
        """Labels of the columns."""
        return tuple(_span(s) for s in self.across)

    def lines(self, color: bool) -> list[str]:
        """The grid as lines of text."""
        names = [[_names(c) for c in row] for row in self.cells]
        first = max([len(r) for r in self.rows] + [0])
        widths = [
            max([len(column), *(len(row[i]) for row in names)])
            for i, column in enumerate(self.columns)
        ]
        lines = [self.label] if self.label else []
        if any(self.columns):
            heads = [c.center(w) for c, w in zip(self.columns, widths, strict=True)]
            lines.append(" " * first + "  " + "  ".join(heads).rstrip())
        for label, row, held in zip(self.rows, names, self.cells, strict=True):
            cells = [
                _painted(f" {text.center(w)} ", ranks if color else ())
                for text, w, ranks in zip(row, widths, held, strict=True)
            ]
            lines.append(f"{label.rjust(first)} {''.join(cells)}".rstrip())
        return lines

    def table(self) -> str:
        """The grid as an HTML table."""
        head = "".join(f"<th>{html.escape(c)}</th>" for c in self.columns)
        body = ""
        for label, row in zip(self.rows, self.cells, strict=True):
            body += f"<tr><th>{html.escape(label)}</th>"
            for ranks in row:
                body += (
                    f'<td style="background:{_rgb((ranks or (0,))[0])};color:black">'
                    f"{html.escape(_names(ranks))}</td>"
                )
            body += "</tr>"
        return (
            f"<table><caption>{html.escape(self.label)}</caption>"
            f"<thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    def drawn(self, top: float, width: float) -> tuple[str, float]:
        """SVG elements from a height on, and the height where they end.

        Blocks are as long as their stretches, as far as their labels let them; a block
        that several ranks hold has a stripe in the color of each.
        """
        texts = [[_names(c) for c in row] for row in self.cells]
        longest = [
            max([len(c), *(len(row[i]) for row in texts)])
            for i, c in enumerate(self.columns)
        ]
        wide = _lengths(self.across, width - LEFT, [7.0 * n + 12 for n in longest])
        high = _lengths(self.down, 160.0, [22.0] * len(self.down))
        found = []
        if self.label:
            found.append(_text(LEFT, top + 12, self.label, "start"))
            top += 20
        if any(self.columns):
            x = LEFT
            for label, w in zip(self.columns, wide, strict=True):
                found.append(_text(x + w / 2, top + 12, label))
                x += w
            top += 20
        y = top
        for label, h, row, named in zip(
            self.rows, high, self.cells, texts, strict=True
        ):
            found.append(_text(LEFT - 6, y + h / 2 + 4, label, "end"))
            x = LEFT
            for w, ranks, text in zip(wide, row, named, strict=True):
                stripes = ranks[:8] or (-1,)
                for i, rank in enumerate(stripes):
                    part = w / len(stripes)
                    fill = _rgb(rank) if rank >= 0 else "none"
                    found.append(_rect(x + i * part, y, part, h, fill, "none"))
                found.append(_rect(x, y, w, h, "none", "black"))
                found.append(_text(x + w / 2, y + h / 2 + 4, text))
                x += w
            y += h
        return "".join(found), y + 10


LEFT = 70.0  # what the labels of rows take


@dataclass(frozen=True, slots=True)
class Picture:
    """Who holds what: one grid, or one for each slice.

    Attributes:
        title: What is drawn.
        panels: The slices.
        more: How many slices are not drawn.
        color: Whether the text has colors.
    """

    title: str
    panels: tuple[Panel, ...]
    more: int
    color: bool

    def __str__(self) -> str:
        """The grids as text."""
        lines = [self.title]
        for panel in self.panels:
            lines += panel.lines(self.color)
        return "\n".join(lines + self._rest())

    __repr__ = __str__

    def _rest(self) -> list[str]:
        return [f"and {self.more} more; see dims= and at="] if self.more else []

    def _repr_html_(self) -> str:
        """The grids as HTML tables."""
        body = "".join(panel.table() for panel in self.panels)
        rest = "".join(f"<p>{html.escape(line)}</p>" for line in self._rest())
        return f"<div><p>{html.escape(self.title)}</p>{body}{rest}</div>"

    def svg(self, width: int = 480) -> str:
        """The grids as an SVG image; write it to a file, or let a notebook show it.

        Args:
            width: Width in pixels; the height follows.
        """
        found, y = [_text(LEFT, 16, self.title, "start")], 28.0
        for panel in self.panels:
            elements, y = panel.drawn(y, float(width))
            found.append(elements)
        for line in self._rest():
            found.append(_text(LEFT, y + 12, line, "start"))
            y += 20
        wide = max(float(width), LEFT + 7.5 * len(self.title))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:g}" '
            f'height="{y:g}" font-family="monospace" font-size="12">'
            f"<title>{html.escape(self.title)}</title>{''.join(found)}</svg>"
        )

    def _repr_svg_(self) -> str:
        """The image, for notebooks that prefer one."""
        return self.svg()


def _span(span: tuple[int, int]) -> str:
    return "" if span == NONE else f"{span[0]}:{span[1]}"


NONE = (0, 0)  # the stretch of a dim that is not there


def _painted(text: str, ranks: tuple[int, ...]) -> str:
    if not ranks:
        return text
    red, green, blue = COLORS[ranks[0] % len(COLORS)]
    return f"\x1b[30;48;2;{red};{green};{blue}m{text}\x1b[0m"


def _rgb(rank: int) -> str:
    red, green, blue = COLORS[rank % len(COLORS)]
    return f"rgb({red},{green},{blue})"


def _lengths(spans: Spans, room: float, least: Sequence[float]) -> list[float]:
    """Lengths in an image: as the stretches are, but no shorter than a label."""
    total = sum(b - a for a, b in spans)
    shares = [room * (b - a) / total if total else room for a, b in spans]
    return [max(a, b) for a, b in zip(shares, least, strict=True)]


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(text)}</text>'
    )


def _rect(x: float, y: float, w: float, h: float, fill: str, line: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" '
        f'stroke="{line}"/>'
    )


def _names(ranks: tuple[int, ...]) -> str:
    """Ranks as short text: runs of three or more as ``a-b``."""
    out: list[str] = []
    i = 0
    while i < len(ranks):
        j = i
        while j + 1 < len(ranks) and ranks[j + 1] == ranks[j] + 1:
            j += 1
        out.append(f"{ranks[i]}-{ranks[j]}" if j > i + 1 else str(ranks[i]))
        i = j + 1 if j > i + 1 else i + 1
    return ",".join(out)


def visualize_sharding(
    x: DTensor,
    dims: Sequence[int] | None = None,
    at: Sequence[int] | None = None,
    *,
    color: bool | None = None,
) -> Picture:
    """Draw which ranks hold which block of a DTensor; nothing is communicated.

    Print the result; notebooks show it as a table or an image, ``svg()`` gives the image.

    Args:
        x: The tensor.
        dims: One or two dims to draw, down and across; by default the first two.
        at: An index for each of the other dims, in order. By default every slice that
            lies otherwise than the one before is drawn.
        color: Whether the text is colored; by default where the output is a terminal.

    Raises:
        ValueError: Dims or indices that are not there.

    Example:
        >>> from dtensor import Shard, distribute_tensor, init_device_mesh, simulate
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2, 2))
        ...     x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0), Shard(1)])
        ...     return str(visualize_sharding(x))
        >>> print(simulate(program, ranks=4)[0])
        (4, 6) placed (S(0), S(1)) on DeviceMesh('cpu', (2, 2))
             0:3  3:6
        0:2   0    1
        2:4   2    3
    """
    spec = x._spec
    n = spec.ndim
    shown = list(range(min(2, n))) if dims is None else [d % max(1, n) for d in dims]
    rest = [d for d in range(n) if d not in shown]
    fits = len(set(shown)) == len(shown) <= 2 and (at is None or len(at) == len(rest))
    if fits and at is not None:
        fits = all(0 <= i < max(1, spec.shape[d]) for d, i in zip(rest, at))
    if not fits:
        raise ValueError(
            f"visualize_sharding: dims or indices do not fit, got dims={dims} and "
            f"at={at} for shape {tuple(spec.shape)}. Give one or two dims, and an "
            "index for each of the others."
        )
    held = {
        rank: [_indices(spec, rank, d) for d in range(n)] for rank in spec.mesh.ranks
    }
    title = f"{tuple(spec.shape)} placed {show(spec.placements)} on {spec.mesh!r}"
    if at is not None:
        slices = [tuple((i, i + 1) for i in at)]
        if rest:
            picked = zip(rest, at, strict=True)
            title += "".join(f", dim {d} at {i}" for d, i in picked)
    else:
        every = [
            _spans(spec.shape[d], [h[d] for h in held.values()]) or [NONE] for d in rest
        ]
        slices = list(itertools.product(*every))
    panels = []
    for where in slices[:MOST]:
        label = ", ".join(
            f"dim {d} at {_span(s)}" for d, s in zip(rest, where, strict=True)
        )
        first = [a for a, _ in where]
        panels.append(_panel(spec, held, shown, dict(zip(rest, first)), label))
    if at is not None:  # the title says it
        panels = [dataclasses.replace(p, label="") for p in panels]
    return Picture(
        title,
        tuple(panels),
        max(0, len(slices) - MOST),
        sys.stdout.isatty() if color is None else color,
    )


def _panel(
    spec: Spec,
    held: dict[int, list[set[int]]],
    shown: Sequence[int],
    where: dict[int, int],
    label: str,
) -> Panel:
    """One slice: ``where`` gives the index of each dim that is not shown."""
    members = [
        rank
        for rank in spec.mesh.ranks
        if all(i in held[rank][d] for d, i in where.items())
    ]
    spans = [_spans(spec.shape[d], [held[r][d] for r in members]) for d in shown]
    down = spans[0] if shown else [NONE]
    across = spans[1] if len(shown) > 1 else [NONE]
    cells = []
    for low, _ in down:
        row = []
        for left, _ in across:
            ranks = members
            if shown:
                ranks = [r for r in ranks if low in held[r][shown[0]]]
            if len(shown) > 1:
                ranks = [r for r in ranks if left in held[r][shown[1]]]
            row.append(tuple(sorted(ranks)))
        cells.append(tuple(row))
    return Panel(label, tuple(down), tuple(across), tuple(cells))


def _indices(spec: Spec, rank: int, dim: int) -> set[int]:
    """The indices of a dim that a rank holds."""
    at = spec.mesh.coordinate_of(rank)
    assert at is not None, "members have coordinates"
    start, size = block_of(spec.shape[dim], dim, spec.placements, spec.mesh.shape, at)
    found = torch.arange(start, start + size)
    for axis, p in enumerate(spec.placements):
        if isinstance(p, CustomPlacement) and p.along == dim:
            found = p.at_dim(0).split(found, spec.mesh.shape[axis], at[axis])
    return set(found.tolist())


def _spans(length: int, held: Sequence[set[int]]) -> list[tuple[int, int]]:
    """Stretches of a dim that lie on the same ranks."""
    spans: list[tuple[int, int]] = []
    before: list[bool] | None = None
    for i in range(length):
        now = [i in h for h in held]
        if now == before:
            spans[-1] = (spans[-1][0], i + 1)
        else:
            spans.append((i, i + 1))
        before = now
    return spans
