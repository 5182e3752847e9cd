"""Random ops: one global sample for every placement, alike on all copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_harness import GRID, LINE, T, eighths, options, place, positive, unit

from dtensor import DeviceMesh, DTensor, get_rank, redistribution, simulate
from dtensor.placement import Placements, Replicate
from dtensor.tensor import local_of

A = eighths(5, 3)
OPS: dict[str, tuple[Callable[..., Any], T]] = {
    "normal_": (lambda x: (x * 1).normal_(1.0, 2.0), A),
    "uniform_": (lambda x: (x * 1).uniform_(-1, 1), A),
    "bernoulli_": (lambda x: (x * 1).bernoulli_(0.5), A),
    "exponential_": (lambda x: (x * 1).exponential_(), A),
    "geometric_": (lambda x: (x * 1).geometric_(0.5), A),
    "cauchy_": (lambda x: (x * 1).cauchy_(), A),
    "log_normal_": (lambda x: (x * 1).log_normal_(), A),
    "random_": (lambda x: (x * 1).random_(10), A),
    "rand_like": (torch.rand_like, A),
    "randn_like": (torch.randn_like, A),
    "randint_like": (lambda x: torch.randint_like(x, 0, 10), A),
    "randn_like dtype": (lambda x: torch.randn_like(x, dtype=torch.float32), A),
    "bernoulli": (torch.bernoulli, unit(5, 3).abs()),
    "poisson": (torch.poisson, positive(5, 3)),
    "multinomial": (lambda x: torch.multinomial(x, 2), positive(5, 3)),
    "normal": (lambda x: torch.normal(x, 2.0), A),
    "dropout": (lambda x: F.dropout(x, 0.5), A),
    "dropout inplace": (lambda x: F.dropout(x * 1, 0.5, inplace=True), A),
    "dropout1d": (lambda x: F.dropout1d(x, 0.5), eighths(2, 5, 3)),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.5, True), A),
    "feature_alpha_dropout": (
        lambda x: F.feature_alpha_dropout(x, 0.5, True),
        eighths(2, 5, 3),
    ),
    "rrelu": (lambda x: F.rrelu(x, training=True), A),
    "gumbel_softmax": (lambda x: F.gumbel_softmax(x), A),
    "attention dropout": (
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        eighths(2, 4, 5, 2),
    ),
    "init normal": (lambda x: torch.nn.init.normal_(x * 1), A),
    "init xavier": (lambda x: torch.nn.init.xavier_uniform_(x * 1), A),
    "init kaiming": (lambda x: torch.nn.init.kaiming_uniform_(x * 1), A),
    "init orthogonal": (lambda x: torch.nn.init.orthogonal_(x * 1), A),
    "init trunc": (lambda x: torch.nn.init.trunc_normal_(x * 1), A),
}
FILLS = ("_", "inplace", "init")


def samples(mesh: DeviceMesh, seed_by_rank: bool) -> dict[str, dict[str, T]]:
    """Each op's whole sample for each placement, on one rank."""
    found: dict[str, dict[str, T]] = {}
    with redistribution("allow"):
        for name, (op, t) in OPS.items():
            for p in options(t, mesh.ndim)[:: 1 if mesh.ndim == 1 else 3]:
                fills = name.endswith("_") or name.startswith("init")
                if fills and any(q.is_partial() for q in p):
                    continue
                torch.manual_seed(3 + (get_rank() if seed_by_rank else 0))
                out = op(place(t, mesh, p))
                assert isinstance(out, DTensor), name
                assert local_of(out).shape == out._spec.local_shape, (name, p)
                found.setdefault(name, {})[str(p)] = out.full_tensor()
    return found


@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["one axis", "two axes"])
@pytest.mark.parametrize("seed_by_rank", [False, True])
def test_one_sample(mesh: DeviceMesh, seed_by_rank: bool) -> None:
    ranks = simulate(samples, args=(mesh, seed_by_rank))
    for name in OPS:
        first = next(iter(ranks[0][name].values()))
        assert first.unique().numel() > 1 or name == "geometric_", name
        for rank, found in enumerate(ranks):
            for p, got in found[name].items():
                assert torch.allclose(got, first), f"{name} at {p} on rank {rank}"


def test_dropout_gradient_uses_the_mask() -> None:
    def program() -> None:
        for p in options(A, 1):
            torch.manual_seed(1)
            x = place(A, LINE, p).requires_grad_()
            y = F.dropout(x, 0.25)
            (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
            wanted = (y.detach().full_tensor() / A).round(decimals=6)
            assert torch.allclose(g.full_tensor(), wanted, atol=1e-6), p

    simulate(program)


def test_samples_differ_from_call_to_call_and_follow_the_seed() -> None:
    def program() -> list[T]:
        whole: Placements = (Replicate(),)
        x = place(A, LINE, whole)
        torch.manual_seed(5)
        one, two = torch.rand_like(x), torch.rand_like(x)
        torch.manual_seed(5)
        again = torch.rand_like(x)
        return [o.full_tensor() for o in (one, two, again)]  # type: ignore[attr-defined]

    one, two, again = simulate(program)[0]
    assert not torch.equal(one, two)
    assert torch.equal(one, again)
