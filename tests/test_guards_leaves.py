"""Guards of DESIGN section 2: leaves, hooks, other reductions, bits."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from guard_helpers import PLACES, gen, lay, leaves, line, ranks, refused, same

from dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    count_collectives,
    get_rank,
    init_device_mesh,
    no_grad_sync,
)

AVG = Partial("avg")


# ---- 2.4 leaves ------------------------------------------------------------------------------
def three() -> Any:
    return leaves([gen(4), gen(3, 4, seed=1), gen(3, seed=2)], [Replicate()] * 3)


def loss_of(ps: Any, x: Any) -> Any:
    return ((x * ps[0]).sum() + (x @ ps[1].t() + ps[2]).square().sum()) * 1.0


@ranks(2)
def test_s2_4_leaves_are_reduced_once_per_backward_in_one_bucket() -> None:
    """2.4: three leaves, one all-reduce; again, without reducing the old gradient."""
    laid, plain = three()
    v = gen(6, 4, seed=3)
    for n in range(3):
        loss, want = loss_of(laid, lay(v, Shard(0))), loss_of(plain, v)
        with count_collectives() as c:
            loss.backward()
        assert c.calls("all_reduce") == c.calls() == 1, c.table()
        want.backward()
        for p, q in zip(laid, plain, strict=True):
            assert p.grad.placements == (Replicate(),)
            same(p.grad, q.grad, n)


@ranks(4)
def test_s2_4_one_bucket_per_axis() -> None:
    """2.4: on a 2-D mesh: one all-reduce per axis and dtype."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    w = lay(gen(4), Replicate(), Replicate(), mesh=mesh).requires_grad_()
    b = lay(gen(4, 4), Replicate(), Shard(0), mesh=mesh).requires_grad_()
    x = lay(gen(4, 4, seed=1), Shard(0), Replicate(), mesh=mesh)
    loss = ((x * w) @ b.t()).square().sum()
    with count_collectives() as c:
        loss.backward()
    assert c.calls("all_reduce", "dp") == 1, c.table()
    wr, br = gen(4).requires_grad_(), gen(4, 4).requires_grad_()
    ((gen(4, 4, seed=1) * wr) @ br.t()).square().sum().backward()
    same(w.grad, wr.grad)
    same(b.grad, br.grad)


@ranks(2)
def test_s2_4_order_is_the_same_on_all_ranks() -> None:
    """2.4: leaves reached in another order on each rank still pair up."""
    a, b = (lay(gen(4, seed=s), Replicate()).requires_grad_() for s in (0, 1))
    v = gen(4, seed=2)
    first, second = (a, b) if get_rank() == 0 else (b, a)
    once = (
        first * lay(v, Shard(0))
    ).sum()  # the engine goes from the last to the first
    twice = (second * lay(v, Shard(0))).sum() * 2
    (once + twice).backward()
    low, high = torch.tensor([1.0, 1, 2, 2]), torch.tensor([2.0, 2, 1, 1])
    same(a.grad, v * low)
    same(b.grad, v * high)


@ranks(2)
def test_s2_4_an_exception_in_backward_leaves_the_old_gradients() -> None:
    """2.4: what was in .grad is there again, and the next backward is right."""

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:  # type: ignore[override]
            raise ArithmeticError("on purpose")

    a, b = (lay(gen(4, seed=s), Replicate()).requires_grad_() for s in (0, 1))
    w = lay(gen(4, seed=2), Shard(0))
    ((a + b) * w).sum().backward()
    olds = [p.grad.to_local().clone() for p in (a, b)]
    with pytest.raises(ArithmeticError):
        ((Fail.apply(a) * w).sum() + (b * w).sum() * 3).backward()
    for p, old in zip((a, b), olds, strict=True):
        assert p.grad.placements == (Replicate(),)
        assert torch.equal(p.grad.to_local(), old)
    ((a + b) * w).sum().backward()
    for p in (a, b):
        same(p.grad, 2 * gen(4, seed=2))


@ranks(2)
def test_s2_4_an_exception_in_the_first_backward_leaves_none() -> None:
    """2.4: no half-made gradient stays."""
    a, b = (lay(gen(4, seed=s), Replicate()).requires_grad_() for s in (0, 1))
    y = a * 1
    y.register_hook(lambda g: 1 / 0)
    w = lay(gen(4), Shard(0))
    with pytest.raises(ZeroDivisionError):
        ((y * w).sum() + (b * w).sum()).backward()  # reaches b first
    assert a.grad is None and b.grad is None
    ((a + b) * w).sum().backward()
    same(a.grad, gen(4))
    same(b.grad, gen(4))


@ranks(2)
def test_s2_4_hooks_are_reattached() -> None:
    """2.4: after deepcopy, detach().requires_grad_(), data, Parameter."""
    w = lay(gen(4), Replicate()).requires_grad_()
    x = lay(gen(4, seed=1), Shard(0))
    for p in (
        copy.deepcopy(w),
        w.detach().requires_grad_(),
        torch.nn.Parameter(w.detach()),
        w.detach().clone().requires_grad_(True),
        torch.empty_like(w, requires_grad=True),
        torch.ones_like(w).requires_grad_(),
    ):
        (p * x).sum().backward()
        assert p.grad.placements == (Replicate(),)
        same(p.grad, gen(4, seed=1))
    q = w.detach()
    q.requires_grad = True
    (q * x).sum().backward()
    same(q.grad, gen(4, seed=1))


@ranks(2)
def test_s2_4_users_post_accumulate_hooks_run_after_the_reduction() -> None:
    """2.4: they see the whole gradient, once per backward, in its placements."""
    seen: list[Any] = []
    w = lay(gen(4), Replicate()).requires_grad_()
    s = lay(gen(4), Shard(0)).requires_grad_()
    handle = w.register_post_accumulate_grad_hook(
        lambda p: seen.append((p is w, p.grad.placements, p.grad.to_local().clone()))
    )
    s.register_post_accumulate_grad_hook(lambda p: seen.append("s"))
    (w * s).sum().backward()
    assert seen.count("s") == 1 and len(seen) == 2
    ((is_w, places, grad),) = [v for v in seen if v != "s"]
    assert is_w and places == (Replicate(),)
    same(grad, gen(4))
    handle.remove()
    (w * s).sum().backward()
    assert len(seen) == 3


@ranks(2)
def test_s2_4_no_grad_sync_leaves_addends() -> None:
    """2.4: a scope leaves gradients Partial; the next backward reduces the sum once."""
    w, wr = lay(gen(4), Replicate()).requires_grad_(), gen(4).requires_grad_()
    v = gen(6, 4, seed=1)
    with count_collectives() as c:
        with no_grad_sync():
            for _ in range(2):
                (lay(v, Shard(0)) @ w).square().sum().backward()
                assert w.grad.placements == (Partial(),)
    assert c.calls() == 0, c.table()
    with count_collectives() as c:
        (lay(v, Shard(0)) @ w).square().sum().backward()
    assert c.calls("all_reduce") == c.calls() == 1
    for _ in range(3):
        (v @ wr).square().sum().backward()
    assert w.grad.placements == (Replicate(),)
    same(w.grad, wr.grad)
    with no_grad_sync():  # a reduced gradient becomes addends again, not N of them
        (lay(v, Shard(0)) @ w).square().sum().backward()
    (v @ wr).square().sum().backward()
    same(w.grad, wr.grad)


@ranks(2)
def test_s2_4_sharded_leaves_need_nothing() -> None:
    """2.4: only what is Partial is reduced."""
    s = lay(gen(4), Shard(0)).requires_grad_()
    with count_collectives() as c:
        s.square().sum().backward()
    assert c.calls() == 0 and s.grad.placements == (Shard(0),)


@ranks(2)
def test_s2_4_partial_leaves() -> None:
    """2.4: a leaf that is Partial gets its gradient in its own placements."""
    for place in (Partial(), AVG):
        p = lay(gen(4), place).requires_grad_()
        p.redistribute(Replicate()).square().sum().backward()
        assert p.grad.placements == (place,)
        same(p.grad, 2 * gen(4), place)


@ranks(2)
def test_s2_4_autograd_grad_results_are_typed_and_settled() -> None:
    """2.4: torch.autograd.grad gives each input's own placements, and fills no .grad."""
    (x, w), (xr, wr) = leaves([gen(4, 3), gen(3)], [Shard(0), Replicate()])
    got = torch.autograd.grad((x @ w).square().sum(), [x, w])
    want = torch.autograd.grad((xr @ wr).square().sum(), [xr, wr])
    for g, v, r in zip(got, (x, w), want, strict=True):
        assert g.placements == v.placements and v.grad is None
        same(g, r)
    z = lay(gen(2), Shard(0)).requires_grad_()
    assert torch.autograd.grad((x * 1).sum(), [z], allow_unused=True) == (None,)
    refused(
        r"is_grads_batched \(vmap\) does not run over DTensors",
        lambda: torch.autograd.grad((x * 1).sum(), [x], is_grads_batched=True),
    )


@ranks(2)
def test_s2_4_backward_with_inputs() -> None:
    """2.4: backward(inputs=...) fills only those."""
    (a, b), _ = leaves([gen(4), gen(4, seed=1)], [Replicate(), Replicate()])
    (a * b * lay(gen(4, seed=2), Shard(0))).sum().backward(inputs=[a])
    same(a.grad, gen(4, seed=1) * gen(4, seed=2))
    assert b.grad is None


# ---- 2.5 hooks --------------------------------------------------------------------------------
@ranks(2)
def test_s2_5_register_hook_is_typed_and_its_answer_counts() -> None:
    """2.5: the hook gets the dual; what it returns may lie anyhow, but must fit."""
    x = lay(gen(4), Replicate()).requires_grad_()
    w = lay(gen(4, seed=1), Shard(0))
    for answer in (
        lambda g: g * 2,
        lambda g: (g * 2).redistribute(Replicate()),
        lambda g: (g * 2).redistribute([Shard(0)]),
    ):
        x.grad = None
        y = x * 1
        y.register_hook(answer)
        (y * w).sum().backward()
        same(x.grad, 2 * gen(4, seed=1))
    y = x * 1
    y.register_hook(lambda g: lay(gen(3), Replicate()))
    refused(
        r"register_hook: the returned gradient does not fit.*expected shape \(4,\)",
        lambda: (y * w).sum().backward(),
    )
    y = x * 1
    y.register_hook(lambda g: "no")
    refused(r"a hook returns a tensor or None", lambda: y.sum().backward(), TypeError)


@ranks(2)
def test_s2_5_leaf_hooks_see_the_dual_and_a_handle_removes_them() -> None:
    """2.5: register_hook on a leaf: the unreduced cotangent, typed."""
    x = lay(gen(4), Replicate()).requires_grad_()
    seen: list[Any] = []
    handle = x.register_hook(seen.append)
    (x * lay(gen(4, seed=1), Shard(0))).sum().backward()
    assert seen[0].placements == (Partial(),)
    same(seen[0], gen(4, seed=1))
    handle.remove()
    (x * 1).sum().backward()
    assert len(seen) == 1


@ranks(2)
def test_s2_5_retained_gradients_are_typed() -> None:
    """2.5: retain_grad keeps the dual, readable without communication."""
    x = lay(gen(4), Replicate()).requires_grad_()
    y = x * 1
    y.retain_grad()
    (y * lay(gen(4, seed=1), Shard(0))).sum().backward()
    assert y.grad.placements == (Partial(),)
    same(y.grad, gen(4, seed=1))


# ---- 2.6 other reductions -----------------------------------------------------------------------
@ranks(2)
def test_s2_6_partial_of_other_reductions_has_no_dual() -> None:
    """2.6: the duals hold for sum and avg alone."""
    for op in ("max", "min", "product"):
        refused(
            rf"gradient: addends of a {op} have no cotangent",
            lambda op=op: lay(gen(4), Partial(op)).requires_grad_(),
        )
    refused(
        "Partial: unknown reduction, got 'nonsense'.*sum, avg",
        lambda: Partial("nonsense"),
    )


REDUCTIONS: dict[str, Any] = {
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(),
    "max": lambda x: x.max(),
    "prod": lambda x: x.prod(),
    "prod dim": lambda x: x.prod(0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
@ranks(2)
def test_s2_6_ties_and_zeros_as_in_torch(name: str, place: Any) -> None:
    """2.6: amax with ties, prod with zeros: first and second derivatives."""
    v = torch.tensor([[2.0, 0.0, 3.0], [2.0, 1.0, 0.0], [1.0, 0.0, 3.0]]).double()
    (x,), (xr,) = leaves([v], [place])
    y, yr = REDUCTIONS[name](x), REDUCTIONS[name](xr)
    same(y, yr)
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (gr,) = torch.autograd.grad(yr.square().sum(), xr, create_graph=True)
    same(g, gr)
    (h,) = torch.autograd.grad(g.sum(), x)
    (hr,) = torch.autograd.grad(gr.sum(), xr)
    same(h, hr)


# ---- 2.7 bits ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@ranks(4)
def test_s2_7_all_reduce_has_the_same_bits_everywhere(dtype: torch.dtype) -> None:
    """2.7: else replicas drift."""
    mesh = line(4)
    part = (gen(257, seed=get_rank()) * 10.0 ** gen(257, seed=9)).to(dtype)
    x = DTensor.from_local(part, mesh, [Partial()], run_check=False)
    full = x.full_tensor()
    for other in x._spec.comm(0).all_gather_object(full):
        assert torch.equal(other, full)
    w = lay(torch.ones(257, dtype=dtype), Replicate(), mesh=mesh).requires_grad_()
    (DTensor.from_local(part, mesh, [Partial()], run_check=False) * w).sum().backward()
    for other in x._spec.comm(0).all_gather_object(w.grad.to_local()):
        assert torch.equal(other, w.grad.to_local())


def test_s2_7_no_thread_is_left_behind() -> None:
    """The ranks of these tests are gone."""
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]
