"""Guards of DESIGN section 2: duals, boundaries, seeds, leaves, hooks."""

from __future__ import annotations

import itertools
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
def test_s2_1_primitives_of_the_table(
    src: Any, dst: Any, forth: Any, back: Any
) -> None:
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
