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


@ranks(2)
def test_a_plan_for_one_dtype_is_none_for_another() -> None:
    """Rounding to whole numbers is not linear, whatever was called before."""
    x = gen(4, 4) * 4
    whole = x.long()
    fns: list[Callable[[Any], Any]] = [
        lambda a: a.sum(0, dtype=torch.int64),
        lambda a: a.cumsum(0, dtype=torch.int64),
    ]
    with redistribution("allow"):
        for fn in fns:
            same(fn(laid(whole, Partial())), fn(whole))
            same(fn(laid(x, Partial())), fn(x))
        for p in (Partial(), AVG):
            for model in (x, whole):
                same(laid(x, p).type_as(laid(model, Replicate())), x.type_as(model))
                same(laid(x, p).to(laid(model, Replicate())), x.to(model))


@ranks(2)
def test_a_sum_to_bool_has_no_addends() -> None:
    """``sum(dtype=bool)`` asks whether any is not zero."""
    x = gen(4, 4) > 0
    with redistribution("allow"):
        for p in PLACES[:3]:
            got = laid(x, p).sum(0, dtype=torch.bool)
            same(got, x.sum(0, dtype=torch.bool), p)


@ranks(2)
def test_the_norm_of_float16_gradients_does_not_overflow() -> None:
    """A norm over 256 has no square in float16: clipping would zero the gradients."""
    x = (gen(8, 4) * 100).half()
    z = torch.complex(gen(4), gen(4, seed=1))
    for p in PLACES:
        got = torch._foreach_norm([laid(x, p)], 2)[0]
        assert abs(float(got) / float(x.float().norm()) - 1) < 0.01
    for q in (Shard(0), Replicate()):
        w = laid(x, q).requires_grad_()
        w.grad = laid(x, q)
        total = torch.nn.utils.clip_grad_norm_([w], 1.0)
        assert torch.isfinite(total).item()
        assert abs(float(w.grad.float().norm()) - 1) < 0.01
        same(torch._foreach_norm([laid(z, q)], 2)[0], z.norm())


@ranks(2)
def test_foreach_takes_a_tensor_for_alpha() -> None:
    """SGD with a tensor as lr and foreach hands it over as ``alpha=``."""
    v = gen(4, 4)
    w, plain = laid(v, Shard(0)).requires_grad_(), v.clone().requires_grad_()
    for p in (w, plain):
        p.square().sum().backward()  # type: ignore[no-untyped-call]
        lr = torch.tensor(0.1, dtype=torch.float64)
        torch.optim.SGD([p], lr=lr, foreach=True).step()
    same(w, plain)
