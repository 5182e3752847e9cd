"""distribute_module: layouts by functions, and all that must survive them."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtensor import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    ShardingError,
    count_collectives,
    distribute_module,
    distribute_tensor,
    get_rank,
    init_device_mesh,
    parallelize_module,
    simulate,
)
from dtensor.styles import Colwise

R, S = Replicate(), Shard
X = torch.arange(12.0).view(4, 3).double() / 7


def run(program: Callable[..., Any], ranks: int = 2) -> list[Any]:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    return simulate(program, ranks, args=(mesh,))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4).double()
        self.norm = nn.LayerNorm(4).double()
        self.down = nn.Linear(4, 3).double()
        self.register_buffer("scale", torch.tensor([2.0, 3.0, 4.0]).double())

    def forward(self, x: Any) -> Any:
        return self.down(F.gelu(self.norm(self.up(x)))) * self.scale


def cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(module, nn.Linear):
        places = {"up": (0, 0), "down": (1, None)}[name]
        for key, dim in zip(("weight", "bias"), places, strict=True):
            place = R if dim is None else S(dim)
            old = module.get_parameter(key)
            module.register_parameter(
                key, nn.Parameter(distribute_tensor(old, mesh, [place]))
            )


def rows_in(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    return tuple(DTensor.from_local(x, mesh, [S(0)]) for x in inputs)


def rows_out(module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
    return outputs.redistribute([S(0)]).to_local()


def seeded() -> tuple[Net, Net]:
    torch.manual_seed(0)
    net = Net()
    return net, copy.deepcopy(net)


def check_gradients(serial: nn.Module, model: nn.Module) -> None:
    for name, p in serial.named_parameters():
        grad: Any = model.get_parameter(name).grad
        torch.testing.assert_close(grad.full_tensor(), p.grad)


@pytest.mark.parametrize("function", [None, cut])
def test_equals_the_serial_module(function: Any) -> None:
    def program(mesh: DeviceMesh) -> None:
        serial, model = seeded()
        assert distribute_module(model, mesh, function) is model
        layout = {n: x.placements for n, x in model.state_dict().items()}
        for name, places in layout.items():
            wanted = {"up.weight": S(0), "up.bias": S(0), "down.weight": S(1)}
            assert places == (wanted.get(name, R) if function else R,)
        want, got = serial(X), model(distribute_tensor(X, mesh, [S(0)]))
        torch.testing.assert_close(got.full_tensor(), want)
        want.square().sum().backward()
        got.square().sum().backward()
        check_gradients(serial, model)

    run(program)


def test_functions_around_the_forward() -> None:
    def program(mesh: DeviceMesh) -> None:
        serial, model = seeded()
        with mesh:
            distribute_module(model, input_fn=rows_in, output_fn=rows_out)
        mine = X.chunk(2)[get_rank()]
        want = serial(X)
        for net in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            net.zero_grad()
            serial.zero_grad()
            got = net(mine)
            assert type(got) is Tensor
            torch.testing.assert_close(got, want.chunk(2)[get_rank()])
            serial(X).square().sum().backward()
            got.square().sum().backward()
            check_gradients(serial, net)

    run(program)


def test_arguments_by_position_as_pytorch_has_them() -> None:
    def program(mesh: DeviceMesh) -> None:
        _, model = seeded()
        seen: list[str] = []

        def partition(name: str, module: nn.Module, given: DeviceMesh) -> None:
            assert given is mesh
            seen.append(name)

        distribute_module(model, mesh, partition, rows_in, rows_out)
        assert seen == ["", "up", "norm", "down"]

    run(program)


def test_frozen_tied_marked_and_hooked_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8)
            self.head.weight = self.emb.weight
            self.head.bias.requires_grad_(False)

    def both(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, p in list(module.named_parameters(recurse=False)):
            new = nn.Parameter(distribute_tensor(p.detach(), mesh, [S(0)]))
            module.register_parameter(key, new)

    def one(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if name == "emb":
            both(name, module, mesh)

    def unlike(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if name:
            place = S(0) if name == "emb" else S(1)
            new = distribute_tensor(module.weight.detach(), mesh, [place])  # type: ignore[operator,union-attr]
            module.weight = nn.Parameter(new)

    def program(mesh: DeviceMesh) -> None:
        for function in (None, both, one):
            model = Tied()
            model.head.bias.decay = False  # type: ignore[attr-defined]
            model.eval()
            distribute_module(model, mesh, function)
            assert model.emb.weight is model.head.weight
            assert isinstance(model.head.weight, DTensor)
            assert isinstance(model.head.bias, DTensor)
            assert not model.head.bias.requires_grad
            assert model.head.weight.requires_grad
            assert function is both or model.head.bias.decay is False  # type: ignore[attr-defined]
            assert not model.training
        model = Tied()
        before = model.emb.weight
        text = r"tied .* alike, got \(S\(0\)\) for 'emb.weight' and \(S\(1\)\) for 'he"
        with pytest.raises(ValueError, match=text):
            distribute_module(model, mesh, unlike)
        assert model.emb.weight is before and model.head.weight is before

    run(program)


def test_all_or_nothing() -> None:
    def failing(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        cut(name, module, mesh)
        module.register_buffer("more", torch.ones(1))
        if name == "down":
            raise KeyError("down")

    def program(mesh: DeviceMesh) -> None:
        _, model = seeded()
        before = dict(model.named_parameters())
        with pytest.raises(KeyError, match="down"):
            distribute_module(model, mesh, failing, rows_in)
        assert all(p is before[name] for name, p in model.named_parameters())
        assert [name for name, _ in model.named_buffers()] == ["scale"]
        assert not model._forward_pre_hooks
        distribute_module(model, mesh)

    run(program)


def test_a_second_time_and_after_parallelize_module() -> None:
    def program(mesh: DeviceMesh) -> None:
        text = r"distribute_module: Net is laid out already, got DTensors in \['scale'"
        _, model = seeded()
        distribute_module(model, mesh)
        with pytest.raises(ValueError, match=text):
            distribute_module(model, mesh)
        _, model = seeded()
        parallelize_module(model, mesh, {"up": Colwise})
        with pytest.raises(ValueError, match=text):
            distribute_module(model, mesh)
        # What a module got of its own before stays; the rest follows.
        _, model = seeded()
        cut("up", model.up, mesh)
        distribute_module(model, mesh)
        assert model.up.weight.placements == (S(0),)  # type: ignore[attr-defined]
        assert model.scale.placements == (R,)  # type: ignore[union-attr]

    run(program)


def test_values_come_from_one_rank_or_from_each() -> None:
    def program(mesh: DeviceMesh) -> None:
        for src, want, calls in ((0, [0, 0], 2), (1, [1, 1], 2), (None, [0, 1], 0)):
            model = nn.Linear(2, 2)
            for p in model.parameters():
                nn.init.constant_(p, get_rank())
            with count_collectives() as c:
                distribute_module(model, mesh, src_data_rank=src)
            assert c.calls() == c.calls("broadcast") == calls
            here = model.weight.to_local()  # type: ignore[operator,union-attr]
            assert here.unique().tolist() == [want[get_rank()]]
        t = torch.full((2, 2), float(get_rank()))
        with count_collectives() as c:
            x = distribute_tensor(t, mesh, [S(0)], src_data_rank=None)
        assert c.calls() == 0
        assert x.full_tensor()[:, 0].tolist() == [0, 1]
        with pytest.raises(ValueError, match="src_data_rank is a position in the mesh"):
            distribute_module(nn.Linear(2, 2), mesh, src_data_rank=2)

    run(program)


def test_what_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(ValueError, match="distribute_module: No active device mesh"):
        distribute_module(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="not a module, got int, expected an nn.Mod"):
        distribute_module(3, mesh)  # type: ignore[arg-type]
    two: Any = lambda module, inputs: inputs  # noqa: E731
    text = (
        r"input_fn is called with three arguments.*def input_fn\(module, inputs, mesh"
    )
    with pytest.raises(TypeError, match=text):
        distribute_module(nn.Linear(2, 2), mesh, input_fn=two)
    with pytest.raises(TypeError, match=r"def partition_fn\(name, submodule, mesh\)"):
        distribute_module(nn.Linear(2, 2), mesh, two)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lazy = nn.LazyLinear(3)
    with pytest.raises(ValueError, match="'weight' has no shape yet. Run the module"):
        distribute_module(lazy, mesh)

    def program(mesh: DeviceMesh) -> None:
        model = distribute_module(nn.Linear(3, 2).double(), mesh)
        with pytest.raises(ShardingError, match="plain tensor .* mixed with DTensors"):
            model(X)

    run(program)
