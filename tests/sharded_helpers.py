"""What the tests of fully_shard share: small models, and gathered buffers watched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from sharded_runs import WAYS, Way, make_model, place
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dtensor import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    init_device_mesh,
)
from dtensor.styles.gathering import Packing
from dtensor.styles.unit import UNIT

import gpt  # isort: skip - found by way of sharded_runs

R, S = Replicate(), Shard
FSDP = WAYS["fsdp=4"]


def mesh_of(*sizes: int, names: tuple[str, ...] = ("dp",)) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def codes() -> tuple[Tensor, Tensor]:
    found = torch.randint(0, 13, (8, 7), generator=torch.Generator().manual_seed(5))
    return found[:, :-1], found[:, 1:]


def loss_on(model: gpt.GPT, mesh: DeviceMesh | None, way: Way = FSDP) -> Tensor:
    x, y = codes()
    if mesh is not None:
        x, y = place(x, mesh, way), place(y, mesh, way)
    return gpt.loss_of(model, x, y)


def local_loss_on(model: nn.Module, mesh: DeviceMesh, axis: str = "dp") -> Tensor:
    """The loss of this rank's piece, as a plain tensor."""
    n, rank = mesh.size(axis), mesh.get_local_rank(axis)
    x, y = (t.chunk(n)[rank] for t in codes())
    return gpt.loss_of(model, x, y) / n


def whole(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.full_tensor().detach() if isinstance(x, DTensor) else x.detach()


def close(got: Tensor | None, want: Tensor | None) -> None:
    torch.testing.assert_close(whole(got), whole(want), rtol=0, atol=1e-12)


def check_gradients(model: nn.Module, serial: nn.Module) -> None:
    for p, q in zip(model.parameters(), serial.parameters(), strict=True):
        close(p.grad, q.grad)
        assert isinstance(p, DTensor) and p.grad is not None
        assert p.grad.placements == p.placements  # type: ignore[attr-defined]


@cache
def serial() -> gpt.GPT:
    """The plain model with the gradients of one backward."""
    model = make_model(0.0)
    loss_on(model, None).backward()
    return model


class Buffers:
    """The gathered buffers that are alive, whoever holds them."""

    def __init__(self) -> None:
        self.seen: list[tuple[StorageWeakRef, int]] = []

    def bytes(self) -> int:
        return sum(n for ref, n in self.seen if not ref.expired())


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Buffers]]:
    """Buffers by rank, for every rank that gathers inside."""
    import threading

    found: dict[int, Buffers] = {}
    gather = Packing.gather

    def noted(self: Packing, *args: Any) -> Tensor:
        out = gather(self, *args)
        storage = out.untyped_storage()
        buffers = found.setdefault(threading.get_ident(), Buffers())
        buffers.seen.append((StorageWeakRef(storage), storage.nbytes()))
        return out

    with monkeypatch.context() as patch:
        patch.setattr(Packing, "gather", noted)
        yield found


def mine(found: dict[int, Buffers]) -> Buffers:
    import threading

    return found.setdefault(threading.get_ident(), Buffers())


def unit_bytes(module: nn.Module) -> int:
    """Bytes of a unit's parameters, gathered."""
    unit = module.__dict__[UNIT]
    return sum(
        s.tensor().numel() * s.tensor().element_size() for s in unit.slots if s.sharded
    )


class Odd(nn.Module):
    """A number, an empty-handed rank, tied weights, a buffer, frozen ones, a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.rows = nn.ParameterList([torch.randn(3), torch.randn(1, 3)])
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.inner = nn.Linear(3, 2)
        self.outer = nn.Linear(2, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.randn(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x) * self.scale + self.shift
        y = self.frozen(y) * self.rows[0] + self.rows[1]
        y = self.outer(torch.tanh(self.inner(y))) + y
        found: Tensor = self.head(y)
        return found


def odd() -> Odd:
    torch.manual_seed(2)
    return Odd()
