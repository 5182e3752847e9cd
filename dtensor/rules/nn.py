"""Ops of neural networks: norms, embedding, attention, cross-entropy."""

from __future__ import annotations

from typing import Any, Callable, Hashable

import torch

from dtensor.collectives import functional
from dtensor.dispatch import Call, NoRule, Operand
from dtensor.errors import ShardingError
from dtensor.notation import Letters, Notation
from dtensor.placement import Shard
from dtensor.redistribute import plain
from dtensor.rules.pointwise import broadcast_letters, whole_ones
from dtensor.spec import Spec

REDUCTIONS = ("none", "mean", "sum")  # by torch's enum


def normalized(call: Call) -> Notation:
    """``layer_norm``, ``rms_norm``: the normalized dims whole, the others free."""
    x = call.operands[0]
    shape = call.arg(1, "normalized_shape")
    tail = len(shape)
    letters: Letters = tuple(range(x.ndim))
    ins: list[Letters] = [letters]
    ins += [letters[x.ndim - tail :]] * (len(call.operands) - 1)
    return Notation(
        ins, [letters], whole=set(letters[x.ndim - tail :])
    )


def group_norm(call: Call) -> Notation:
    """``group_norm``: the batch dim free."""
    x = call.operands[0]
    letters: Letters = tuple(range(x.ndim))
    ins: list[Letters] = [letters]
    ins += [letters[1:2]] * (len(call.operands) - 1)
    return Notation(ins, [letters], whole=set(letters[1:]))


def embedding(call: Call) -> Notation:
    """``embedding(weight, indices)``: cut by width, by index, or by vocabulary.

    Sharded by vocabulary, each rank looks up the rows it has and puts zeros for the
    others: addends.
    """
    weight, indices = call.operands[:2]
    lead: Letters = tuple(range(indices.ndim))
    padding = call.arg(2, "padding_idx", -1)
    sparse = bool(call.arg(4, "sparse", False))
    scale = bool(call.arg(3, "scale_grad_by_freq", False))

    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        spec = ins[0]
        offset, rows = spec.block(0, spec.mesh.ndim)
        if rows == spec.shape[0]:
            return lambda func, args, kwargs: func(*args, **kwargs)

        def masked(func: Any, args: Any, kwargs: Any) -> Any:
            weight, indices = plain(args[0]), plain(args[1])
            check_range(indices, spec.shape[0])
            local = indices - offset
            missing = (local < 0) | (local >= rows)
            if rows == 0:
                weight = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
            pad = padding - offset if 0 <= padding - offset < rows else -1
            found = torch.embedding(weight, local.masked_fill(missing, 0), pad)
            return found.masked_fill(missing.unsqueeze(-1), 0)

        return masked

    whole: set[Hashable] = {"v"} if sparse or scale else set()
    if scale:
        whole |= set(lead)
    return Notation(
        [("v", "w"), lead],
        [(*lead, "w")],
        whole=whole,
        contracted={"v"},
        linear=[{0}],
        run=run,
    )


def check_range(indices: torch.Tensor, rows: int) -> None:
    """An index outside the vocabulary is an error, not a row of zeros."""
    if indices.is_meta or indices.numel() == 0:
        return
    bad = (indices < 0) | (indices >= rows)
    if indices.is_cuda:
        torch._assert_async(~bad.any())
    elif bool(bad.any()):
        raise IndexError(
            f"embedding: index out of range, got {int(indices[bad][0])}, expected 0 to "
            f"{rows - 1} (the rows of the whole table)."
        )


def attention(call: Call) -> Notation:
    """``scaled_dot_product_attention``: batch, heads and (not causal) queries free."""
    q, k, v = call.operands[:3]
    causal = bool(call.arg(5, "is_causal", False))
    grouped = bool(call.kwargs.get("enable_gqa", False)) and q.ndim > 2
    if call.arg(4, "dropout_p", 0.0):
        raise NoRule("attention with dropout")
    batches = [o.shape[:-2] for o in (q, k, v)]
    whole: set[Hashable] = {"s", "e"}
    if grouped and q.shape[-3] != k.shape[-3]:
        batches = [b[:-1] for b in batches]
    subs, _, _ = broadcast_letters(batches, call.name)
    whole |= whole_ones(subs)
    if len(batches[0]) < q.ndim - 2:  # heads of unlike numbers: equal shares only
        cut = q.spec.mesh.shape
        at = [n for n, p in zip(cut, q.placements, strict=True) if p == Shard(q.ndim - 3)]
        parts = 1
        for n in at:
            parts *= n
        free = k.shape[-3] % parts == 0 and q.shape[-3] % parts == 0
        subs = [(*s, "h") for s in subs]
        whole |= set() if free else {"h"}
    lead = subs[0]
    if causal:
        whole.add("l")
    ins: list[Letters] = [
        (*subs[0], "l", "e"),
        (*subs[1], "s", "e"),
        (*subs[2], "s", "f"),
    ]
    widest = max(subs, key=len)
    lead = tuple(
        next((s[d] for s in subs if len(s) > d and not isinstance(s[d], tuple)), s0)
        for d, s0 in enumerate(widest)
    )
    if len(call.operands) > 3:
        mask = call.operands[3]
        full = (*lead, "l", "s")
        sizes = (*[0] * len(lead), q.shape[-2], k.shape[-2])
        sub: list[Hashable] = []
        for d, n in enumerate(mask.shape):
            letter = full[d + len(full) - mask.ndim]
            stretched = n == 1 and sizes[d + len(full) - mask.ndim] != 1
            sub.append(("one", 3, d) if stretched else letter)
        whole |= {x for x in sub if isinstance(x, tuple)}
        ins.append(tuple(sub))
    return Notation(ins, [(*lead, "l", "f")], whole=whole, linear=[{2}])


def cross_entropy(call: Call) -> Notation:
    """``cross_entropy_loss``: batch free, classes whole, one mean over all ranks.

    A mean over a sharded batch divides by the whole batch's weight, found by a small
    all-reduce, so that each shard's sum is an addend of the global mean.
    """
    x, target = call.operands[:2]
    weight = call.arg(2, "weight")
    reduction = REDUCTIONS[call.arg(3, "reduction", 1)]
    ignore = call.arg(4, "ignore_index", -100)
    letters: Letters = tuple(range(x.ndim)) if x.ndim > 1 else ("c",)
    classes: Hashable = letters[1] if x.ndim > 1 else "c"
    batch: Letters = tuple(d for d in letters if d != classes)
    by_class = target.shape != x.shape
    ins: list[Letters] = [letters, batch if by_class else letters]
    if isinstance(weight, Operand):
        ins.append((classes,))
    if reduction == "none":
        return Notation(ins, [batch], whole={classes})

    def run(specs: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        spec = specs[0]
        axes = [a for a, p in enumerate(spec.placements) if p.is_shard()]
        if reduction == "sum" or not axes:
            return lambda func, args, kwargs: func(*args, **kwargs)

        def mean(func: Any, args: Any, kwargs: Any) -> Any:
            given = list(args) + [None] * (6 - len(args))
            for i, name in enumerate(("weight", "reduction", "ignore_index"), start=2):
                given[i] = kwargs.get(name, given[i])
            given[4] = -100 if given[4] is None else given[4]
            given[5] = kwargs.get("label_smoothing", given[5] or 0.0)
            given[3] = 2
            total = func(*given)
            with torch.no_grad():
                count = denominator(plain(args[0]), plain(args[1]), given[2], ignore)
                for axis in axes:
                    count = functional.all_reduce(count, spec.comm(axis))
            return total / count

        return mean

    return Notation(
        ins,
        [()],
        whole={classes},
        contracted=set(batch),
        run=run,
    )


def denominator(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore: int
) -> torch.Tensor:
    """What the mean of these rows is divided by: their number or their weight."""
    if target.shape == x.shape and target.is_floating_point():
        classes = x.shape[1] if x.ndim > 1 else x.shape[0]
        return torch.tensor(float(x.numel() // max(1, classes)), dtype=torch.float64)
    used = target != ignore
    if weight is None:
        return used.sum()
    return torch.where(used, plain(weight)[target.masked_fill(~used, 0)], 0).sum()


def elementwise_loss(call: Call) -> Notation:
    """``mse_loss``, ``l1_loss`` ...: pointwise, then a sum or a mean over everything."""
    subs, out, shape = broadcast_letters([o.shape for o in call.operands], call.name)
    reduction = REDUCTIONS[call.arg(2, "reduction", 1)]
    if reduction == "none":
        return Notation(subs, [out], whole=whole_ones(subs), shapes=[shape])
    number = max(1, shape.numel())

    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        if reduction == "sum" or all(s.local_shape == s.shape for s in ins):
            return lambda func, args, kwargs: func(*args, **kwargs)

        def mean(func: Any, args: Any, kwargs: Any) -> Any:
            if len(args) > 2:
                args = (*args[:2], 2, *args[3:])
            else:
                kwargs = {**kwargs, "reduction": 2}
            return func(*args, **kwargs) / number

        return mean

    return Notation(
        subs, [()], whole=whole_ones(subs), contracted=set(out), run=run
    )


def refuse(reason: str) -> Callable[[Call], Notation]:
    """The rule of an op that DTensors do not do."""

    def rule(call: Call) -> Notation:
        raise ShardingError(f"{call.name}: {reason}")

    return rule
