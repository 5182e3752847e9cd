"""Index notation: what a rule says, and the layout that follows from it.

A rule names the dims of an op's operands and results by letters, as einsum does.
``"mk,kn->mn"`` says: ``m`` may be sharded (then the result is sharded on it), so may
``n``, and ``k`` is contracted (sharded on both sides, it leaves addends). From one
such line all legal rows of placements follow, per mesh axis; ``solve`` takes the
cheapest. An operand whose every dim is free to move stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from dtensor.costs import costs_of
from dtensor.custom_placement import CustomPlacement
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import (
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    normal,
)

Letters = tuple[Hashable, ...]
R = Replicate()


@dataclass(slots=True)
class Notation:
    """What a rule says about one call.

    Attributes:
        ins: Letters of each tensor operand, one per dim.
        outs: Letters of each tensor result.
        whole: Letters whose dims must not be sharded.
        contracted: Letters that the op sums over.
        linear: Groups of operands in which the op is jointly linear, the other
            operands held fixed: ``[{0}, {1}]`` for a product, ``[{0, 1}]`` for a sum.
        affine: Operands that are added once: where the result is Partial they
            become Partial too.
        shapes: Global shapes of the results; None: found on meta tensors.
        run: Given the specs of operands and results, gives what runs on the local
            shards in place of the function: ``run(ins, outs)(func, args, kwargs)``.
        rewrite: Likewise gives what makes the arguments of the local call:
            ``rewrite(ins, outs)(args, kwargs) -> (args, kwargs)``.
        view: Whether the result shares memory with the first operand.
        many: Whether the op returns a sequence, even of one result.
        copies: Whether elements come out as they went in, so that addends of every
            reduction may stay addends; so of a linear view in any case.
        sends: Elements that ``run`` itself sends per rank, from the specs of operands
            and results; None: it sends none.
        reads: Of a view: gives, from the arguments, the index of the first operand that
            each result has; None: it is not known.
    """

    ins: Sequence[Letters]
    outs: Sequence[Letters]
    whole: Set[Hashable] = field(default_factory=set)
    contracted: Set[Hashable] = field(default_factory=set)
    linear: list[set[int]] = field(default_factory=list)
    affine: set[int] = field(default_factory=set)
    shapes: Sequence[Sequence[int]] | None = None
    run: Callable[..., Any] | None = None
    rewrite: Callable[..., Any] | None = None
    view: bool = False
    many: bool = False
    copies: bool = False
    sends: Callable[..., float] | None = None
    reads: Callable[..., Sequence[Any]] | None = None

    @property
    def moves(self) -> bool:
        """Whether the op only moves elements about."""
        return self.copies or self.view and bool(self.linear)


@dataclass(slots=True)
class Layout:
    """What a rule may give instead of a notation: the placements themselves.

    Attributes:
        ins: Placements wanted of each operand.
        outs: Placements of each result.
        shapes: Global shape of each result.
        run, rewrite, view, many, sends, reads: As in ``Notation``.
    """

    ins: Sequence[Placements]
    outs: Sequence[Placements]
    shapes: Sequence[Sequence[int]]
    run: Callable[..., Any] | None = None
    rewrite: Callable[..., Any] | None = None
    view: bool = False
    many: bool = False
    sends: Callable[..., float] | None = None
    reads: Callable[..., Sequence[Any]] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Placements of all operands and results on one mesh axis."""

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]


def letter_row(n: Notation, letter: Hashable, like: Placement = Shard(0)) -> Row:  # noqa: B008
    """The row in which ``letter`` is cut over the axis, as ``like`` cuts."""
    summed = letter in n.contracted
    ins: list[Placement] = []
    for i, sub in enumerate(n.ins):
        if letter in sub:
            ins.append(like.at_dim(sub.index(letter)))
        else:
            ins.append(Partial() if summed and i in n.affine else R)
    outs: list[Placement] = []
    for sub in n.outs:
        if letter in sub:
            outs.append(like.at_dim(sub.index(letter)))
        else:
            outs.append(Partial() if summed else R)
    return Row(tuple(ins), tuple(outs))


def rows_for(n: Notation, current: Sequence[Placement]) -> list[Row]:
    """The legal rows that what the operands have now suggests, in fixed order."""
    letters: list[tuple[Hashable, Placement]] = []
    for sub, p in zip(n.ins, current, strict=True):
        dim = p.dim if isinstance(p, Shard) else None
        if isinstance(p, CustomPlacement) and n.run is None and n.rewrite is None:
            dim = p.along
        if dim is not None and sub[dim] not in n.whole:
            letter = sub[dim], p.at_dim(0)
            if letter not in letters:
                letters.append(letter)
    rows = [letter_row(n, letter, like) for letter, like in letters]
    rows.extend(partial_rows(n, current))
    rows.append(Row((R,) * len(n.ins), (R,) * len(n.outs)))
    return rows


def partial_rows(n: Notation, current: Sequence[Placement]) -> Iterable[Row]:
    """Rows by linearity: a group whose members are Partial already stays so."""
    for group in n.linear:
        kinds = {current[i] for i in group if i not in n.affine}
        if len(kinds) != 1:
            continue
        kind = next(iter(kinds))
        if isinstance(kind, Partial) and (kind.linear or n.moves):
            ins = tuple(
                kind if i in group or i in n.affine else R for i in range(len(n.ins))
            )
            yield Row(ins, (kind,) * len(n.outs))


def move_cost(
    src: Placement,
    dst: Placement,
    nbytes: float,
    parts: int,
    affine: bool,
    latency: float,
    seconds_per_byte: float,
) -> float:
    """Modelled seconds to bring one operand from ``src`` to ``dst`` on one axis."""
    if src == dst:
        return 0.0
    if parts == 1:
        return 1e-9
    if isinstance(src, Replicate):
        # Replicate -> Partial is free to send but throws the copies away: every later
        # non-linear use would reduce again. Only an added-once operand does it.
        return 1e-7 if dst.is_cut() or affine else math.inf
    if isinstance(dst, Partial):
        if isinstance(src, Partial):
            linear = src.linear and dst.linear
            return 1e-7 if linear else latency + 2 * nbytes * seconds_per_byte
        return 1e-7 if affine else math.inf  # padded with zeros
    share = (parts - 1) / parts * seconds_per_byte
    if isinstance(dst, Replicate):
        gathered = nbytes * parts if src.is_cut() else 2 * nbytes
        return latency + gathered * share
    return latency + nbytes * share


def solve(
    n: Notation,
    mesh: DeviceMesh,
    current: Sequence[Placements],
    nbytes: Sequence[float],
    keep: int | None = None,
) -> tuple[list[Placements], list[Placements]] | None:
    """Choose a legal row per mesh axis, the cheapest by the cost model.

    Args:
        n: The rule's notation.
        mesh: The mesh.
        current: Placements of each operand.
        nbytes: Bytes of an average shard of each operand.
        keep: An operand that must not move and whose placement the first result
            must have (the target of an in-place op).

    Returns:
        Placements wanted of each operand and those of each result, or None where
        ``keep`` leaves no row.
    """
    ins: list[list[Placement]] = [[] for _ in n.ins]
    outs: list[list[Placement]] = [[] for _ in n.outs]
    costs = costs_of(mesh)
    for axis in range(mesh.ndim):
        now = [c[axis] for c in current]
        parts = mesh.shape[axis]
        best, least = None, math.inf
        for row in rows_for(n, now):
            if keep is not None and (
                row.ins[keep] != now[keep] or row.outs and row.outs[0] != now[keep]
            ):
                continue
            cost = sum(
                move_cost(
                    src,
                    dst,
                    size,
                    parts,
                    i in n.affine,
                    costs.latency[axis],
                    costs.seconds_per_byte[axis],
                )
                for i, (src, dst, size) in enumerate(
                    zip(now, row.ins, nbytes, strict=True)
                )
            )
            if cost < least:
                best, least = row, cost
        if best is None:
            return None
        for i, p in enumerate(best.ins):
            ins[i].append(p)
        for i, p in enumerate(best.outs):
            outs[i].append(p)
    return [normal(tuple(p)) for p in ins], [normal(tuple(p)) for p in outs]


def parse(rule: str, linear: bool = False) -> Notation:
    """A notation from text such as ``"bsd,fd->bsf + f"``.

    Operands are separated by commas, results follow ``->``; an operand behind ``+``
    is added once to the result. A letter of the operands that no result has is
    contracted, that is summed over. Capital letters, and those that one operand has
    twice, must stay whole.

    Args:
        rule: The text.
        linear: Whether the op is linear in each operand before ``+``, so that Partial
            operands need not be reduced first.

    Example:
        >>> parse("mk,kn->mn").contracted
        {'k'}
    """
    left, arrow, right = rule.replace(" ", "").partition("->")
    if not arrow:
        raise ValueError(
            f"rule {rule!r}: no '->', expected operands->results, such as 'mk,kn->mn'."
        )
    results, *added = right.split("+")
    ins = [tuple(s) for s in left.split(",")]
    outs = [tuple(s) for s in results.split(",")]
    first = len(ins)
    ins += [tuple(s) for s in added]
    inside: set[Hashable] = {letter for sub in ins for letter in sub}
    kept = {letter for sub in outs for letter in sub}
    if kept - inside:
        raise ValueError(
            f"rule {rule!r}: no operand has {sorted(map(str, kept - inside))}"
        )
    affine = set(range(first, len(ins)))
    whole = {x for x in inside | kept if str(x).isupper()}
    whole |= {x for sub in ins for x in sub if sub.count(x) > 1}
    return Notation(
        ins,
        outs,
        whole=whole,
        contracted=inside - kept - whole,
        linear=[{i} for i in range(first)] if linear else [],
        affine=affine,
    )
