"""A tensor-parallel block costs two all-reduces forward and two backward, no more."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtensor import (
    DeviceMesh,
    Replicate,
    Shard,
    count_collectives,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from dtensor.styles import (
    Colwise,
    ColwiseParallel,
    DataParallel,
    RowwiseParallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import gpt  # noqa: E402

BLOCKS = 3
MESHES = {(2,): ("tp",), (4,): ("tp",), (2, 2): ("dp", "tp"), (1, 4): ("dp", "tp")}


class Separate(nn.Module):
    """A block whose queries, keys and values come from linears of their own."""

    def __init__(self, config: gpt.Config) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.norm1, self.norm2 = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.q, self.k, self.v, self.out = (
            nn.Linear(config.dim, config.dim) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(config.dim, 4 * config.dim) for _ in range(2))
        self.down = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        y = self.norm1(x)
        q, k, v = (
            m(y).view(b, t, -1, self.head_dim).transpose(1, 2)
            for m in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def lay_out(model: nn.Module, mesh: DeviceMesh, local: bool) -> None:
    first: Any = ColwiseParallel() if local else Colwise()
    second = RowwiseParallel(use_local_output=local)
    columns, rows = ("qkv", "q", "k", "v", "up", "gate"), ("out", "down")
    plan: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            last = name.rsplit(".", 1)[-1]
            assert last in columns + rows
            plan[name] = first if last in columns else second
    if local and mesh.ndim == 2:
        plan[""] = DataParallel(mesh_dim="dp")
    parallelize_module(model, mesh, plan)


@pytest.mark.parametrize("local", [False, True], ids=["dtensor", "local"])
@pytest.mark.parametrize("kind", [gpt.Block, Separate])
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_two_and_two_and_one_leaf_bucket(
    shape: tuple[int, ...], kind: type[nn.Module], local: bool
) -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=MESHES[shape])
        torch.manual_seed(0)
        config = gpt.Config(vocab=7, dim=16, heads=4)
        make: Any = kind
        model = nn.Sequential(*(make(config) for _ in range(BLOCKS)))
        lay_out(model, mesh, local)
        x = torch.randn(4, 5, 16)
        if local:
            fed = x.chunk(shape[0])[mesh.get_local_rank("dp")] if mesh.ndim == 2 else x
        else:
            cut = [Shard(0), Replicate()] if mesh.ndim == 2 else [Replicate()]
            fed = distribute_tensor(x, mesh, cut)
        for _ in range(2):
            with count_collectives() as forward:
                y = model(fed)
            # All axes: nothing but the two of each block runs over tp, nothing over dp.
            assert forward.calls() == forward.calls("all_reduce", "tp") == 2 * BLOCKS
            loss = y.square().sum()
            with count_collectives() as backward:
                loss.backward()
            assert backward.calls() == backward.calls("all_reduce")
            # The input asks for no gradient: the first block's first linear has none
            # to give back where activations are local, but its norm asks for one.
            assert backward.calls("all_reduce", "tp") == 2 * BLOCKS + 1
            size = mesh.size("dp") if mesh.ndim == 2 else 1
            assert backward.calls("all_reduce", "dp") == (1 if size > 1 else 0)

    simulate(program, ranks=torch.Size(shape).numel())


@pytest.mark.parametrize("local", [False, True], ids=["dtensor", "local"])
def test_bytes_are_those_of_the_activations_and_replicated_leaves(local: bool) -> None:
    """Per block 4 all-reduces of (B, T, C), and a bucket of norms and row biases."""
    b, t, c, n = 2, 5, 16, 2

    def program() -> None:
        mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
        model = gpt.Block(gpt.Config(vocab=7, dim=c, heads=4))
        lay_out(model, mesh, local)
        x = torch.randn(b, t, c)
        fed = x if local else distribute_tensor(x, mesh, [Replicate()])
        with count_collectives() as counted:
            model(fed).square().sum().backward()
        leaves = 6 * c  # two norms of two, two biases
        elements = 4 * b * t * c + leaves
        assert counted.bytes() == elements * 4 * 2 * (n - 1) // n

    simulate(program, ranks=n)


def test_plain_inputs_of_sibling_linears_are_typed_once() -> None:
    """Colwise linears that share a plain input reduce its gradient once."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8).double(), nn.Linear(4, 8).double()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.a(x) * self.b(x)
            if not torch.is_grad_enabled():
                x.mul_(2)  # the next use must see the new value
            return y + self.a(x)

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        serial = Gate()
        model = copy.deepcopy(serial)
        parallelize_module(model, mesh, {"a": Colwise, "b": Colwise})
        base = torch.randn(3, 4, dtype=torch.float64)
        x, z = base.clone().requires_grad_(), base.clone().requires_grad_()
        want, got = serial(x * 1), model(z * 1)
        with count_collectives() as counted:
            got.sum().backward()
        want.sum().backward()
        assert counted.calls() == counted.calls("all_reduce") == 1
        torch.testing.assert_close(got.full_tensor(), want)
        torch.testing.assert_close(z.grad, x.grad)
        with torch.no_grad():
            want, got = serial(base.clone()), model(base.clone())
        torch.testing.assert_close(got.full_tensor(), want)

    simulate(program, ranks=2)
