"""Convolutions, pools and paddings: batch and channels free, space whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from dtensor.calls import Call, Operand
from dtensor.mesh.chunks import chunk_sizes
from dtensor.notation import Letters, Notation


def never_empty(x: Operand, dim: int) -> bool:
    """Whether no way to cut this dim over the mesh leaves an empty piece.

    Kernels that take an empty batch refuse empty channels, on that one rank.
    """
    pieces = [x.shape[dim]]
    for n in x.spec.mesh.shape:
        pieces += [size for p in pieces for size in chunk_sizes(p, n)]
    return min(pieces) > 0


def convolution(transposed: bool) -> Callable[[Call], Notation]:
    """``conv1d`` to ``conv3d``: ``bc*,oc*->bo* + o``; with groups, channels whole."""

    def rule(call: Call) -> Notation:
        x, w = call.operands[:2]
        grouped = call.arg(6, "groups", 1) != 1
        space = w.ndim - 2
        batch: Letters = ("b",) if x.ndim == w.ndim else ()
        into: Hashable = ("group", "c") if grouped else "c"
        outof: Hashable = ("group", "o") if grouped else "o"
        kernel: Letters = tuple(("kernel", d) for d in range(space))
        pair = ("c", outof) if transposed else ("o", into)
        ins: list[Letters] = [
            (*batch, "c", *(("space", d) for d in range(space))),
            (*pair, *kernel),
        ]
        ins += [("o",)] * (len(call.operands) - 2)
        whole: set[Hashable] = {s for sub in ins for s in sub if isinstance(s, tuple)}
        if grouped or not never_empty(x, len(batch)):
            whole.add("c")
        if grouped or not never_empty(w, pair.index(outof if transposed else "o")):
            whole.add("o")
        return Notation(
            ins,
            [(*batch, "o", *(("out", d) for d in range(space)))],
            whole=whole,
            contracted={"c"} - whole,
            linear=[{0}, {1}],
            affine={2} if len(ins) > 2 else set(),
        )

    return rule


def spatial(dims: int, linear: bool = False) -> Callable[[Call], Notation]:
    """Rule of pools and resizing: the last ``dims`` dims whole, those before free."""

    def rule(call: Call) -> Notation:
        x = call.operands[0]
        letters: Letters = tuple(range(x.ndim))
        lead = letters[: x.ndim - dims]
        whole: set[Hashable] = set(letters[x.ndim - dims :])
        if lead and not never_empty(x, len(lead) - 1):
            whole.add(lead[-1])
        shapes = call.shapes()
        out: Letters = (*lead, *(("out", d) for d in range(dims)))
        return Notation(
            [letters],
            [out] * len(shapes),
            whole=whole,
            linear=[{0}] if linear else [],
            shapes=shapes,
        )

    return rule


def padded(call: Call) -> Notation:
    """``pad``: the padded dims whole; linear, unless with a number that is not zero."""
    x = call.operands[0]
    pads = call.arg(1, "pad")
    constant = call.name == "constant_pad_nd" or (
        call.arg(2, "mode", "constant") == "constant"
    )
    value = call.arg(2 if call.name == "constant_pad_nd" else 3, "value")
    at = {x.ndim - 1 - i // 2 for i, n in enumerate(pads) if n != 0}
    whole: set[Hashable] = set(at)
    if not constant:  # these kernels take no empty batch, and look at every dim given
        at |= {x.ndim - 1 - i // 2 for i in range(len(pads))}
        whole |= at | {d for d in range(x.ndim) if not never_empty(x, d)}
    return Notation(
        [tuple(range(x.ndim))],
        [tuple(("padded", d) if d in at else d for d in range(x.ndim))],
        whole=whole,
        linear=[] if constant and value else [{0}],
    )
