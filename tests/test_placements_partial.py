"""Addends of every reduction: values, dtypes, gradients, and what ops do with them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardingError,
    distribute_tensor,
    get_rank,
    init_device_mesh,
    simulate,
)
from dtensor.factories import ones as dtensor_ones
from dtensor.tensor import local_of

F64 = torch.float64
R = Replicate()
FOLDED = ("max", "min", "product")
BITS = ("band", "bor", "bxor")


def addends_of(n: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """One addend per rank, stacked, with ties and zeros among them."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, (n, *shape), generator=g).to(F64)


def fold(stacked: torch.Tensor, op: str) -> torch.Tensor:
    """The value, by plain torch."""
    if op in ("max", "min"):
        return stacked.amax(0) if op == "max" else stacked.amin(0)
    if op == "product":
        return stacked.prod(0)
    return stacked.sum(0) if op == "sum" else stacked.mean(0)


def test_values_of_every_pair() -> None:
    shape = (5, 3)
    kinds = [R, Shard(0), Shard(1), *[Partial(op) for op in ("sum", "avg", *FOLDED)]]

    def program() -> int:
        mesh = init_device_mesh("cpu", (3,))
        count = 0
        for op in ("sum", "avg", *FOLDED):
            stack = addends_of(3, *shape)
            want = fold(stack, op)
            x = DTensor.from_local(stack[get_rank()].clone(), mesh, Partial(op))
            torch.testing.assert_close(x.full_tensor(), want, msg=op)
            for dst in kinds:
                y = x.redistribute(dst)
                assert y.placements == (dst,)
                torch.testing.assert_close(y.full_tensor(), want, msg=f"{op} {dst}")
                assert torch.equal(local_of(x), stack[get_rank()])
                count += 1
        for src, dst in itertools.product(kinds, kinds):
            y = distribute_tensor(want, mesh, src).redistribute(dst)
            torch.testing.assert_close(y.full_tensor(), want, msg=f"{src} {dst}")
            count += 1
        return count

    assert set(simulate(program, 3, timeout=100)) == {5 * 8 + 64}


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_bits_of_integers_and_bools(dtype: torch.dtype) -> None:
    ops = {
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        g = torch.Generator().manual_seed(1)
        stack = torch.randint(0, 8, (2, 4, 3), generator=g).to(dtype)
        for op, function in ops.items():
            want = function(stack[0], stack[1])
            x = DTensor.from_local(stack[get_rank()], mesh, Partial(op))
            for dst in (R, Shard(0), Shard(1), Partial(op), *map(Partial, BITS)):
                assert torch.equal(x.redistribute(dst).full_tensor(), want), (op, dst)
                for src in (R, Shard(1)):
                    y = distribute_tensor(want, mesh, src).redistribute(dst)
                    assert torch.equal(y.full_tensor(), want), (src, dst)

    simulate(program, 2)


def test_a_reduction_without_meaning_is_refused_before_anything_moves() -> None:
    bad = [
        (torch.complex64, "max"),
        (torch.complex64, "bor"),
        (torch.float32, "band"),
        (torch.bool, "sum"),
        (torch.bool, "product"),
        (torch.int64, "avg"),
    ]

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for dtype, op in bad:
            full = torch.ones(4).to(dtype)
            x = distribute_tensor(full, mesh, Shard(0))
            for call in (
                lambda x=x, op=op: x.redistribute(Partial(op)),
                lambda t=full, op=op: DTensor.from_local(t, mesh, Partial(op)),
                lambda t=full, op=op: distribute_tensor(t, mesh, Partial(op)),
            ):
                with pytest.raises(ShardingError, match="has no meaning for"):
                    call()

    simulate(program, 2)


@pytest.mark.parametrize("op", FOLDED)
def test_gradients_and_second_derivatives_are_those_of_torch(op: str) -> None:
    n, shape = 3, (4, 2)

    def program() -> None:
        mesh = init_device_mesh("cpu", (n,))
        stack = addends_of(n, *shape, seed=2).requires_grad_()
        value = fold(stack, op)
        weight = torch.arange(1.0, 9.0, dtype=F64).view(shape)
        (first,) = torch.autograd.grad(
            (value.pow(3) * weight).sum(), stack, create_graph=True
        )
        (second,) = torch.autograd.grad(first.pow(2).sum(), stack)
        w = distribute_tensor(weight, mesh, R)
        for dst in (R, Shard(0), Shard(1), Partial(), Partial("max")):
            leaf = stack[get_rank()].detach().clone().requires_grad_()
            y = DTensor.from_local(leaf, mesh, Partial(op)).redistribute(dst)
            loss = (y.pow(3) * w).sum()
            (g,) = torch.autograd.grad(loss, leaf, create_graph=True)
            torch.testing.assert_close(g, first[get_rank()].detach(), msg=f"{dst}")
            (gg,) = torch.autograd.grad(g.pow(2).sum(), leaf)
            torch.testing.assert_close(gg, second[get_rank()], msg=f"{dst}")
        leaf = stack[get_rank()].detach().clone().requires_grad_()
        out = DTensor.from_local(leaf, mesh, Partial(op)).full_tensor()
        (out.pow(3) * weight).sum().backward()
        torch.testing.assert_close(leaf.grad, first[get_rank()].detach())

    simulate(program, n)


@pytest.mark.parametrize("op", FOLDED)
def test_gradients_through_the_way_there_and_back(op: str) -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        full = addends_of(1, 4, 3, seed=4)[0]
        want = 3 * full.pow(2)
        for src in (R, Shard(0), Shard(1), Partial()):
            x = distribute_tensor(full, mesh, src).requires_grad_()
            y = x.redistribute(Partial(op))
            y.redistribute(R).pow(3).sum().backward()
            assert x.grad is not None
            torch.testing.assert_close(x.grad.full_tensor(), want, msg=f"{src}")

    simulate(program, 2)


def test_unlike_reductions_on_two_axes_nest() -> None:
    ops = ("sum", "max", "product")

    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        at = mesh.coordinate
        assert at is not None
        stack = addends_of(4, 4, 2, seed=5).view(2, 2, 4, 2)
        for a, b in itertools.product(ops, ops):
            inner = torch.stack([fold(stack[i], b) for i in range(2)])
            want = fold(inner, a)
            local = stack[at[0], at[1]].clone()
            x = DTensor.from_local(local, mesh, [Partial(a), Partial(b)])
            torch.testing.assert_close(x.full_tensor(), want, msg=f"{a} {b}")
            for dst in itertools.product((R, Shard(0), *map(Partial, ops)), repeat=2):
                y = x.redistribute(dst)
                assert y.placements == dst
                torch.testing.assert_close(y.full_tensor(), want, msg=f"{a} {b} {dst}")
            leaf = local.clone().requires_grad_()
            x = DTensor.from_local(leaf, mesh, [Partial(a), Partial(b)])
            x.pow(2).sum().backward()
            ref = stack.clone().requires_grad_()
            fold(torch.stack([fold(ref[i], b) for i in range(2)]), a).pow(
                2
            ).sum().backward()
            assert ref.grad is not None
            torch.testing.assert_close(leaf.grad, ref.grad[at[0], at[1]])

    simulate(program, 4, timeout=100)


CALLS: list[Any] = [
    lambda x: x + 1.0,
    lambda x: x * 2.0,
    lambda x: -x,
    lambda x: x + x,
    lambda x: x * x,
    lambda x: x.sum(),
    lambda x: x.sum(0),
    lambda x: x.mean(),
    lambda x: x.amax(),
    lambda x: x.prod(0),
    lambda x: x @ x.t(),
    lambda x: x.reshape(-1),
    lambda x: x.t(),
    lambda x: x[1],
    lambda x: x.clone(),
    lambda x: x.detach(),
    lambda x: torch.cat([x, x]),
    lambda x: torch.stack([x, x]),
    lambda x: torch.where(x > 0, x, -x),
    lambda x: x.to(torch.float32).double(),
    lambda x: torch.nn.functional.linear(x, x, torch.zeros_like(x)[:, 0]),
    lambda x: x.cumsum(0),
    lambda x: torch.nn.functional.dropout(x, 0.5, training=False),
]


@pytest.mark.parametrize("op", FOLDED)
def test_ops_on_addends_that_are_not_linear(op: str) -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        stack = addends_of(2, 3, 3, seed=6)
        want = fold(stack, op)
        x = DTensor.from_local(stack[get_rank()].clone(), mesh, Partial(op))
        for i, call in enumerate(CALLS):
            got = call(x).full_tensor()
            torch.testing.assert_close(got, call(want), msg=f"call {i}")
            leaf = stack[get_rank()].clone().requires_grad_()
            ref = stack.clone().requires_grad_()
            out = call(DTensor.from_local(leaf, mesh, Partial(op)))
            if not out.requires_grad:
                continue
            (out.pow(2).sum()).backward()
            call(fold(ref, op)).pow(2).sum().backward()
            assert ref.grad is not None
            torch.testing.assert_close(
                leaf.grad, ref.grad[get_rank()], msg=f"gradient of call {i}"
            )
        view = x.reshape(-1)
        assert view.placements == (Partial(op),)
        assert x.detach().placements == (Partial(op),)
        for change in (lambda: x.add_(1.0), lambda: x.zero_(), lambda: x.mul_(2.0)):
            with pytest.raises(ShardingError, match="in place"):
                change()

    simulate(program, 2, timeout=100)


def test_factories_lay_addends() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (3,))
        for op in ("sum", "avg", *FOLDED):
            x = dtensor_ones(4, device_mesh=mesh, placements=[Partial(op)])
            assert torch.equal(x.full_tensor(), torch.ones(4)), op

    simulate(program, 3)


def test_what_has_no_gradient_of_its_own_says_so() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, Partial("max"))
        y = distribute_tensor(torch.ones(4), mesh, R).requires_grad_()
        inside = y.redistribute(Partial("max"))
        seed = torch.ones(4, requires_grad=True)
        for call in (
            lambda: x.requires_grad_(),
            lambda: setattr(x, "requires_grad", True),
            lambda: torch.nn.Parameter(x),
            lambda: distribute_tensor(seed, mesh, Partial("max")),
            lambda: inside.register_hook(print),
            lambda: inside.retain_grad(),
            lambda: torch.autograd.grad(inside.redistribute(R).sum(), inside),
        ):
            with pytest.raises(ShardingError, match="have no cotangent of a placement"):
                call()
        assert not x.requires_grad
        inside.sum().backward()
        assert y.grad is not None
        assert torch.equal(y.grad.full_tensor(), torch.ones(4))
        z = distribute_tensor(torch.tensor(2.0), mesh, R).requires_grad_()
        z.redistribute(Partial("max")).backward()  # a seed of the value
        assert z.grad is not None and z.grad.full_tensor().item() == 1

    simulate(program, 2)


def test_an_unknown_reduction_is_an_error_where_the_placement_is_made() -> None:
    with pytest.raises(ShardingError, match="expected one of sum, avg, max, min, prod"):
        Partial("median")


def test_str_of_addends() -> None:
    places: list[Placement] = [Partial(), Partial("max"), Partial("bxor")]
    assert [str(p) for p in places] == ["P", "P(max)", "P(bxor)"]
