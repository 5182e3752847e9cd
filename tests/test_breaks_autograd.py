"""Gradients that broke once: averages in no_grad_sync, writes after a gather, detach_."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from guard_helpers import gen, lay, line, ranks, same
from op_harness import place

from dtensor import (
    Partial,
    Replicate,
    Shard,
    init_device_mesh,
    no_grad_sync,
    redistribution,
)

AVG = Partial("avg")
ALL: tuple[Any, ...] = (Shard(0), Shard(1), Replicate(), Partial(), AVG)


@ranks(2)
def test_the_gradient_of_an_average_reads_right_in_no_grad_sync() -> None:
    """Its local addends are n-ths: as a Replicate they would read n times too small."""
    v = gen(4, 3)
    for p in ALL:
        w, plain = place(v, line(), (p,)).requires_grad_(), v.clone().requires_grad_()
        for n in range(4):
            (plain * plain).sum().backward()  # type: ignore[no-untyped-call]
            with redistribution("allow"):
                if n == 2:
                    (w * w).sum().backward()  # type: ignore[no-untyped-call]
                else:
                    with no_grad_sync():
                        (w * w).sum().backward()  # type: ignore[no-untyped-call]
            same(w.grad, plain.grad, (p, n))  # type: ignore[arg-type]


@ranks(4)
def test_what_was_redistributed_may_be_written_on_every_rank() -> None:
    """A gathered buffer was a view on the ranks whose shard had one row only."""
    mesh = init_device_mesh("cpu", (2, 2))
    with redistribution("allow"):
        for rows in (1, 4):
            v = gen(rows, 4)
            for src, dst in itertools.product(
                itertools.product(ALL[:4], repeat=2), repeat=2
            ):
                x = place(v, mesh, src).requires_grad_()
                y = (x * 1.0).redistribute(  # type: ignore[attr-defined]
                    list(dst)
                )
                y.mul_(2.0)
                same(y, v * 2, (rows, src, dst))


@pytest.mark.filterwarnings("ignore:Using backward")
@ranks(2)
def test_gradients_of_a_bucket_can_be_detached_in_place() -> None:
    """``zero_grad(set_to_none=False)`` after create_graph, and ``p.grad.detach_()``."""
    for create in (False, True):
        ws = [lay(gen(3, seed=s), Replicate()).requires_grad_() for s in range(3)]
        x = lay(gen(6, 3), Shard(0))
        sum((x * w * w).sum() for w in ws).backward(create_graph=create)  # type: ignore[union-attr]
        torch.optim.SGD(ws, lr=0.1).zero_grad(set_to_none=False)
        for w in ws:
            assert w.grad is not None
            w.grad.detach_()
            same(w.grad, torch.zeros(3, dtype=torch.float64))


@ranks(2)
def test_materialized_gradients_lie_as_their_tensors_do() -> None:
    """Zeros for an unused Partial tensor were Replicate."""
    used = lay(gen(3), Replicate()).requires_grad_()
    for p in (Replicate(), Partial(), Shard(0)):
        unused = place(gen(4), line(), (p,)).requires_grad_()
        loss = (used * used).sum()
        g = torch.autograd.grad(loss, [used, unused], materialize_grads=True)[1]
        assert g.placements == (p,)  # type: ignore[attr-defined]
        same(g, torch.zeros(4, dtype=torch.float64))
