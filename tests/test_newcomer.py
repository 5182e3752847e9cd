"""What a first hour of use ran into: ops with a Python backward, formats, messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardingError,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
    redistribution,
    register_rule,
    simulate,
)
from dtensor.calls import PlainOperand
from dtensor.rules.table import RULES


@torch.library.custom_op("dtensor_newcomer::project", mutates_args=())
def project(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bsd,df->bsf", x, w)


@project.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:2], w.shape[1])


def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, w = ctx.saved_tensors
    return g @ w.T, torch.einsum("bsd,bsf->df", x, g)


project.register_autograd(
    backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


@pytest.mark.parametrize("rule", [None, "bsd,df->bsf"])
@pytest.mark.parametrize(
    ("xp", "wp"), [(Shard(0), Replicate()), (Shard(2), Shard(0)), (Shard(1), Shard(1))]
)
@pytest.mark.filterwarnings("ignore::dtensor.RedistributionWarning")
def test_custom_op_with_a_backward(
    rule: str | None, xp: Placement, wp: Placement
) -> None:
    gen = torch.Generator().manual_seed(0)
    a = torch.randn(5, 3, 7, dtype=torch.float64, generator=gen)
    b = torch.randn(7, 4, dtype=torch.float64, generator=gen)
    if rule is not None:
        register_rule("dtensor_newcomer::project", rule, linear=True)
    x0, w0 = a.clone().requires_grad_(), b.clone().requires_grad_()
    torch.autograd.backward(project(x0, w0).square().sum())

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(a, mesh, [xp]).requires_grad_()
        w = distribute_tensor(b, mesh, [wp]).requires_grad_()
        y = project(x, w)
        assert isinstance(y, DTensor)
        torch.autograd.backward(y.square().sum())
        for got, plain in ((x, x0), (w, w0)):
            assert isinstance(got.grad, DTensor)
            torch.testing.assert_close(got.grad.full_tensor(), plain.grad)

    simulate(program, ranks=2)


def test_a_format_that_would_communicate_says_so() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)])
        with pytest.raises(TypeError, match=r"no format '\.3f'.*Write x\.item\(\)"):
            f"{x.sum():.3f}"
        total = x.sum()
        assert isinstance(total, DTensor)
        assert f"{total.redistribute([Replicate()]):.3f}" == "21.000"
        assert f"{x}" == repr(x)

    simulate(program, ranks=2)


def test_distribute_tensor_of_no_tensor() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for x in ([1.0, 2.0], np.ones(2)):
            with pytest.raises(
                TypeError, match="expected a torch.Tensor, got .*as_ten"
            ):
                distribute_tensor(x, mesh, [Shard(0)])  # type: ignore[arg-type]

    simulate(program, ranks=2)


def test_a_module_that_was_not_laid_out() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        model = nn.Linear(3, 2)
        with pytest.raises(PlainOperand, match="plain parameter .*parallelize_module"):
            model(x)
        parallelize_module(model, mesh, {})
        assert model(x).placements == (Shard(0),)

    simulate(program, ranks=2)


def test_writing_a_row_of_a_cut_tensor_works_and_addends_name_the_mend() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])
        x[0] = 5
        assert float(x.sum()) == 3 * 5 + 4 * 3
        p = distribute_tensor(torch.ones(5, 3), mesh, [Partial()])
        with pytest.raises(ShardingError, match=r"x = x\.redistribute"):
            p.clamp_(0, 1)

    simulate(program, ranks=2)


def test_the_bytes_of_a_redistribution_are_named() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
        y = distribute_tensor(torch.ones(8, 4), mesh, [Shard(1)])
        with (
            redistribution("error"),
            pytest.raises(ShardingError, match="redistributes .*about 32 bytes"),
        ):
            x + y

    simulate(program, ranks=2)


def test_an_optimizer_made_before_the_layout_is_refused() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Linear(3, 2)
        early = torch.optim.AdamW(model.parameters())
        parallelize_module(model, mesh, {})
        model(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])).sum().backward()
        with pytest.raises(ValueError, match="got 2 of 2.*after parallelize_module"):
            early.step()
        before = model.weight.detach().clone()
        torch.optim.AdamW(model.parameters()).step()
        assert not torch.equal(model.weight, before)

    simulate(program, ranks=2)
