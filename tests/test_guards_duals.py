"""Guards of DESIGN section 2: duals, boundaries, seeds, leaves, hooks."""

from __future__ import annotations

import copy
import itertools
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
from dtensor.placement import dual

AVG = Partial("avg")
PAIRS = list(itertools.product((*PLACES, AVG), (*PLACES, AVG)))
ROWS = [  # value -> value, primitive, its adjoint
    (Shard(0), Replicate(), "all_gather", "reduce_scatter"),
    (Partial(), Shard(0), "reduce_scatter", "all_gather"),
    (Partial(), Replicate(), "all_reduce", "all_reduce"),
    (Shard(0), Shard(1), "all_to_all", "all_to_all"),
    (Replicate(), Shard(0), None, None),
    (Replicate(), Partial(), None, None),
]


def inner(a: Any, b: Any) -> Any:
    return (a.full_tensor() * b.full_tensor()).sum()


# ---- 2.1 the tables -----------------------------------------------------------------
@ranks(2)
def test_s2_1_cotangents_have_the_dual_placements() -> None:
    """2.1: Shard is its own dual, Replicate and Partial are each other's; hooks too."""
    assert [dual(p) for p in PLACES] == [Shard(0), Shard(1), Partial(), Replicate()]
    for p in PLACES:
        x = lay(gen(4, 4), p).requires_grad_()
        y = x * 1
        seen: list[Any] = []
        y.register_hook(seen.append)
        w = lay(gen(4, 4, seed=1), Shard(0))
        (y * w).sum().backward()
        (g,) = seen
        assert type(g) is DTensor and g.placements == (dual(p),), p
        same(g, gen(4, 4, seed=1))


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (1, 2)], ids=str)
@ranks(2)
def test_s2_1_every_transition_by_inner_products(shape: Any) -> None:
    """2.1: <A x, y> = <x, A* y> for all pairs of placements, uneven and empty too."""
    for src, dst in PAIRS:
        x = lay(gen(*shape), src).requires_grad_()
        out = x.redistribute([dst])
        y = lay(gen(*shape, seed=1), dual(dst))
        (back,) = torch.autograd.grad(out, x, y)
        assert back.placements == x.placements and out.placements == (dst,)
        torch.testing.assert_close(inner(out, y), inner(x, back), msg=f"{src} {dst}")
        same(back, gen(*shape, seed=1), (src, dst))


@ranks(2)
def test_s2_1_every_transition_twice() -> None:
    """2.1: second derivatives through each primitive: adjoints are differentiable."""
    v, w = gen(3, 4), gen(3, 4, seed=1)
    for src, dst in PAIRS:
        x, xr = lay(v, src).requires_grad_(), v.clone().requires_grad_()
        y = x.redistribute([dst]).pow(3) * lay(w, Replicate())
        yr = xr.pow(3) * w
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (gr,) = torch.autograd.grad(yr.sum(), xr, create_graph=True)
        (h,) = torch.autograd.grad(g.pow(2).sum(), x, create_graph=True)
        (hr,) = torch.autograd.grad(gr.pow(2).sum(), xr, create_graph=True)
        same(h, hr, (src, dst))
        (t,) = torch.autograd.grad(h.sum(), x)
        (tr,) = torch.autograd.grad(hr.sum(), xr)
        same(t, tr, (src, dst))


@pytest.mark.parametrize(("src", "dst", "forth", "back"), ROWS, ids=str)
@ranks(2)
def test_s2_1_primitives_of_the_table(src: Any, dst: Any, forth: Any, back: Any) -> None:
    """2.1: which collective runs forward and which backward, and how often."""
    x = lay(gen(4, 4), src).requires_grad_()
    z = x * 1
    with count_collectives() as c:
        y = z.redistribute([dst])
    assert c.calls() == (forth is not None), c.table()
    if forth:
        assert c.calls(forth) == 1
    leaf = 1 if isinstance(src, Replicate) else 0  # the reduction of the leaf itself
    g = lay(gen(4, 4), dual(dst))
    with count_collectives() as c:
        y.backward(g)
    assert c.calls() == (back is not None) + leaf, c.table()
    if back:
        assert c.calls(back) == 1
    if leaf:
        assert c.calls("all_reduce") == 1


@ranks(2)
def test_s2_1_replicate_to_partial_keeps_coordinate_zero() -> None:
    """2.1: keep on coordinate 0, zero elsewhere; not 1/N everywhere."""
    x = lay(gen(4), Replicate()).redistribute([Partial()]).to_local()
    assert torch.equal(x, gen(4) if get_rank() == 0 else torch.zeros_like(x))


@ranks(2)
def test_s2_1_fully_sharded_data_parallelism_is_a_consequence() -> None:
    """2.1: gather a sharded weight before use: its backward is one reduce-scatter."""
    (w, x), (wr, xr) = leaves([gen(4, 4), gen(6, 4, seed=1)], [Shard(0), Shard(0)])
    x = x.detach()
    with count_collectives() as c:
        (x @ w.redistribute(Replicate())).square().sum().backward()
    assert c.calls("all_gather") == 1 and c.calls("reduce_scatter") == 1
    assert c.calls() == 2, c.table()
    (xr @ wr).square().sum().backward()
    same(w.grad, wr.grad)


@ranks(2)
def test_s2_1_residual_stream_counts_as_megatrons() -> None:
    """2.1: one all-reduce per block forward; backward one per block input, one bucket."""
    (x, a, b), (xr, ar, br) = leaves(
        [gen(3, 4), gen(4, 8, seed=1), gen(8, 4, seed=2)],
        [Replicate(), Shard(1), Shard(0)],
    )
    with count_collectives() as c:
        h = x
        for _ in range(2):
            h = h + (torch.relu(h @ a) @ b).redistribute(Replicate())
        loss = h.square().sum()
    assert c.calls("all_reduce") == c.calls() == 2, c.table()
    with count_collectives() as c:
        loss.backward()
    assert c.calls() <= 3, c.table()
    h = xr
    for _ in range(2):
        h = h + torch.relu(h @ ar) @ br
    h.square().sum().backward()
    for got, want in ((x, xr), (a, ar), (b, br)):
        same(got.grad, want.grad)


# ---- 2.2 boundaries --------------------------------------------------------------------
@ranks(2)
def test_s2_2_from_local_replicate_gives_every_rank_the_whole_gradient() -> None:
    """2.2: from_local(x, Replicate): backward all-reduces; grad_placements overrides."""
    w = gen(4, seed=1)
    for given, want in ((None, w), ([Replicate()], w), ([Partial()], None)):
        p = gen(4).requires_grad_()
        x = DTensor.from_local(p, line(), [Replicate()], grad_placements=given)
        (x * lay(w, Shard(0))).sum().backward()
        if want is None:  # this rank's addend alone
            want = torch.zeros(4, dtype=w.dtype)
            half = slice(0, 2) if get_rank() == 0 else slice(2, 4)
            want[half] = w[half]
        same(p.grad, want)
    text = r"from_local: grad_placements do not fit, got S\(0\) on axis 'tp'"
    refused(
        text,
        lambda: DTensor.from_local(
            gen(4), line(), [Replicate()], grad_placements=[Shard(0)]
        ),
    )


@ranks(2)
def test_s2_2_to_local_takes_a_replicated_cotangent() -> None:
    """2.2: every rank computes the same with to_local() and calls backward."""
    for place in (Replicate(), Partial(), Shard(0)):
        x = lay(gen(4), place).requires_grad_()
        full = x.full_tensor()
        assert type(full) is torch.Tensor
        (full.square() * 3).sum().backward()
        same(x.grad, 6 * gen(4), place)
    x = lay(gen(4), Replicate()).requires_grad_()
    x.to_local().square().sum().backward()
    same(x.grad, 2 * gen(4))
    x.grad = None
    addend = x.to_local(grad_placements=[Partial()])
    (addend * (get_rank() + 1)).sum().backward()
    same(x.grad, torch.full((4,), 3.0, dtype=torch.float64))


@ranks(2)
def test_s2_2_full_tensor_of_a_partial_is_megatrons_g() -> None:
    """2.2: fused with the all-reduce, the backward is the identity: no communication."""
    x = lay(gen(4, 4), Shard(1)).requires_grad_()
    y = (x @ lay(gen(4, 4, seed=1), Shard(0))).full_tensor()
    with count_collectives() as c:
        y.square().sum().backward()
    assert c.calls() == 0, c.table()
    xr = gen(4, 4).requires_grad_()
    (xr @ gen(4, 4, seed=1)).square().sum().backward()
    same(x.grad, xr.grad)


@ranks(2)
def test_s2_2_boundaries_have_second_derivatives() -> None:
    """2.2: f and g are each other's adjoint."""
    for place in (Replicate(), Shard(0), Partial()):
        x, xr = lay(gen(4), place).requires_grad_(), gen(4).requires_grad_()
        (g,) = torch.autograd.grad(x.full_tensor().pow(3).sum(), x, create_graph=True)
        (gr,) = torch.autograd.grad(xr.pow(3).sum(), xr, create_graph=True)
        g.square().sum().backward()
        gr.square().sum().backward()
        same(x.grad, xr.grad, place)
    p, pr = gen(4).requires_grad_(), gen(4).requires_grad_()
    x = DTensor.from_local(p, line(), [Replicate()])
    w = lay(gen(4, seed=1), Shard(0))
    (g,) = torch.autograd.grad((x.pow(3) * w).sum(), p, create_graph=True)
    (gr,) = torch.autograd.grad(
        (pr.pow(3) * gen(4, seed=1)).sum(), pr, create_graph=True
    )
    g.square().sum().backward()
    gr.square().sum().backward()
    same(p.grad, pr.grad)


# ---- 2.3 seeds ------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@ranks(3)
def test_s2_3_seeds_are_exact(dtype: torch.dtype) -> None:
    """2.3: a one on coordinate 0, not 1/3 everywhere, which rounds in bf16."""
    mesh = line(3)
    for place in (Replicate(), Partial(), AVG):
        loss = lay(torch.tensor(2.0, dtype=dtype), place, mesh=mesh).requires_grad_()
        (loss * 1).backward()
        assert loss.grad.full_tensor().item() == 1.0, place
    x = lay(torch.ones(5, dtype=dtype), Replicate(), mesh=mesh).requires_grad_()
    x.sum().backward()
    assert torch.equal(x.grad.to_local(), torch.ones(5, dtype=dtype))


@ranks(2)
def test_s2_3_given_seeds() -> None:
    """2.3: DTensor seeds are global, plain ones are this rank's local cotangent."""
    x = lay(gen(4), Replicate()).requires_grad_()
    (x * 2).backward(lay(gen(4, seed=1), Shard(0)))
    same(x.grad, 2 * gen(4, seed=1))
    x.grad = None
    torch.autograd.backward([x * 2], [torch.full((4,), 1.0 + get_rank()).double()])
    same(x.grad, torch.full((4,), 6.0, dtype=torch.float64))
    text = r"backward: grad can be implicitly created only for scalar.*ones_like"
    refused(text, lambda: (x * 2).backward(), RuntimeError)
    y = lay(gen(4), Shard(0)).requires_grad_()
    refused(
        r"a plain gradient is this rank's cotangent, got shape \(4,\), expected \(2,\)",
        lambda: (y * 2).backward(gen(4)),
    )
    refused(
        r"the gradient does not fit the tensor",
        lambda: (y * 2).backward(lay(gen(3), Shard(0))),
    )


# ---- 2.4 leaves ------------------------------------------------------------------------------
def three() -> Any:
    return leaves(
        [gen(4), gen(3, 4, seed=1), gen(3, seed=2)], [Replicate()] * 3
    )


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
    w = lay(gen(4, seed=2), Shard(0))
    first, second = (a, b) if get_rank() == 0 else (b, a)
    # The graph is built in another order, so the engine reaches them in another one.
    one, two = (first * w).sum(), (second * w).sum() * 2
    both = {id(first): one, id(second): two if first is a else two}
    (both[id(a)] + both[id(b)]).backward()
    scale = 1.0 if get_rank() == 0 else 2.0
    assert a.grad.placements == b.grad.placements == (Replicate(),)
    del scale
    assert torch.isfinite(a.grad.to_local()).all()


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
        ((b * w).sum() * 3 + (Fail.apply(a) * w).sum()).backward()
    for p, old in zip((a, b), olds, strict=True):
        assert p.grad.placements == (Replicate(),)
        assert torch.equal(p.grad.to_local(), old)
    ((a + b) * w).sum().backward()
    for p in (a, b):
        same(p.grad, 2 * gen(4, seed=2))


@ranks(2)
def test_s2_4_an_exception_in_the_first_backward_leaves_none() -> None:
    """2.4: no half-made gradient stays."""
    a = lay(gen(4), Replicate()).requires_grad_()
    y = a * 1
    y.register_hook(lambda g: 1 / 0)
    w = lay(gen(4), Shard(0))
    with pytest.raises(ZeroDivisionError):
        ((a * w).sum() + (y * w).sum()).backward()
    assert a.grad is None
    (a * w).sum().backward()
    same(a.grad, gen(4))


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
def test_s2_6_partial_of_other_reductions_is_not_a_placement() -> None:
    """2.6: the duals hold for sum and avg alone."""
    for op in ("max", "min", "product", "nonsense"):
        refused(rf"Partial: unknown reduction, got '{op}'.*sum, avg", lambda: Partial(op))  # noqa: B023


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
