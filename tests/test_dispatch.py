"""The dispatch: plans are made once, keys tell values apart, calls are judged early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtensor.dispatch
from dtensor import (
    DTensor,
    RedistributionWarning,
    Replicate,
    Shard,
    ShardingError,
    count_collectives,
    distribute_tensor,
    init_device_mesh,
    promote_plain,
    redistribution,
    simulate,
)

CALLS: dict[str, Callable[[DTensor, DTensor, int], Any]] = {
    "add": lambda x, w, i: x + x,
    "a float each time": lambda x, w, i: x * (0.1 + i),
    "an int each time": lambda x, w, i: x + i,
    "a keyword number": lambda x, w, i: torch.add(x, x, alpha=1 + i),
    "in place": lambda x, w, i: x.add_(0.5 * i),
    "out": lambda x, w, i: torch.mul(x, 1.5 + i, out=torch.empty_like(x)),
    "matmul": lambda x, w, i: x @ w,
    "linear": lambda x, w, i: F.linear(x, w),
    "view": lambda x, w, i: x.view(2, 2, 8),
    "layer_norm": lambda x, w, i: F.layer_norm(x, (8,), eps=1e-5 * (1 + i)),
    "sum": lambda x, w, i: x.sum(0),
    "index": lambda x, w, i: x[:, 2:5],
    "softmax": lambda x, w, i: x.softmax(-1),
    "foreach": lambda x, w, i: torch._foreach_mul([x, w], 0.5 + i),
    "cat": lambda x, w, i: torch.cat([x, x], 1),
    "redistribute": lambda x, w, i: x.redistribute(Replicate()),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_builds_no_plan_and_adds_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
    w = distribute_tensor(torch.randn(8, 8), mesh, [Replicate()])
    CALLS[name](x, w, 1)
    sizes = len(x._spec.plans), len(x._spec.world.memo), len(x._spec.memo)

    def no_plan(*_: Any) -> None:
        raise AssertionError("a plan was made again")

    monkeypatch.setattr(dtensor.dispatch, "make_plan", no_plan)
    for i in range(2, 6):
        CALLS[name](x, w, i)
    assert (len(x._spec.plans), len(x._spec.world.memo), len(x._spec.memo)) == sizes


def test_keys_tell_one_true_and_one_point_zero_apart() -> None:
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.arange(4), mesh, [Shard(0)])
    assert (x * 1).dtype == torch.int64
    assert (x * 1.0).dtype == torch.float32
    assert (x * True).dtype == torch.int64
    y = distribute_tensor(torch.randn(3, 2), mesh, [Replicate()])
    assert y.sum(0, True).shape == (1, 2)
    assert y.sum(0, False).shape == (2,)
    assert y.var(True).shape == ()
    assert y.var(1).shape == (3,)
    assert y[True].shape == (1, 3, 2)
    assert y[1].shape == (2,)


def test_unhashable_arguments_are_keyed_by_value() -> None:
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.arange(12.0).view(3, 4), mesh, [Replicate()])
    assert x[slice(0, 2)].shape == (2, 4)
    assert x[slice(0, 1)].shape == (1, 4)
    assert x[[0, 2]].tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert x[[1]].tolist() == [[4, 5, 6, 7]]


def test_illegal_calls_raise_alike_everywhere_before_anything_moves() -> None:
    def program() -> list[str]:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.randn(2, 6), mesh, [Shard(0)])
        y = distribute_tensor(torch.randn(5, 3), mesh, [Shard(1)])
        messages = []
        for call in (
            lambda: x @ y,
            lambda: x + y,
            lambda: x.view(5, 5),
            lambda: x.sum(3),
            lambda: torch.cat([x, y]),
            lambda: F.layer_norm(x, (7,)),
            lambda: x[:, 9],
            lambda: x.amax(2),
        ):
            with count_collectives() as c:
                with pytest.raises((RuntimeError, IndexError, ValueError)) as e:
                    call()
            assert c.calls() == 0
            messages.append(str(e.value))
        return messages

    first, *rest = simulate(program, 4)
    for other in rest:
        assert other == first


def test_two_meshes_are_refused_with_both_names() -> None:
    def program() -> None:
        line = init_device_mesh("cpu", (4,))
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(torch.ones(4), line, [Shard(0)])
        y = distribute_tensor(torch.ones(4), grid, [Shard(0), Replicate()])
        with pytest.raises(ShardingError, match=r"add: .*different meshes.*dp=2, tp=2"):
            x + y

    simulate(program, 4)


def test_an_op_without_a_rule_is_right_and_warns_once() -> None:
    def program() -> int:
        mesh = init_device_mesh("cpu", (2,))
        full = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
        x = distribute_tensor(full, mesh, [Shard(0)])
        with pytest.warns(
            RedistributionWarning, match=r"unique_consecutive: has no sharding rule"
        ):
            y = torch.unique_consecutive(x)
        torch.testing.assert_close(y.full_tensor(), torch.unique_consecutive(full))
        return len(x._spec.world.memo["warned"])

    assert simulate(program, 2) == [1, 1]


def test_the_policy_nests_and_is_restored() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
        with redistribution("error"):
            with pytest.raises(ShardingError, match=r"sort: redistributes its oper"):
                x.sort(0)
            with pytest.raises(
                ShardingError, match=r"unique_consecutive: has no sharding rule"
            ):
                torch.unique_consecutive(x)
            with redistribution("allow"):
                x.sort(0)
            with pytest.raises(ZeroDivisionError):
                with redistribution("warn"):
                    1 / 0  # noqa: B018
            x.sort(1)  # nothing moves
            x.redistribute(Replicate())  # explicit
            with pytest.raises(ShardingError):
                x.sort(0)
        x.sort(0)
        with pytest.raises(ValueError, match="expected one of allow, warn, error"):
            with redistribution("never"):
                pass

    simulate(program, 2)


def test_plain_operands() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        for t in (torch.ones(4, 4), torch.ones(2, 4), torch.ones(1)):
            with pytest.raises(ShardingError, match="whole value or a shard"):
                x + t
            with pytest.raises(ShardingError, match="whole value or a shard"):
                t + x
        with pytest.raises(ShardingError, match="whole value or a shard"):
            x * torch.tensor(2.0, requires_grad=True)
        with pytest.raises(ShardingError, match="is written from a DTensor"):
            torch.ones(4, 4).add_(x)
        assert (x * torch.tensor(2.0)).sum().item() == 32
        mask = torch.eye(4, dtype=torch.bool)
        assert x.masked_fill(mask, 0).sum().item() == 12

    simulate(program, 2)


def test_a_scope_promotes_plain_tensors() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        full = torch.arange(16.0).view(4, 4)
        x = distribute_tensor(full, mesh, [Shard(0)])
        t = torch.ones(4, requires_grad=True)
        with promote_plain("replicate"):
            y = x * t
            assert torch.equal(
                torch.unique_consecutive(t + x).full_tensor(),
                torch.unique_consecutive(full + 1),
            )
            with promote_plain(None), pytest.raises(ShardingError, match="whole value"):
                x * t
        assert torch.equal(y.full_tensor(), full)
        y.sum().backward()  # each rank expects the whole gradient of its plain tensor
        assert t.grad is not None and torch.equal(t.grad, full.sum(0))
        with pytest.raises(ShardingError, match=r"with promote_plain\('replicate'\)"):
            x * t
        with pytest.raises(ValueError, match="expected 'replicate' or None"):
            with promote_plain("shard"):
                pass

    simulate(program, 2)


def test_in_place_keeps_its_placement_or_is_refused() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        full = torch.arange(16.0).view(4, 4)
        x = distribute_tensor(full, mesh, [Shard(0)])
        y = distribute_tensor(full, mesh, [Shard(1)])
        x += y
        assert x.placements == (Shard(0),)
        assert torch.equal(x.full_tensor(), 2 * full)
        x.view(-1).mul_(2)
        assert torch.equal(x.full_tensor(), 4 * full)
        part = x[:2]  # moved: it writes back
        part.zero_()
        assert torch.equal(x.full_tensor()[:2], torch.zeros(2, 4))
        with pytest.raises(ShardingError, match="cannot reach the base"):
            part.data.zero_()
        p = distribute_tensor(full, mesh, [Replicate()]).sum(0)
        q = distribute_tensor(full, mesh, [Shard(0)]).sum(0)
        with pytest.raises(ShardingError, match="the result would need other"):
            q += 1
        q += p
        assert torch.equal(q.full_tensor(), 2 * full.sum(0))

    simulate(program, 2)
