"""DataParallel: replicas whose gradients are reduced once, in buckets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sharded_runs import make_model
from torch import Tensor, nn

from dtensor import (
    DataParallel,
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    count_collectives,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    no_grad_sync,
    parallelize_module,
    simulate,
)

import gpt  # isort: skip - found by way of sharded_runs

R, S = Replicate(), Shard


def codes() -> tuple[Tensor, Tensor]:
    found = torch.randint(0, 13, (8, 7), generator=torch.Generator().manual_seed(5))
    return found[:, :-1], found[:, 1:]


def piece(mesh: DeviceMesh, axis: str = "dp") -> list[Tensor]:
    n, rank = mesh.size(axis), mesh.get_local_rank(axis)
    return [x.chunk(n)[rank] for x in codes()]


def check_gradients(model: nn.Module, serial: nn.Module) -> None:
    for p, q in zip(model.parameters(), serial.parameters(), strict=True):
        assert isinstance(p.grad, DTensor) and q.grad is not None
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=0, atol=1e-12)


def serial() -> gpt.GPT:
    model = make_model(0.0)
    gpt.loss_of(model, *codes()).backward()
    return model


@pytest.mark.parametrize("local", [False, True], ids=["dtensor", "local"])
def test_one_bucket_per_backward(local: bool) -> None:
    """All gradients in one all-reduce at the end; none while they accumulate."""

    def program() -> None:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model = make_model(0.0)
        parallelize_module(model, mesh, DataParallel() if local else {})

        def loss() -> Tensor:
            if local:
                return gpt.loss_of(model, *piece(mesh)) / (4 * 2)
            cut = [distribute_tensor(x, mesh, [S(0)]) for x in codes()]
            return gpt.loss_of(model, *cut) / 2

        first = loss()
        with no_grad_sync(), count_collectives() as quiet:
            first.backward()
        assert quiet.calls() == 0
        last = loss()
        with count_collectives() as counted:
            last.backward()
        assert counted.calls() == counted.calls("all_reduce", "dp") == 1
        size = 8 * sum(p.numel() for p in model.parameters())
        assert counted.bytes() == 2 * size * 3 // 4
        check_gradients(model, serial())

    simulate(program, ranks=4)


def test_a_bucket_per_dtype() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.b(self.a(x).double())
            return found

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = parallelize_module(Two(), mesh, DataParallel())
        out = model(torch.ones(3, 4)).sum()
        with count_collectives() as counted:
            out.backward()
        assert counted.calls() == counted.calls("all_reduce", "dp") == 2

    simulate(program, ranks=2)


@pytest.mark.parametrize("sharded", [False, True], ids=["dp", "fsdp"])
def test_mean_takes_each_ranks_average(sharded: bool) -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model = make_model(0.0)
        parallelize_module(model, mesh, DataParallel(mean=True))
        if sharded:
            for block in model.blocks:
                fully_shard(block, mesh)
            fully_shard(model, mesh)
        gpt.loss_of(model, *piece(mesh)).backward()
        check_gradients(model, serial())
        # A loss of DTensors is that of the whole batch already.
        head = parallelize_module(nn.Linear(2, 2), mesh, DataParallel(mean=True))
        x = distribute_tensor(torch.ones(4, 2), mesh, [S(0)])
        head(x).sum().backward()
        assert head.bias.grad.full_tensor().tolist() == [4, 4]

    simulate(program, ranks=4)


def test_mean_of_outputs_of_every_kind() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            y = self.inner(x)
            return {"a": y, "b": (y, [2 * y, None]), "c": y.detach()}

    torch.manual_seed(0)
    plain = Many()

    def total(out: Any) -> Tensor:
        found: Tensor = (out["a"] + out["b"][0] + out["b"][1][0]).sum()
        return found

    total(plain(torch.ones(1, 2))).backward()

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = copy.deepcopy(plain)
        model.zero_grad()
        parallelize_module(model, mesh, DataParallel(mean=True))
        out = model(torch.ones(1, 2))
        assert out["b"][1][1] is None and not out["c"].requires_grad
        total(out).backward()
        check_gradients(model, plain)

    simulate(program, ranks=2)


def test_it_says_what_it_is() -> None:
    assert (
        repr(DataParallel(mean=True)) == "DataParallel(mesh_dim='dp', dim=0, mean=True)"
    )
