"""Calls that broke once: named arguments, dtypes in the plan cache, small dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from guard_helpers import PLACES, gen, line, ranks, same
from op_harness import place

from dtensor import DTensor, Partial, Replicate, Shard, redistribution

T = torch.Tensor
AVG = Partial("avg")


def laid(x: T, p: Any) -> DTensor:
    """``x`` on two ranks; addends are no whole numbers."""
    return place(x, line(), (p,))


TORCH: Any = torch  # names that its stubs do not have
NAMED: dict[str, Callable[[Any, Any], Any]] = {
    "sub": lambda a, b: TORCH.sub(alpha=2, other=b, input=a),
    "add": lambda a, b: TORCH.add(x2=b, x1=a, alpha=2),
    "matmul": lambda a, b: torch.matmul(other=b, input=a),
    "mm": lambda a, b: torch.mm(mat2=b, input=a),
    "addmm": lambda a, b: torch.addmm(mat2=b, mat1=a, input=a),
    "linear": lambda a, b: F.linear(weight=b, input=a),
    "where": lambda a, b: torch.where(other=b, input=a, condition=a > 0),
    "gather": lambda a, b: torch.gather(
        index=torch.tensor([[1, 0, 2, 1]]), dim=1, input=a
    ),
    "squeeze": lambda a, b: torch.squeeze(dim=0, input=a[:1]),
    "norm": lambda a, b: TORCH.linalg.vector_norm(dim=1, x=a),
    "relu_": lambda a, b: TORCH.relu_(input=a.clone()),
    "mean": lambda a, b: TORCH.mean(axis=0, keepdims=True, input=a),
    "sort": lambda a, b: TORCH.sort(axis=0, input=a)[0],
    "layer_norm": lambda a, b: torch.layer_norm(
        bias=b[1], weight=a[0], normalized_shape=(4,), input=a
    ),
}


@pytest.mark.parametrize("name", NAMED)
@ranks(2)
def test_arguments_may_be_named_in_any_order(name: str) -> None:
    """A rule counts operands by position: names are put in the schema's order."""
    a, b = gen(4, 4), gen(4, 4, seed=1)
    want = NAMED[name](a, b)
    with redistribution("allow"):
        for p in PLACES:
            x, y = laid(a, p), laid(b, Shard(1))
            if name != "relu_" or not p.is_partial():
                same(NAMED[name](x, y), want, (name, p))
