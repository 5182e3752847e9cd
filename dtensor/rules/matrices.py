"""Linear algebra of matrices: the last dims whole, the batch dims free.

``batched`` serves decompositions, solvers and their kind: each operand ends in a matrix
(or a vector), each result in what becomes of it. Dims before these are a batch, which
broadcasts. The other rules here are of ops that are sums of products or differences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from dtensor.calls import Call, Operand
from dtensor.errors import ShardingError
from dtensor.notation import Letters, Notation
from dtensor.redistribute import plain
from dtensor.rules.linalg import everything_whole
from dtensor.rules.pointwise import broadcast_letters, whole_ones
from dtensor.rules.reductions import dims_of, out_letters
from dtensor.spec import Spec

Rule = Callable[[Call], Notation]


def own_letters(count: int, *name: Hashable) -> Letters:
    """Letters that occur nowhere else."""
    return tuple((*name, d) for d in range(count))


def batched(
    cores: Sequence[int] = (2,), linear: Sequence[int] = (), flat: bool = False
) -> Rule:
    """Rule of an op of matrices.

    Args:
        cores: Trailing dims of each operand that must stay whole; the last number
            stands for all operands that follow.
        linear: Operands in which it is linear.
        flat: Whether the op may give results without the batch (its second operand
            being a vector, as for ``solve``): then everything is whole.
    """

    def rule(call: Call) -> Notation:
        core = [
            min(o.ndim, cores[min(i, len(cores) - 1)])
            for i, o in enumerate(call.operands)
        ]
        if flat and vector_on_the_right(call.operands):
            core[1] = 1
        shapes = call.shapes()
        heads = [
            o.shape[: o.ndim - c] for o, c in zip(call.operands, core, strict=True)
        ]
        subs, lead, batch = broadcast_letters(heads, call.name)
        if any(len(s) < len(lead) or tuple(s[: len(lead)]) != batch for s in shapes):
            return everything_whole(call)
        whole = whole_ones(subs)
        ins: list[Letters] = []
        for i, (sub, c) in enumerate(zip(subs, core, strict=True)):
            tail = own_letters(c, "core", i)
            whole |= set(tail)
            ins.append((*sub, *tail))
        outs: list[Letters] = []
        for i, s in enumerate(shapes):
            tail = own_letters(len(s) - len(lead), "result", i)
            whole |= set(tail)
            outs.append((*lead, *tail))
        return Notation(
            ins, outs, whole=whole, linear=[{i} for i in linear], shapes=shapes
        )

    return rule


def vector_on_the_right(operands: Sequence[Operand]) -> bool:
    """Whether the right-hand side of ``solve(a, b)`` is a vector, or a batch of them."""
    a, b = operands[:2]
    return b.ndim == 1 or a.ndim - 1 == b.ndim and a.shape[:-1] == b.shape


def solve(call: Call) -> Notation:
    """``linalg.solve(a, b)``: a matrix b is never taken for a batch of vectors."""
    n = batched((2,), flat=True)(call)
    a, b = call.operands[:2]
    if b.ndim == 1 or a.ndim - 1 != b.ndim or vector_on_the_right(call.operands):
        return n

    def rewrite(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        # the shards' shapes may fit where the global ones do not
        def lifted(args: Any, kwargs: Any) -> Any:
            return (args[0], plain(args[1]).unsqueeze(0), *args[2:]), kwargs

        return lifted

    return dataclasses.replace(n, rewrite=rewrite)


def matrix_norm(call: Call) -> Notation:
    """``linalg.matrix_norm(x, ord, dim, keepdim)`` and ``linalg.norm``."""
    x = call.operands[0]
    dim = call.arg(2, "dim", (-2, -1) if call.name == "linalg_matrix_norm" else None)
    if dim is None and call.name == "linalg_norm" and call.arg(1, "ord") is not None:
        dim = list(range(x.ndim))
    dims = dims_of(dim, x.ndim)
    keep = bool(call.arg(3, "keepdim", False))
    return Notation(
        [tuple(range(x.ndim))], [out_letters(x.ndim, dims, keep)], whole=set(dims)
    )


def trace(call: Call) -> Notation:
    """``trace``: of each shard the part of the diagonal that crosses it is summed."""

    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        (top, rows), (left, columns) = ins[0].block(0), ins[0].block(1)
        if (rows, columns) == tuple(ins[0].shape):
            return lambda func, args, kwargs: func(*args, **kwargs)
        at = max(-rows, min(columns, top - left))

        def part(func: Any, args: Any, kwargs: Any) -> Any:
            return torch.diagonal(plain(args[0]), at).sum()

        return part

    call.shapes()  # raises torch's own error
    return Notation(
        [("i", "j")], [()], contracted={"i", "j"}, linear=[{0}], shapes=[()], run=run
    )


def tensordot(call: Call) -> Notation:
    """``tensordot(a, b, dims_a, dims_b)``: the paired dims are contracted."""
    a, b = call.operands[:2]
    dims_a, dims_b = list(call.args[2]), list(call.args[3])
    sub_a: list[Hashable] = [("a", d) for d in range(a.ndim)]
    sub_b: list[Hashable] = [("b", d) for d in range(b.ndim)]
    pairs = list(zip(dims_of(dims_a, a.ndim), dims_of(dims_b, b.ndim), strict=True))
    if not dims_a:
        pairs = []
    whole: set[Hashable] = set()
    for i, (p, q) in enumerate(pairs):
        sub_a[p] = sub_b[q] = ("sum", i)
        if a.shape[p] != b.shape[q]:  # one is stretched
            whole.add(("sum", i))
    summed: set[Hashable] = {("sum", i) for i in range(len(pairs))}
    out = [x for x in (*sub_a, *sub_b) if x not in summed]
    return Notation(
        [tuple(sub_a), tuple(sub_b)],
        [tuple(out)],
        whole=whole,
        contracted=summed - whole,
        linear=[{0}, {1}],
    )


def inner(call: Call) -> Notation:
    """``inner``: the last dims are contracted; a number only scales."""
    a, b = call.operands[:2]
    sub_a: Letters = own_letters(a.ndim, "a")
    sub_b: Letters = own_letters(b.ndim, "b")
    if a.ndim == 0 or b.ndim == 0:
        return Notation([sub_a, sub_b], [(*sub_a, *sub_b)], linear=[{0}, {1}])
    sub_a, sub_b = (*sub_a[:-1], "k"), (*sub_b[:-1], "k")
    return Notation(
        [sub_a, sub_b],
        [(*sub_a[:-1], *sub_b[:-1])],
        contracted={"k"},
        linear=[{0}, {1}],
    )


def vecdot(call: Call) -> Notation:
    """``linalg.vecdot(x, y, dim)``: broadcast, one dim contracted."""
    subs, out, shape = broadcast_letters([o.shape for o in call.operands], call.name)
    dim = call.kwargs.get("dim", -1) % max(1, len(shape))
    return Notation(
        subs,
        [tuple(d for d in out if d != dim)],
        whole=whole_ones(subs),
        contracted={dim},
        linear=[{0}, {1}],
    )


def cross(call: Call) -> Notation:
    """``cross``: the dim of three whole, the others broadcast."""
    subs, out, shape = broadcast_letters([o.shape for o in call.operands], call.name)
    dim = call.arg(2, "dim", -1 if call.name == "linalg_cross" else None)
    if dim is None:  # the first dim of size 3
        dim = next((d for d, n in enumerate(shape) if n == 3), 0)

    def rewrite(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        # a shard may have its first dim of size 3 elsewhere
        return lambda args, kwargs: (args[:2], {**kwargs, "dim": dim})

    return Notation(
        subs,
        [out],
        whole=whole_ones(subs) | {dim % max(1, len(shape))},
        linear=[{0}, {1}],
        rewrite=rewrite,
    )


def chained(call: Call) -> Notation:
    """``chain_matmul``, ``linalg.multi_dot``: ``ab,bc,cd->ad``, vectors at the ends."""
    operands = call.operands
    ins: list[Letters] = [(i, i + 1) for i in range(len(operands))]
    if operands[0].ndim == 1:
        ins[0] = (1,)
    if operands[-1].ndim == 1:
        ins[-1] = ins[-1][:1]
    ends = [x for sub in ins for x in sub]
    out = tuple(x for x in ends if ends.count(x) == 1)
    call.shapes()  # raises torch's own error
    return Notation(
        ins,
        [out],
        contracted={x for x in ends if ends.count(x) > 1},
        linear=[{i} for i in range(len(ins))],
    )


def added_product(text_a: str, text_b: str, out: str, summed: str) -> Rule:
    """Rule of ``addr``, ``addbmm``: a product to which the first operand is added."""

    def rule(call: Call) -> Notation:
        c, a, b = call.operands[:3]
        sizes = {**dict(zip(text_a, a.shape)), **dict(zip(text_b, b.shape))}
        sub: list[Hashable] = []
        for d, size in enumerate(c.shape):
            letter = out[d + len(out) - c.ndim]
            sub.append(letter if size == sizes[letter] else ("one", 0, d))
        stretched = {x for x in sub if isinstance(x, tuple)}
        if call.inplace and (stretched or c.ndim < len(out)):
            raise ShardingError(
                f"{call.name}_: a DTensor keeps its shape, got a target of "
                f"{tuple(c.shape)}, which the result of {tuple(sizes[x] for x in out)} "
                f"does not fit. Use the out-of-place {call.name}."
            )
        call.shapes()  # raises torch's own error
        # Of whole numbers, torch takes a factor that is none only where nothing is
        # empty; see ``linalg.addmm``.
        exact = not (a.dtype.is_floating_point or a.dtype.is_complex)
        kept = set(summed) if exact else set()
        return Notation(
            [tuple(sub), tuple(text_a), tuple(text_b)],
            [tuple(out)],
            whole=stretched | kept,
            contracted=set(summed) - kept,
            linear=[{1}, {2}],
            affine={0},
        )

    return rule


def kron(call: Call) -> Notation:
    """``kron``: rows of the first operand stay together where they are cut evenly."""
    a, b = call.operands[:2]
    n = max(a.ndim, b.ndim)
    out: list[Hashable] = []
    whole: set[Hashable] = set()
    sub_a: list[Hashable] = []
    for d in range(n):
        k = d - (n - a.ndim)
        letter: Hashable = ("a", d)
        parts = 1
        if k >= 0:
            sub_a.append(letter)
            for axis, size in enumerate(a.spec.mesh.shape):
                if a.placements[axis].is_shard(k):
                    parts *= size
        out.append(letter)
        if k < 0 or a.shape[k] % parts:
            whole.add(letter)
    sub_b = own_letters(b.ndim, "b")
    return Notation(
        [tuple(sub_a), sub_b],
        [tuple(out)],
        whole=whole | set(sub_b),
        linear=[{0}, {1}],
    )


def difference(call: Call) -> Notation:
    """``diff``, ``trapezoid``, ``gradient`` ...: the dim whole, the others free."""
    x = call.operands[0]
    at = {"diff": 2}.get(call.name)
    if call.name in ("trapezoid", "trapz", "cumulative_trapezoid"):
        at = 2 if len(call.args) > 1 and isinstance(call.args[1], Operand) else 9
    dim = call.arg(at if at is not None else 9, "dim", -1)
    dims = dims_of(dim, x.ndim)
    shapes = call.shapes()
    letters: Letters = tuple(range(x.ndim))
    ins: list[Letters] = [letters]
    whole: set[Hashable] = set(dims)
    for i, o in enumerate(call.operands[1:]):
        if o.ndim != x.ndim:
            return everything_whole(call)
        sub = tuple(
            d if o.shape[d] == x.shape[d] and d not in dims else ("other", i, d)
            for d in range(o.ndim)
        )
        whole |= {s for s in sub if isinstance(s, tuple)}
        ins.append(sub)
    drops = len(shapes[0]) < x.ndim
    out: Letters = tuple(
        ("new", d) if d in dims else d for d in letters if d not in dims or not drops
    )
    linear = [set(range(len(ins)))] if call.name == "diff" else []
    return Notation(ins, [out] * len(shapes), whole=whole, linear=linear, shapes=shapes)


def gradient(call: Call) -> Notation:
    """``gradient``: the dims along which it is taken whole, one result for each."""
    x = call.operands[0]
    dims = dims_of(call.kwargs.get("dim"), x.ndim)
    letters: Letters = tuple(range(x.ndim))
    others = [own_letters(o.ndim, "other", i) for i, o in enumerate(call.operands[1:])]
    shapes = call.shapes()
    return Notation(
        [letters, *others],
        [letters] * len(shapes),
        whole=set(dims) | {x for sub in others for x in sub},
        shapes=shapes,
        many=True,
    )


def covariance(call: Call) -> Notation:
    """``cov``, ``corrcoef``: everything whole; of variables in rows a square matrix."""
    x = call.operands[0]
    rows = x.shape[0] if x.ndim == 2 else 1
    shape: Letters = (rows, rows) if rows != 1 else ()
    return Notation(
        [own_letters(o.ndim, i) for i, o in enumerate(call.operands)],
        [own_letters(len(shape), "out")],
        whole={(i, d) for i, o in enumerate(call.operands) for d in range(o.ndim)},
        shapes=[shape],  # type: ignore[list-item]
    )


def geqrf(call: Call) -> Notation:
    """``geqrf``: a matrix and the factors of its reflections; batch free."""
    x = call.operands[0]
    lead: Letters = tuple(range(x.ndim - 2))
    core = own_letters(2, "core")
    shapes = [tuple(x.shape), (*x.shape[:-2], min(x.shape[-2:]))]
    return Notation(
        [(*lead, *core)],
        [(*lead, *core), (*lead, ("factor", 0))],
        whole={*core, ("factor", 0)},
        shapes=shapes,
    )


def renorm(call: Call) -> Notation:
    """``renorm(x, p, dim, maxnorm)``: what lies beside the dim is whole."""
    x = call.operands[0]
    dim = dims_of(call.arg(2, "dim"), x.ndim)
    letters: Letters = tuple(range(x.ndim))
    return Notation(
        [letters], [letters], whole=set(letters) - set(dim), shapes=[x.shape]
    )


def along_last(keeps: bool) -> Rule:
    """``cosine_similarity``, ``pairwise_distance``: broadcast, one dim whole."""

    def rule(call: Call) -> Notation:
        subs, out, shape = broadcast_letters(
            [o.shape for o in call.operands], call.name
        )
        dim = -1 if keeps else call.arg(2, "dim", 1)
        keep = keeps and bool(call.arg(4, "keepdim", False))
        dims = dims_of(dim, len(shape))
        kept = tuple(
            ("kept", d) if d in dims else d for d in out if keep or d not in dims
        )
        return Notation(subs, [kept], whole=whole_ones(subs) | set(dims))

    return rule


def cdist(call: Call) -> Notation:
    """``cdist``: rows of both operands free, what is compared whole."""
    a, b = call.operands[:2]
    subs, batch, _ = broadcast_letters([a.shape[:-2], b.shape[:-2]], call.name)
    return Notation(
        [(*subs[0], "p", "m"), (*subs[1], "r", "m")],
        [(*batch, "p", "r")],
        whole=whole_ones(subs) | {"m"},
    )
