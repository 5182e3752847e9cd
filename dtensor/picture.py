"""Who holds what, drawn: text in a terminal, a table in a notebook."""

from __future__ import annotations

import html
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


@dataclass(frozen=True, slots=True)
class Picture:
    """A grid of blocks with the ranks that hold them.

    Attributes:
        title: What is drawn.
        rows: Labels of the rows of blocks.
        columns: Labels of the columns.
        cells: For each row, the ranks that hold each block.
        color: Whether the text has colors.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[tuple[int, ...], ...], ...]
    color: bool

    def __str__(self) -> str:
        """The grid as text."""
        names = [[_names(c) for c in row] for row in self.cells]
        first = max([len(r) for r in self.rows] + [0])
        widths = [
            max([len(column), *(len(row[i]) for row in names)])
            for i, column in enumerate(self.columns)
        ]
        lines = [self.title]
        if any(self.columns):
            heads = [c.center(w) for c, w in zip(self.columns, widths, strict=True)]
            lines.append(" " * first + "  " + "  ".join(heads).rstrip())
        for label, row, held in zip(self.rows, names, self.cells, strict=True):
            cells = [
                self._painted(f" {text.center(w)} ", ranks)
                for text, w, ranks in zip(row, widths, held, strict=True)
            ]
            lines.append(f"{label.rjust(first)} {''.join(cells)}".rstrip())
        return "\n".join(lines)

    __repr__ = __str__

    def _painted(self, text: str, ranks: tuple[int, ...]) -> str:
        if not self.color or not ranks:
            return text
        red, green, blue = COLORS[ranks[0] % len(COLORS)]
        return f"\x1b[30;48;2;{red};{green};{blue}m{text}\x1b[0m"

    def _repr_html_(self) -> str:
        """The grid as an HTML table."""
        head = "".join(f"<th>{html.escape(c)}</th>" for c in self.columns)
        body = ""
        for label, row in zip(self.rows, self.cells, strict=True):
            body += f"<tr><th>{html.escape(label)}</th>"
            for ranks in row:
                red, green, blue = COLORS[(ranks or (0,))[0] % len(COLORS)]
                body += (
                    f'<td style="background:rgb({red},{green},{blue});color:black">'
                    f"{html.escape(_names(ranks))}</td>"
                )
            body += "</tr>"
        return (
            f"<table><caption>{html.escape(self.title)}</caption>"
            f"<thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"
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

    Print the result; notebooks show it as a table.

    Args:
        x: The tensor.
        dims: One or two dims to draw, down and across; by default the first two.
        at: An index for each of the other dims, in order; zeros by default.
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
    where = [0] * len(rest) if at is None else list(at)
    fits = len(set(shown)) == len(shown) <= 2 and len(where) == len(rest)
    if not fits or any(not 0 <= i < spec.shape[d] for d, i in zip(rest, where)):
        if 0 not in spec.shape:
            raise ValueError(
                f"visualize_sharding: dims or indices do not fit, got dims={dims} and "
                f"at={at} for shape {tuple(spec.shape)}. Give one or two dims, and an "
                "index for each of the others."
            )
    held = {
        rank: [_indices(spec, rank, d) for d in range(n)] for rank in spec.mesh.ranks
    }
    members = [
        rank
        for rank in spec.mesh.ranks
        if all(i in held[rank][d] for d, i in zip(rest, where, strict=True))
    ]
    spans = [_spans(spec.shape[d], [held[r][d] for r in members]) for d in shown]
    down = spans[0] if shown else [(0, 1)]
    across = spans[1] if len(shown) > 1 else [(0, 1)]
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
    title = f"{tuple(spec.shape)} placed {show(spec.placements)} on {spec.mesh!r}"
    if rest:
        picked = ", ".join(f"dim {d} at {i}" for d, i in zip(rest, where, strict=True))
        title += f", {picked}"
    return Picture(
        title,
        tuple(f"{a}:{b}" if shown else "" for a, b in down),
        tuple(f"{a}:{b}" if len(shown) > 1 else "" for a, b in across),
        tuple(cells),
        sys.stdout.isatty() if color is None else color,
    )


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
