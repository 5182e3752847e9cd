"""The proposal's FeedForward, as written, on any number of ranks and axes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from dtensor.styles import Colwise, Rowwise, parallelize_module

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import feedforward  # noqa: E402


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w1 = parallelize_module(w1, Colwise)
        self.w2 = parallelize_module(w2, Rowwise)
        self.w3 = parallelize_module(w3, Colwise)

    def forward(self, x):
        y = self.w2(F.silu(self.w1(x)) * self.w3(x))  # DTensor, Partial
        return y.redistribute(Replicate())  # or return y as it is


class Unreduced(FeedForward):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


@dataclass
class Config:
    dim: int = 6
    hidden_dim: int = 10


MESHES = [
    ((1,), ("tp",)),
    ((2,), ("tp",)),
    ((4,), ("tp",)),
    ((4,), None),
    ((1, 1), ("dp", "tp")),
    ((1, 2), ("dp", "tp")),
    ((2, 2), ("dp", "tp")),
    ((2, 2), ("tp", "pp")),
    ((1, 4), ("dp", "tp")),
    ((4, 1), ("dp", "tp")),
]


@pytest.mark.parametrize("kind", [FeedForward, Unreduced])
@pytest.mark.parametrize("given", ["plain", "replicated", "batch over the first axis"])
@pytest.mark.parametrize(("shape", "names"), MESHES, ids=str)
def test_equals_the_serial_model(shape, names, given, kind):
    def program():
        device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        config = Config()
        torch.manual_seed(0)
        serial = feedforward.Serial(config).double()
        torch.manual_seed(0)
        with device_mesh:
            model = kind(config).double()
        torch.manual_seed(1)
        x = torch.randn(4, 3, config.dim, dtype=torch.float64)
        left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
        if given == "plain":
            fed = right
        else:
            cut = [Replicate()] * device_mesh.ndim
            if given != "replicated":
                cut[0] = Shard(0)
            right = fed = distribute_tensor(right, device_mesh, cut)
        want, got = serial(left), model(fed)
        assert isinstance(got, DTensor)
        tp = 0 if names is None else names.index("tp")
        assert got.placements[tp] == (Replicate() if kind is FeedForward else Partial())
        want.square().sum().backward()
        got.square().sum().backward()
        torch.testing.assert_close(got.full_tensor(), want, rtol=0, atol=1e-12)
        grad = right.grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        torch.testing.assert_close(grad, left.grad, rtol=0, atol=1e-12)
        for p, q in zip(serial.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=0, atol=1e-12)
        assert model.w1.weight.placements[tp] == Shard(0)
        assert model.w2.weight.placements[tp] == Shard(1)

    simulate(program, ranks=torch.Size(shape).numel())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_example_compares_itself(ranks, capsys):
    simulate(feedforward.main, ranks=ranks)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (1 if ranks == 1 else 2)
    assert all(float(line.rsplit(" ", 1)[1]) < 1e-12 for line in lines)


def test_serial_signature_without_a_mesh_is_an_error_that_says_how():
    with pytest.raises(ValueError, match="No active device mesh.*with mesh:"):
        FeedForward(Config())
