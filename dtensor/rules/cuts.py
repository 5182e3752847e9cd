"""Cuts along one dim: narrow, select, split, chunk, unbind."""

from __future__ import annotations

from collections.abc import Callable

from dtensor.calls import Call, NoRule
from dtensor.notation import Letters, Notation
from dtensor.rules.reductions import dims_of


def cut_dim(dim_at: int, drop: bool, many: bool) -> Callable[[Call], Notation]:
    """Rule of ops that cut along one dim: narrow, select, split, chunk, unbind."""

    def rule(call: Call) -> Notation:
        x = call.operands[0]
        if call.name == "tensor_split" and len(call.operands) > 1:
            raise NoRule("the cuts depend on data")
        dim = dims_of(call.arg(dim_at, "dim", 0), x.ndim)[0]
        letters: Letters = tuple(range(x.ndim))
        rest = ("cut",) if not drop else ()
        out: Letters = (*letters[:dim], *rest, *letters[dim + 1 :])
        shapes = call.shapes()
        extra: list[Letters] = [() for _ in call.operands[1:]]
        return Notation(
            [letters, *extra],
            [out] * len(shapes),
            whole={dim},
            linear=[{0}],
            shapes=shapes,
            view=True,
            many=many,
        )

    return rule
