"""Modules on meta: laid out without memory, filled by reset or by loading."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from llama import Args, Transformer, loss_of
from test_llama_tutorial import tokens_of, tutorial
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor import (
    DeviceMesh,
    DTensor,
    count_collectives,
    distribute_module,
    full_state_dict,
    init_device_mesh,
    parallelize_module,
    simulate,
)
from dtensor.styles import Colwise, ColwiseParallel, RowwiseParallel
from dtensor.tensor import local_of

MESHES: list[tuple[int, ...]] = [(1,), (2,), (3,), (4,), (2, 2)]
PLAN = {"0": ColwiseParallel(mesh_dim=-1), "1": RowwiseParallel(mesh_dim=-1)}


class RealElements(TorchDispatchMode):
    """Counts elements of results that are not on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and not x.is_meta:
                self.count += x.numel()
        return out


def on_meta() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(
            nn.Linear(5, 6), nn.Linear(6, 7), nn.BatchNorm1d(7, affine=False)
        )


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def ranks_of(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def reset(module: nn.Module) -> None:
    for inner in module.modules():
        if hasattr(inner, "reset_parameters"):
            inner.reset_parameters()


# ---- laid out ------------------------------------------------------------------------
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_layout_takes_no_memory_and_no_messages(shape: tuple[int, ...]) -> None:
    def program() -> None:
        mesh, serial = mesh_of(shape), on_meta()
        with count_collectives() as c, RealElements() as real:
            model = parallelize_module(copy.deepcopy(serial), mesh, PLAN)
            distribute_module(nn.Linear(3, 3, device="meta"), mesh)
        assert real.count == 0
        assert c.calls() == 0
        names = [*serial.named_parameters(), *serial.named_buffers()]
        now = dict([*model.named_parameters(), *model.named_buffers()])
        assert [name for name, _ in names] == list(now)
        for name, old in names:
            new = now[name]
            assert isinstance(new, DTensor) and new.is_meta
            assert new.shape == old.shape
            assert isinstance(new, nn.Parameter) == isinstance(old, nn.Parameter)
            assert local_of(new).is_meta

    simulate(program, ranks_of(shape))


def test_seven_billion_parameters() -> None:
    args = Args(4096, 32, 32, 32, vocab=32000, hidden=11008, max_seq=2048)

    def program() -> list[int]:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        with torch.device("meta"):
            model = Transformer(args)
        total = sum(p.numel() for p in model.parameters())
        with RealElements() as real:
            tutorial(model, mesh, False)
        assert real.count == 0
        assert total == sum(p.numel() for p in model.parameters())
        mine = sum(local_of(p).numel() for p in model.parameters())
        tensors = [*model.parameters(), *model.buffers()]
        assert all(isinstance(x, DTensor) and x.is_meta for x in tensors)
        return [total, mine]

    for total, mine in simulate(program, 4):
        assert total == 6_738_415_616
        norms = 65 * 4096
        assert mine == (total - norms) // 4 + norms


# ---- filled by resetting -------------------------------------------------------------
def test_the_same_random_values_on_every_mesh() -> None:
    def program(shape: tuple[int, ...]) -> dict[str, Tensor]:
        model = parallelize_module(on_meta(), mesh_of(shape), PLAN)
        torch.manual_seed(3)
        assert model.to_empty(device="cpu") is model
        reset(model)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert all(p.requires_grad for p in model.parameters())
        return full_state_dict(model, rank0_only=False)

    seen = [
        state
        for shape in MESHES
        for state in simulate(program, ranks_of(shape), args=(shape,))
    ]
    first = seen[0]
    assert sorted(first) == [
        *("0.bias", "0.weight", "1.bias", "1.weight"),
        *("2.num_batches_tracked", "2.running_mean", "2.running_var"),
    ]
    bound = 5**-0.5
    assert 0.5 * bound < first["0.weight"].abs().max() <= bound
    assert first["0.weight"].unique().numel() == 30
    for state in seen[1:]:
        for name, value in first.items():
            assert torch.equal(state[name], value), name


def test_a_filled_model_trains() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with torch.device("meta"):
            model = Transformer(Args()).double()
        tutorial(model, mesh, False).to_empty(device="cpu")
        reset(model)
        serial = Transformer(Args()).double()
        model.freqs_cis.copy_(serial.freqs_cis)  # type: ignore[operator,union-attr]
        serial.load_state_dict(full_state_dict(model, rank0_only=False))
        tokens, targets = tokens_of(2, 6)
        for net in (model, serial):
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(net(tokens), targets).backward()
                optimizer.step()
        torch.testing.assert_close(model(tokens), serial(tokens), rtol=0, atol=1e-9)

    simulate(program, 2)


# ---- filled by loading ---------------------------------------------------------------
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_loading(shape: tuple[int, ...], typed: bool, assign: bool) -> None:
    def program() -> None:
        mesh = mesh_of(shape)
        torch.manual_seed(0)
        serial = on_meta().to_empty(device="cpu")
        reset(serial)
        serial[0].weight.requires_grad_(False)  # type: ignore[union-attr]
        state = serial.state_dict()
        if typed:  # laid out in another way than the model is
            state = parallelize_module(
                copy.deepcopy(serial), mesh, {"0": Colwise(mesh_dim=0)}
            ).state_dict()
            assert isinstance(state["0.weight"], DTensor)
        model = parallelize_module(on_meta(), mesh, PLAN)
        layout = {n: p.placements for n, p in model.named_parameters()}  # type: ignore[attr-defined]
        model[1].bias.requires_grad_(False)  # type: ignore[index,union-attr]
        with count_collectives() as c, warnings.catch_warnings():
            warnings.simplefilter("error")
            model.load_state_dict(state, assign=assign)
        assert typed or c.calls() == 0
        for name, p in model.named_parameters():
            assert isinstance(p, DTensor) and isinstance(p, nn.Parameter)
            assert p.placements == layout[name]
            assert p.requires_grad == (name != "1.bias")
            assert torch.equal(p.full_tensor(), serial.get_parameter(name))
        x = torch.randn(4, 5)
        torch.testing.assert_close(model.eval()(x), serial.eval()(x))

    simulate(program, ranks_of(shape))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.emb.weight


@pytest.mark.parametrize("assign", [False, True])
def test_tied_parameters_are_filled_once(assign: bool) -> None:
    def program() -> None:
        with torch.device("meta"):
            model = Tied()
        plan = {"emb": RowwiseParallel(), "head": ColwiseParallel()}
        parallelize_module(model, mesh_of((2,)), plan)
        serial = Tied()
        model.load_state_dict(serial.state_dict(), assign=assign)
        assert model.emb.weight is model.head.weight
        weight: Any = model.emb.weight
        assert torch.equal(weight.full_tensor(), serial.emb.weight)
        # A second load goes into the same tensor, or replaces it again.
        again = Tied()
        model.load_state_dict(again.state_dict(), assign=assign)
        assert (model.emb.weight is weight) == (not assign)
        weight = model.head.weight
        assert torch.equal(weight.full_tensor(), again.emb.weight)

    simulate(program, 2)


def test_what_does_not_fit_is_torchs_own_error() -> None:
    def program() -> None:
        model = parallelize_module(on_meta(), mesh_of((2,)), PLAN)
        state = on_meta().to_empty(device="cpu").state_dict()
        state["0.weight"] = torch.zeros(6, 4)
        for assign in (False, True):
            with pytest.raises(RuntimeError, match="size mismatch for 0.weight"):
                model.load_state_dict(state, assign=assign)

    simulate(program, 2)
