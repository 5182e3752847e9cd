"""Copies of views, windows, and copies with a part from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtensor.calls import Call
from dtensor.notation import Layout, Letters, Notation
from dtensor.rules.reductions import dims_of
from dtensor.spec import Spec


def copied(rule: Callable[[Call], Notation | Layout]) -> Callable[[Call], Any]:
    """Rule of ``view_copy`` and its kind: as the view, but never in its memory."""

    def copying(call: Call) -> Notation | Layout:
        n = rule(call)
        inner = n.run

        def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
            own = inner(ins, outs) if inner is not None else None

            def fresh(func: Any, args: Any, kwargs: Any) -> Any:
                if own is None:
                    return func(*args, **kwargs)
                out = own(func, args, kwargs)
                return out.clone() if isinstance(out, torch.Tensor) else out

            return fresh

        n.run, n.view = run, False
        return n

    return copying


def diag_embed(call: Call) -> Notation:
    """``diag_embed``: the last dim, whole, becomes two."""
    x = call.operands[0]
    n = x.ndim + 1
    pair = {call.arg(2, "dim1", -2) % n, call.arg(3, "dim2", -1) % n}
    free = iter(range(x.ndim - 1))
    return Notation(
        [tuple(range(x.ndim))],
        [tuple(("diag", d) if d in pair else next(free) for d in range(n))],
        whole={x.ndim - 1},
        linear=[{0}],
    )


def diagonal_scatter(call: Call) -> Notation:
    """``diagonal_scatter``: a copy with another diagonal; its two dims whole."""
    x = call.operands[0]
    pair = set(dims_of([call.arg(3, "dim1", 0), call.arg(4, "dim2", 1)], x.ndim))
    letters: Letters = tuple(range(x.ndim))
    part: Letters = (*(d for d in letters if d not in pair), "diagonal")
    return Notation(
        [letters, part],
        [letters],
        whole=pair | {"diagonal"},
        linear=[{0, 1}],
        shapes=[x.shape],
    )


def windows(call: Call) -> Notation:
    """``unfold``: the dim that windows slide along, whole; they are a last dim."""
    x = call.operands[0]
    dim = dims_of(call.arg(1, "dimension"), x.ndim)
    letters: Letters = tuple(range(x.ndim))
    return Notation(
        [letters],
        [(*(("step", d) if d in dim else d for d in letters), "window")],
        whole=set(dim),
        linear=[{0}],
        view=True,
    )
