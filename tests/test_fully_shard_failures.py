"""fully_shard: what fails leaves no trace, what cannot be right is refused; dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sharded_helpers import (
    FSDP,
    R,
    S,
    check_gradients,
    local_loss_on,
    loss_on,
    mesh_of,
    mine,
    odd,
    serial,
    watched,
    whole,
)
from sharded_runs import WAYS, lay_out, make_model, place
from torch import Tensor, nn

from dtensor import (
    Colwise,
    MixedPrecision,
    ShardingError,
    count_collectives,
    distribute_tensor,
    fully_shard,
    parallelize_module,
    simulate,
)
from dtensor.styles.saved import state_of


def test_failures_leave_the_sharded_parameters_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise ValueError("in backward")

    def program() -> None:
        mesh = mesh_of(2)
        model = make_model(0.0)
        lay_out(model, mesh, FSDP)
        buffers = mine(found)

        def check() -> None:
            assert all(p.placements == (S(0),) for p in model.parameters())
            assert buffers.bytes() == 0
            assert not state_of(model.head.weight._spec.world).buffers

        def fail(*_: Any) -> None:
            raise ValueError("in forward")

        handle = model.blocks[1].mlp.down.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="in forward"):
            loss_on(model, mesh)
        handle.remove()
        check()
        handle = model.blocks[1].mlp.up.register_forward_hook(
            lambda m, a, out: Fails.apply(out)
        )
        with pytest.raises(ValueError, match="in backward"):
            loss_on(model, mesh).backward()
        handle.remove()
        check()
        model.zero_grad()
        loss_on(model, mesh).backward()
        check()
        check_gradients(model, serial())

    with watched(monkeypatch) as found:
        simulate(program, ranks=2)


def test_a_changed_parameter_is_an_error_in_backward() -> None:
    def program() -> None:
        mesh = mesh_of(2)
        model = make_model(0.0)
        lay_out(model, mesh, FSDP)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = loss_on(model, mesh)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="GPT: a parameter was changed after"):
            loss.backward()

    simulate(program, ranks=2)


def test_activations_written_in_place_are_an_error_in_backward() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            z: Tensor = self.b(y)
            with torch.no_grad():
                y.add_(1)
            return z

    def program() -> None:
        mesh = mesh_of(2)
        for local in (False, True):
            model = fully_shard(Writes(), mesh)
            x = torch.ones(2, 2)
            out = model(x if local else place(x, mesh, FSDP)).sum()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.backward()

    simulate(program, ranks=2)


def test_what_is_refused() -> None:
    def program() -> None:
        mesh = mesh_of(2, 2, names=("dp", "tp"))
        model = odd()
        fully_shard(model.embed, mesh)
        with pytest.raises(ValueError, match=r"'head.weight' is tied to a parameter"):
            fully_shard(model, mesh)
        assert type(model.inner.weight) is nn.Parameter
        with pytest.raises(ValueError, match="Embedding is a unit already"):
            fully_shard(model.embed, mesh)
        with pytest.raises(ValueError, match="ModuleList is never called"):
            fully_shard(make_model().blocks, mesh)
        with pytest.raises(ValueError, match="the mesh has no such axis. .*got 'fsdp'"):
            fully_shard(odd(), mesh, "fsdp")
        with pytest.raises(ValueError, match="mesh_dim names axes once each"):
            fully_shard(odd(), mesh, ("dp", "dp"))
        with pytest.raises(TypeError, match="not a module, got list"):
            fully_shard([odd()], mesh)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="fully_shard: No active device mesh"):
            fully_shard(odd())
        with pytest.raises(TypeError, match="is no MixedPrecision, got torch.bfloat16"):
            fully_shard(odd(), mesh, mixed_precision=torch.bfloat16)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="param_dtype is not a floating dtype"):
            MixedPrecision(param_dtype=torch.int8)
        with pytest.raises(ValueError, match="'weight' has no shape yet"):
            fully_shard(nn.LazyLinear(3), mesh)
        layer = parallelize_module(nn.Linear(4, 4), mesh, Colwise)
        text = r"'weight' is laid out along axis 'tp' already, got \(R, S\(0\)\)"
        with pytest.raises(ValueError, match=text):
            fully_shard(layer, mesh, "tp")
        other = mesh_of(4)
        with pytest.raises(ValueError, match="'weight' lies on another mesh"):
            fully_shard(layer, other)
        layer = fully_shard(nn.Linear(4, 4), mesh)
        parallelize_module(layer, mesh, Colwise)
        with pytest.raises(ShardingError, match=r"no longer cut along \['dp'\] last"):
            layer(distribute_tensor(torch.ones(2, 4), mesh, [S(0), R]))
        for laid_out in (False, True):
            model = odd()
            if laid_out:
                parallelize_module(model, mesh, {})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            fully_shard(model, mesh)
            with pytest.raises(ValueError, match="holds parameters that were replaced"):
                optimizer.step()

    simulate(program, ranks=4)


# ---- dtypes -------------------------------------------------------------------------------------
@pytest.mark.parametrize("local", [False, True], ids=["dtensor", "local"])
def test_mixed_precision(local: bool) -> None:
    precision = MixedPrecision(output_dtype=torch.float32)

    def program() -> tuple[Tensor, list[Tensor]]:
        mesh = mesh_of(4)
        model = make_model(0.0).float()
        for block in model.blocks:
            fully_shard(block, mesh, mixed_precision=MixedPrecision())
        fully_shard(model, mesh, mixed_precision=precision)
        seen: dict[str, Any] = {}

        def spy(module: nn.Module, args: Any, out: Tensor) -> None:
            seen["weight"], seen["out"] = module.weight.dtype, out.dtype

        model.blocks[0].mlp.up.register_forward_hook(spy)
        model.register_forward_hook(lambda m, a, out: seen.update(logits=out.dtype))
        with count_collectives() as counted:
            loss = local_loss_on(model, mesh) if local else loss_on(model, mesh)
        size = sum(p.numel() for p in model.parameters())
        assert counted.bytes("all_gather", "dp") == 2 * size * 3 // 4
        assert seen == {
            "weight": torch.bfloat16,
            "out": torch.bfloat16,
            "logits": torch.float32,
        }
        with count_collectives() as counted:
            loss.backward()
        assert counted.bytes("reduce_scatter", "dp") == 4 * size * 3 // 4
        for p in model.parameters():
            assert p.dtype is p.grad.dtype is torch.float32
        return whole(loss), [whole(p.grad) for p in model.parameters()]

    want = [whole(p.grad) for p in serial().parameters()]
    for _, got in simulate(program, ranks=4):
        for g, w in zip(got, want, strict=True):
            assert (g - w).norm() < 0.03 * w.norm() + 1e-3


def test_gradients_are_summed_in_the_wider_dtype() -> None:
    """1 + 2**-9 + 2**-9 + 2**-9: bfloat16 would round each addend away."""

    def program() -> Tensor:
        mesh = mesh_of(4)
        layer = nn.Linear(1, 1, bias=False)
        fully_shard(layer, mesh, mixed_precision=MixedPrecision())
        x = torch.tensor([[1.0 if mesh.get_local_rank() == 0 else 2.0**-9]])
        layer(x).sum().backward()
        return whole(layer.weight.grad)

    for got in simulate(program, ranks=4):
        assert got.item() == 1 + 3 * 2.0**-9


@pytest.mark.parametrize("sharded", [True, False], ids=["fsdp", "dp"])
def test_autocast(sharded: bool) -> None:
    """Matmuls in bfloat16, softmax and the loss in float32; gradients in float32."""

    def program() -> list[Tensor]:
        mesh = mesh_of(4)
        model = make_model(0.0).float()
        lay_out(model, mesh, FSDP if sharded else WAYS["dp=4"])
        seen: dict[str, Any] = {}
        for name in ("blocks.0.attention.qkv", "blocks.0.norm1", "head"):
            model.get_submodule(name).register_forward_hook(
                lambda m, a, out, name=name: seen.update({name: out.dtype})
            )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_on(model, mesh)
        assert seen["blocks.0.attention.qkv"] is torch.bfloat16
        assert seen["head"] is torch.bfloat16
        assert loss.dtype is torch.float32
        loss.backward()
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())
        return [whole(p.grad) for p in model.parameters()]

    model = make_model(0.0).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_on(model, None)
    loss.backward()
    want = [whole(p.grad) for p in model.parameters()]
    for got in simulate(program, ranks=4):
        for g, w in zip(got, want, strict=True):
            assert (g - w).norm() < 0.02 * w.norm() + 1e-4
