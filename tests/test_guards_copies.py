"""Guards of DESIGN section 1: copies, files, loads, assignments, GradScaler."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from guard_helpers import PLACES, gen, lay, line, ranks, refused, same
from torch import nn

from dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    count_collectives,
    get_rank,
    simulate,
)

PLAN = {"0.weight": Replicate(), "0.bias": Replicate()}


def plain_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)).double()


def laid_net() -> Any:
    """The same net; first layer replicated, second sharded."""
    net = plain_net()
    for name, p in list(net.named_parameters()):
        owner, _, last = name.rpartition(".")
        laid = lay(p.detach(), PLAN.get(name, Shard(0)))
        setattr(net.get_submodule(owner), last, nn.Parameter(laid))
    return net


def loss(net: Any) -> Any:
    x = gen(3, 4, dtype=next(net.parameters()).dtype)
    if isinstance(net[0].weight, DTensor):
        x = lay(x, Replicate())
    return net(x).square().sum()


def revive(how: str, net: Any) -> Any:
    if how == "deepcopy":
        return copy.deepcopy(net)
    if how == "pickle":
        return pickle.loads(pickle.dumps(net))
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    fresh = laid_net()
    fresh.load_state_dict(torch.load(file, weights_only=True), assign=True)
    return fresh


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "load"])
@ranks(2)
def test_s1_copies_are_typed_watched_parameters(how: str) -> None:
    """1: specs re-interned, leaf hooks re-attached, Parameters stay Parameters."""
    net = laid_net()
    loss(net).backward()
    net[0].weight.note = ["kept"]
    again = revive(how, net)
    for (name, p), q in zip(net.named_parameters(), again.parameters(), strict=True):
        assert isinstance(q, nn.Parameter) and type(q) is DTensor, name
        assert q._spec is p._spec and q is not p, name
        assert q.data_ptr() != p.data_ptr(), name
        assert q.requires_grad and q.is_leaf, name
        same(q, p.full_tensor(), name)
    if how != "load":
        assert again[0].weight.note == ["kept"]
    assert (again[0].weight.grad is not None) == (how == "deepcopy")
    again.zero_grad()
    loss(again).backward()
    want = plain_net()
    loss(want).backward()
    for p, q in zip(want.parameters(), again.parameters(), strict=True):
        assert q.grad.placements == q.placements
        same(q.grad, p.grad)


@ranks(2)
def test_s1_deepcopy_of_single_tensors() -> None:
    """1: deepcopy: .grad, Partial ones too, sharing, requires_grad False, non-leaves."""
    for p in PLACES:
        x = lay(gen(3, 4), p)
        y = copy.deepcopy(x)
        assert y._spec is x._spec and not y.requires_grad
        same(y, gen(3, 4))
    w = lay(gen(4), Replicate()).requires_grad_()
    (w * w).sum().backward()
    pair = copy.deepcopy([w, w])
    assert pair[0] is pair[1]
    same(pair[0].grad, 2 * gen(4))
    assert pair[0].grad is not w.grad
    pair[0].grad.zero_()
    same(w.grad, 2 * gen(4))
    (pair[0] * 3).sum().backward()
    same(pair[0].grad, torch.full((4,), 3.0, dtype=torch.float64))
    assert "_leaf_number" in pair[0].__dict__
    assert pair[0].__dict__["_leaf_number"] != w.__dict__["_leaf_number"]
    refused(
        r"deepcopy: only leaves.*x\.detach\(\)",
        lambda: copy.deepcopy(w * 1),
        RuntimeError,
    )


@ranks(2)
def test_s1_deepcopy_between_micro_batches() -> None:
    """1: an unreduced gradient stays one in the copy, and is reduced later."""
    from dtensor import no_grad_sync

    w = lay(gen(4), Replicate()).requires_grad_()
    x = lay(gen(4, 4), Shard(0))
    with no_grad_sync():
        (x @ w).sum().backward()
    c = copy.deepcopy(w)
    assert c.grad.placements == (Partial(),)
    with count_collectives() as counted:
        (x @ c).sum().backward()
    assert counted.calls("all_reduce") == counted.calls() == 1
    same(c.grad, 2 * gen(4, 4).sum(0))


@ranks(2)
def test_s1_copy_copy_shares_memory() -> None:
    """1: copy.copy, as torch's, is another object on the same shard."""
    x = nn.Parameter(lay(gen(4), Replicate()))  # a leaf whose gradient is reduced
    y = copy.copy(x)
    assert y is not x and y.data_ptr() == x.data_ptr() and y._spec is x._spec
    assert isinstance(y, nn.Parameter) and "_leaf_number" in y.__dict__


def test_s1_pickle_of_another_ranks_shard_is_refused() -> None:
    """1: a file of rank 0 must not become rank 1's shard."""

    def write() -> bytes:
        return pickle.dumps(lay(gen(4), Shard(0)))

    def write_whole() -> bytes:
        return pickle.dumps(lay(gen(4), Replicate()))

    file, whole = simulate(write, 2)[0], simulate(write_whole, 2)[0]

    def read() -> None:
        same(pickle.loads(whole), gen(4))
        if get_rank() == 0:
            assert pickle.loads(file).to_local().shape == (2,)
        else:
            refused(
                r"load: this is the shard of another rank, written at coordinate "
                r"\(0,\).*read at \(1,\).*file of its own",
                lambda: pickle.loads(file),
            )

    simulate(read, 2)


@ranks(2)
def test_s1_full_plain_state_dict_loads_by_slicing() -> None:
    """1: a full plain state_dict loads, cut per rank; wrong shapes are refused."""
    torch.manual_seed(7)
    other = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)).double()
    state = {k: v.clone() for k, v in other.state_dict().items()}
    net = laid_net()
    places = [p.placements for p in net.parameters()]
    net.load_state_dict(state)
    assert [p.placements for p in net.parameters()] == places
    for (name, p), want in zip(net.named_parameters(), state.values(), strict=True):
        same(p, want, name)
    for v, want in zip(state.values(), other.parameters(), strict=True):
        assert torch.equal(v, want)  # the source is untouched
    local = {k: v.to_local() for k, v in net.state_dict().items()}
    refused(
        r"size mismatch for 2.weight", lambda: net.load_state_dict(local), Exception
    )
    x = lay(gen(4), Partial())
    x.copy_(gen(4, seed=3))
    same(x, gen(4, seed=3))
    refused(r"copy: got a plain tensor of shape \(2,\)", lambda: x.copy_(gen(2)))
    with_grad = gen(4).requires_grad_()
    refused(r"copy: got a plain tensor of shape \(4,\)", lambda: x.copy_(with_grad))


@ranks(2)
def test_s1_state_dict_is_typed() -> None:
    """1: state_dict gives DTensors, keep_vars the parameters, load by redistribution."""
    net = laid_net()
    state = net.state_dict()
    assert all(type(v) is DTensor and not v.requires_grad for v in state.values())
    assert net.state_dict(keep_vars=True)["0.weight"] is net[0].weight
    moved = {k: v.redistribute([Replicate()]) * 2 for k, v in state.items()}
    net.load_state_dict(moved)
    assert net[2].weight.placements == (Shard(0),)
    same(net[2].weight, 2 * plain_net()[2].weight)


@ranks(2)
def test_s1_module_conversions() -> None:
    """1: to(dtype), half, double, apply keep parameters, layout, gradients."""
    net = laid_net()
    loss(net).backward()
    kept = list(net.parameters())
    net.to(torch.float32)
    for p, q in zip(kept, net.parameters(), strict=True):
        assert p is q and q.dtype == torch.float32 and q.grad.dtype == torch.float32
        assert q.grad.placements == q.placements
    net.zero_grad()
    loss(net).backward()
    want = plain_net().float()
    loss(want).backward()
    for p, q in zip(want.parameters(), net.parameters(), strict=True):
        same(q.grad, p.grad)
    assert all(p.dtype == torch.float16 for p in net.half().parameters())
    assert all(p.dtype == torch.float64 for p in net.double().parameters())
    net.apply(lambda m: m.weight.data.zero_() if hasattr(m, "weight") else None)
    same(net[2].weight, torch.zeros(4, 6, dtype=torch.float64))


@ranks(2)
def test_s1_data_and_grad_assignments_check_the_spec() -> None:
    """1: p.data = x and p.grad = x."""
    p = nn.Parameter(lay(gen(4, 2), Shard(0)))
    p.data = lay(gen(4, 2, seed=1), Shard(0))
    same(p, gen(4, 2, seed=1))

    def data(v: Any) -> Any:
        return lambda: setattr(p, "data", v)

    def grad(v: Any) -> Any:
        return lambda: setattr(p, "grad", v)

    mend = r"data: only a DTensor of the same layout.*redistribute\(x\.placements\)"
    refused(mend, data(gen(2, 2)))
    refused(mend, data(lay(gen(4, 2), Shard(1))))
    refused(mend, data(lay(gen(2, 2), Shard(0))))
    mend = r"grad: a gradient lies as its tensor does.*distribute_tensor\(g, p"
    refused(mend, grad(gen(2, 2)))
    refused(mend, grad(lay(gen(4, 2), Shard(1))))
    refused(mend, grad(lay(gen(4, 2), Replicate())))
    p.grad = lay(gen(4, 2), Shard(0))
    same(p.grad, gen(4, 2))
    p.grad = None
    assert p.grad is None


@ranks(2)
def test_s1_gradscaler_found_inf_is_of_all_ranks() -> None:
    """1: one rank's infinity stops the step on every rank."""
    net = laid_net().float()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for broken in (False, True, False):
        optimizer.zero_grad()
        scaler.scale(loss(net)).backward()
        if broken and get_rank() == 1:
            net[2].weight.grad.to_local()[0, 0] = float("inf")
        before = net[0].weight.full_tensor().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, net[0].weight.full_tensor()) == broken
    assert scaler.get_scale() == 2.0


@ranks(2)
def test_s1_unscale_divides_and_sees_overflowing_sums() -> None:
    """1: the scaler's op itself: values, and a sum of addends that overflows."""
    check = torch._amp_foreach_non_finite_check_and_unscale_
    g = lay(gen(4), Shard(0))
    found = torch.zeros(1)
    check([g], found, torch.tensor(0.5))
    same(g, gen(4) / 2)
    assert found.item() == 0
    big = torch.full((2,), 3e38)
    p = DTensor.from_local(big, line(), [Partial()], run_check=False)
    check([p], found, torch.tensor(1.0))
    assert found.item() == 1


@ranks(2)
def test_s1_parameters_to_vector_and_back() -> None:
    """1: parameters_to_vector, vector_to_parameters keep each layout."""
    net, want = laid_net(), plain_net()
    v = nn.utils.parameters_to_vector(net.parameters())
    same(v, nn.utils.parameters_to_vector(want.parameters()))
    places = [p.placements for p in net.parameters()]
    nn.utils.vector_to_parameters(v.detach() * 2, net.parameters())
    nn.utils.convert_parameters.vector_to_parameters(v.detach() * 2, net.parameters())
    assert [p.placements for p in net.parameters()] == places
    for p, q in zip(want.parameters(), net.parameters(), strict=True):
        same(q, p * 2)


@pytest.mark.parametrize("foreach", [None, False])
@ranks(2)
def test_s1_gradient_clipping(foreach: bool | None) -> None:
    """1: clip_grad_norm_ and clip_grad_value_ take the global values."""
    net, want = laid_net(), plain_net()
    for n in (net, want):
        loss(n).backward()
    total = nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=foreach)
    same(total, nn.utils.clip_grad_norm_(want.parameters(), 1.0))
    for p, q in zip(want.parameters(), net.parameters(), strict=True):
        same(q.grad, p.grad)
    for n in (net, want):
        nn.utils.clip_grad_value_(n.parameters(), 0.05, foreach=foreach)
    for p, q in zip(want.parameters(), net.parameters(), strict=True):
        same(q.grad, p.grad)
