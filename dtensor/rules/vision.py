"""Ops on images: samples (and often channels) free, space whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from dtensor.calls import Call
from dtensor.notation import Letters, Notation
from dtensor.rules.convolution import never_empty


def samples_free(lead: int, linear: bool = False) -> Callable[[Call], Notation]:
    """Rule of ops that treat each sample alone: the first ``lead`` dims free.

    Every operand and result has the same ones; the kernels take no empty shards.
    """

    def rule(call: Call) -> Notation:
        shapes = call.shapes()
        least = min(o.ndim for o in call.operands)
        count = min(lead, least, *(len(s) for s in shapes))
        free: Letters = tuple(range(count))
        ins: list[Letters] = [
            (*free, *((i, d) for d in range(count, o.ndim)))
            for i, o in enumerate(call.operands)
        ]
        whole: set[Hashable] = {x for sub in ins for x in sub if isinstance(x, tuple)}
        sizes = call.operands[0].shape
        for d in range(count):
            alike = all(o.shape[d] == sizes[d] for o in call.operands)
            alike = alike and all(s[d] == sizes[d] for s in shapes)
            if not alike or not never_empty(call.operands[0], d):
                whole.add(d)
        return Notation(
            ins,
            [(*free, *(("out", d) for d in range(count, len(s)))) for s in shapes],
            whole=whole,
            linear=[{0}] if linear else [],
            shapes=shapes,
        )

    return rule


def grid_sampler(call: Call) -> Notation:
    """``grid_sampler(input, grid)``: samples, channels and points of the grid free."""
    x, grid = call.operands[:2]
    points: Letters = tuple(("point", d) for d in range(grid.ndim - 2))
    space: Letters = tuple(("space", d) for d in range(x.ndim - 2))
    whole: set[Hashable] = {*space, "xy"}
    whole |= {s for d, s in enumerate(("n", "c")) if not never_empty(x, d)}
    whole |= {s for d, s in enumerate(points) if not never_empty(grid, d + 1)}
    return Notation(
        [("n", "c", *space), ("n", *points, "xy")],
        [("n", "c", *points)],
        whole=whole,
        linear=[{0}],
    )


def bag(call: Call) -> Notation:
    """``embedding_bag(weight, indices, offsets)``: cut by width, all else whole."""
    weight = call.operands[0]
    shapes = call.shapes()
    ins: list[Letters] = [("v", "w")]
    ins += [
        tuple((i, d) for d in range(o.ndim)) for i, o in enumerate(call.operands[1:])
    ]
    wide = [len(s) == 2 and s[1] == weight.shape[1] for s in shapes]
    outs: list[Letters] = []
    for k, s in enumerate(shapes):
        own: Letters = tuple(("out", k, d) for d in range(len(s)))
        outs.append((("out", k, 0), "w") if wide[k] and k in (0, 3) else own)
    whole: set[Hashable] = {x for sub in ins for x in sub if isinstance(x, tuple)}
    whole.add("v")
    if not never_empty(weight, 1):
        whole.add("w")
    return Notation(ins, outs, whole=whole, shapes=shapes)


def bilinear(call: Call) -> Notation:
    """``bilinear``: ``bi,oij,bj->bo + o``, linear in each of the three."""
    x, y = call.operands[:2]
    batch: Letters = tuple(range(x.ndim - 1))
    ins: list[Letters] = [(*batch, "i"), (*batch, "j"), ("o", "i", "j")]
    ins += [("o",)] * (len(call.operands) - 3)
    whole: set[Hashable] = {d for d in batch if not never_empty(x, int(str(d)))}
    for dim, letter in enumerate("oij"):
        if not never_empty(call.operands[2], dim):
            whole.add(letter)
    return Notation(
        ins,
        [(*batch, "o")],
        whole=whole,
        contracted={"i", "j"} - whole,
        linear=[{0}, {1}, {2}],
        affine={3} if len(ins) > 3 else set(),
    )
