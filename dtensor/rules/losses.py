"""Losses: pointwise ones, and those with one row of classes per sample."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from dtensor.calls import Call
from dtensor.notation import Letters, Notation
from dtensor.rules.convolution import never_empty
from dtensor.rules.pointwise import broadcast_letters, whole_ones
from dtensor.spec import Spec

REDUCTIONS = ("none", "mean", "sum")  # by torch's enum


def divided(reduction_at: int, number: int) -> Callable[..., Any]:
    """Runs a mean loss on a shard: its sum, over the number of the whole.

    Args:
        reduction_at: Position of ``reduction``.
        number: What the mean divides by; of nothing, the mean is nan.
    """
    total = REDUCTIONS.index("sum")

    def mean(func: Any, args: Any, kwargs: Any) -> Any:
        if len(args) > reduction_at:
            args = (*args[:reduction_at], total, *args[reduction_at + 1 :])
        else:
            kwargs = {**kwargs, "reduction": total}
        return func(*args, **kwargs) / number

    return mean


def _run(reduction: str, reduction_at: int, number: int) -> Callable[..., Any]:
    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        if reduction == "sum" or all(s.local_shape == s.shape for s in ins):
            return lambda func, args, kwargs: func(*args, **kwargs)
        return divided(reduction_at, number)

    return run


def elementwise_loss(reduction_at: int) -> Callable[[Call], Notation]:
    """Rule of ``mse_loss`` and its kind: pointwise, then a sum or a mean over all."""

    def rule(call: Call) -> Notation:
        subs, out, shape = broadcast_letters(
            [o.shape for o in call.operands], call.name
        )
        reduction = REDUCTIONS[call.arg(reduction_at, "reduction", 1)]
        if reduction == "none":
            return Notation(subs, [out], whole=whole_ones(subs))
        return Notation(
            subs,
            [()],
            whole=whole_ones(subs),
            contracted=set(out),
            run=_run(reduction, reduction_at, shape.numel()),
        )

    return rule


def row_loss(reduction_at: int) -> Callable[[Call], Notation]:
    """Rule of ``multi_margin_loss`` and its kind: samples free, classes whole.

    The operands are the scores (samples, classes), the target of each sample or of each
    of its classes, and weights per class.
    """

    def rule(call: Call) -> Notation:
        x, target = call.operands[:2]
        samples: Letters = ("n",) if x.ndim > 1 else ()
        ins: list[Letters] = [(*samples, "c")[: x.ndim]]
        ins.append(samples if target.ndim < x.ndim else (*samples, "c")[: x.ndim])
        if target.ndim not in (x.ndim, x.ndim - 1) or not samples:
            ins[1] = tuple(("target", d) for d in range(target.ndim))
        ins += [("c",)[: o.ndim] for o in call.operands[2:]]
        whole: set[Hashable] = {"c"} | {s for s in ins[1] if isinstance(s, tuple)}
        if samples and not never_empty(x, 0):
            whole.add("n")
        reduction = REDUCTIONS[call.arg(reduction_at, "reduction", 1)]
        if reduction == "none":
            return Notation(ins, [samples], whole=whole)
        return Notation(
            ins,
            [()],
            whole=whole,
            contracted=set(samples) - whole,
            run=_run(reduction, reduction_at, x.shape[0] if samples else 1),
        )

    return rule
