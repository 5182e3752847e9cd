"""Products: the matmul family, linear and einsum."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from dtensor.calls import Call
from dtensor.notation import Letters, Notation
from dtensor.redistribute import plain
from dtensor.rules.pointwise import broadcast_letters, whole_ones
from dtensor.spec import Spec


def matmul(call: Call) -> Notation:
    """``matmul``: vectors, matrices and broadcast batches."""
    a, b = call.operands[:2]
    if a.ndim == 0 or b.ndim == 0:
        raise RuntimeError(
            f"{call.name}: both operands need at least 1 dim, got {a.ndim} and {b.ndim}."
        )
    batch_a, batch_b = a.shape[: max(0, a.ndim - 2)], b.shape[: max(0, b.ndim - 2)]
    (sub_a, sub_b), batch, _ = broadcast_letters([batch_a, batch_b], call.name)
    m: Letters = ("m",) if a.ndim > 1 else ()
    n: Letters = ("n",) if b.ndim > 1 else ()
    right: Letters = ("k", "n") if b.ndim > 1 else ("k",)
    return Notation(
        [(*sub_a, *m, "k"), (*sub_b, *right)],
        [(*batch, *m, *n)],
        whole=whole_ones([sub_a, sub_b]),
        contracted={"k"},
        linear=[{0}, {1}],
    )


def linear(call: Call) -> Notation:
    """``F.linear(x, w, b)``: ``...d,fd->...f + f``."""
    x, w = call.operands[:2]
    lead: Letters = tuple(range(x.ndim - 1))
    f: Letters = ("f",) if w.ndim > 1 else ()
    ins: list[Letters] = [(*lead, "d"), (*f, "d")]
    if len(call.operands) > 2:
        ins.append(f if call.operands[2].ndim else ())
    return Notation(
        ins,
        [(*lead, *f)],
        contracted={"d"},
        linear=[{0}, {1}],
        affine=set(range(2, len(ins))),
    )


def addmm(call: Call) -> Notation:
    """``addmm``, ``addmv``, ``baddbmm``: the first operand is added once."""
    c, a, b = call.operands[:3]
    batch: Letters = ("b",) if a.ndim == 3 else ()
    n: Letters = ("n",) if b.ndim == a.ndim else ()
    out: Letters = (*batch, "m", *n)
    sizes: dict[Hashable, int] = {}
    for sub, o in (((*batch, "m", "k"), a), ((*batch, "k", *n), b)):
        sizes.update(zip(sub, o.shape, strict=True))
    sub_c: list[Hashable] = []
    for d, size in enumerate(c.shape):
        letter = out[d + len(out) - c.ndim]
        sub_c.append(letter if size == sizes[letter] else ("one", 0, d))

    def rewrite(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        shape = outs[0].local_shape

        def stretched(args: Any, kwargs: Any) -> Any:
            # torch.addmv forgets to stretch its first operand where m or k is empty.
            return (plain(args[0]).expand(shape), *args[1:]), kwargs

        return stretched

    short = len(sub_c) < len(out) or any(isinstance(x, tuple) for x in sub_c)
    stretch = short and not call.inplace
    # Of whole numbers, torch takes a factor that is none only where k is not empty.
    exact = not (a.dtype.is_floating_point or a.dtype.is_complex)
    kept: set[Hashable] = {"k"} if exact else set()
    return Notation(
        [tuple(sub_c), (*batch, "m", "k"), (*batch, "k", *n)],
        [out],
        whole=whole_ones([tuple(sub_c)]) | kept,
        contracted={"k"} - kept,
        linear=[{1}, {2}],
        affine={0},
        rewrite=rewrite if stretch and call.name == "addmv" else None,
    )


def einsum(call: Call) -> Notation:
    """``einsum``: the equation is the rule; a repeated letter stays whole."""
    equation = call.args[0].replace(" ", "")
    left, arrow, right = equation.partition("->")
    subs = left.split(",")
    if "." in equation or len(subs) != len(call.operands):
        return everything_whole(call)
    every = "".join(subs)
    if not arrow:
        right = "".join(sorted(c for c in set(every) if every.count(c) == 1))
    whole: set[Hashable] = {c for sub in subs for c in sub if sub.count(c) > 1}
    for sub, o in zip(subs, call.operands, strict=True):
        if len(sub) != o.ndim:
            return everything_whole(call)
        whole |= {c for c, size in zip(sub, o.shape, strict=True) if size == 1}
    return Notation(
        [tuple(s) for s in subs],
        [tuple(right)],
        whole=whole,
        contracted=set(every) - set(right) - whole,
        linear=[{i} for i in range(len(subs))],
    )


def everything_whole(call: Call) -> Notation:
    """No dim may be sharded: the rule of last resort, which gathers."""
    ins: list[Letters] = [
        tuple((i, d) for d in range(o.ndim)) for i, o in enumerate(call.operands)
    ]
    shapes = call.shapes()
    out: list[Letters] = [tuple(("out", d) for d in range(len(s))) for s in shapes]
    return Notation(ins, out, whole={x for s in ins for x in s}, shapes=shapes)
