"""A laid-out module's life: casts, copies, files, states, hooks, parametrizations."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from dtensor import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    full_state_dict,
    init_device_mesh,
    parallelize_module,
    simulate,
)
from dtensor.styles import (
    Colwise,
    ColwiseParallel,
    DataParallel,
    ReplicateParallel,
    Rowwise,
    RowwiseParallel,
)

R, S = Replicate(), Shard
X = torch.arange(12.0).view(4, 3).double() / 7
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def run(
    program: Callable[..., Any], *args: Any, shape: tuple[int, ...] = (2,)
) -> list[Any]:
    names = ("dp", "tp")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return simulate(program, mesh.size(), args=(mesh, *args))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.LayerNorm(4)
    ).double()


def close(got: Any, want: Any, atol: float = 1e-12) -> None:
    got = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


def check_gradients(serial: nn.Module, model: nn.Module) -> None:
    for name, p in serial.named_parameters():
        close(model.get_parameter(name).grad, p.grad)


# ---- casts, copies, files ------------------------------------------------------------
def test_casts_keep_the_layout() -> None:
    def program(mesh: DeviceMesh) -> None:
        serial, model = net(), parallelize_module(net(), mesh, PLAN)
        layout = [p.placements for p in model.parameters()]  # type: ignore[attr-defined]
        for cast in (
            lambda m: m.half(),
            lambda m: m.bfloat16(),
            lambda m: m.float(),
            lambda m: m.to(torch.float64),
            lambda m: m.to("cpu", torch.float32).double(),
            lambda m: m.apply(lambda inner: inner.eval()),
            lambda m: m.requires_grad_(False).requires_grad_(True).train(),
        ):
            cast(serial)
            assert cast(model) is model
            assert [p.placements for p in model.parameters()] == layout  # type: ignore[attr-defined]
            for p, q in zip(serial.parameters(), model.parameters(), strict=True):
                assert p.dtype == q.dtype and isinstance(q, nn.Parameter)
                close(q, p.detach() if not q.requires_grad else p)
        want, got = serial(X), model(X)
        close(got, want)
        want.square().sum().backward()
        got.square().sum().backward()
        check_gradients(serial, model)

    run(program)


@pytest.mark.parametrize("safe", [True, False])
def test_state_in_a_file_of_each_rank(safe: bool) -> None:
    def program(mesh: DeviceMesh) -> None:
        model = parallelize_module(net(), mesh, PLAN)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        again = parallelize_module(net().float().double(), mesh, PLAN)
        with torch.no_grad():
            for p in again.parameters():
                p.zero_()
        again.load_state_dict(torch.load(file, weights_only=safe))
        close(again(X), model(X).detach())
        for p, q in zip(model.parameters(), again.parameters(), strict=True):
            assert p.placements == q.placements  # type: ignore[attr-defined]

    run(program)


# ---- whole states --------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(1,), (2,), (4,), (2, 2)], ids=str)
def test_full_state_dict_gives_back_what_was_laid_out(shape: tuple[int, ...]) -> None:
    def program(mesh: DeviceMesh) -> None:
        model = net()
        model.register_buffer("count", torch.tensor(3))
        want = model.state_dict()
        model = parallelize_module(copy.deepcopy(model), mesh, PLAN)
        everywhere = full_state_dict(model, rank0_only=False)
        for state in (everywhere, full_state_dict(model)):
            if state is not everywhere and mesh.ranks[0] != mesh.get_rank():
                assert state == {}
                continue
            assert list(state) == list(want)
            for name, value in state.items():
                assert type(value) is Tensor
                assert not value.requires_grad
                assert torch.equal(value, want[name])
        # A copy: the model stays as it is.
        for value in everywhere.values():
            value.zero_()
        for name, value in full_state_dict(model, rank0_only=False).items():
            assert torch.equal(value, want[name])
        # It loads into a plain module, and into one with another layout.
        state = full_state_dict(model, rank0_only=False)
        other = parallelize_module(net().float(), mesh, {"0": RowwiseParallel()})
        other.register_buffer("count", torch.tensor(0))
        other.load_state_dict(state)
        for name, value in full_state_dict(other, rank0_only=False).items():
            assert torch.equal(value, want[name].to(value.dtype))

    run(program, shape=shape)


def test_full_state_dict_keeps_ties_and_extra_state() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = nn.Linear(2, 2)
            self.b.weight = self.a.weight

        def get_extra_state(self) -> Any:
            return {"steps": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    def program(mesh: DeviceMesh) -> None:
        model = parallelize_module(Odd(), mesh, {"*": Colwise})
        state = full_state_dict(model, rank0_only=False)
        assert state["a.weight"] is state["b.weight"]
        assert state["_extra_state"] == {"steps": 3}
        plain = full_state_dict(nn.Linear(2, 2))
        assert list(plain) == ["weight", "bias"]

    run(program)


# ---- hooks on parameters ---------------------------------------------------------------
def test_hooks_on_parameters_go_over() -> None:
    def program(mesh: DeviceMesh) -> None:
        serial, model = net(), net()
        seen: list[str] = []
        for module in (serial, model):
            weight: Any = module[0].weight
            weight.register_hook(lambda g: g * 2)
            weight.register_post_accumulate_grad_hook(
                lambda p: seen.append(type(p.grad).__name__)
            )
        parallelize_module(model, mesh, PLAN)
        for module in (serial, model):
            module(X).square().sum().backward()
        check_gradients(serial, model)
        assert seen == ["Tensor", "DTensor"]
        model = parallelize_module(net(), mesh, {})
        model[0].weight.register_hook(lambda g: g)  # type: ignore[operator,union-attr]
        text = "'0.weight' is laid out already and has hooks on its gradient"
        with pytest.raises(ValueError, match=text):
            parallelize_module(model, mesh, PLAN)

    run(program)


def test_gradients_that_are_there_go_over() -> None:
    def program(mesh: DeviceMesh) -> None:
        serial, model = net(), net()
        for module in (serial, model):
            module(X).square().sum().backward()
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
        parallelize_module(model, mesh, {"2": RowwiseParallel()})
        check_gradients(serial, model)
        for module in (serial, model):
            module(X).sum().backward()
        check_gradients(serial, model)

    run(program)


# ---- parametrizations ------------------------------------------------------------------
def weight_norm(dim: int | None) -> Callable[[nn.Module], nn.Module]:
    return lambda m: parametrizations.weight_norm(m, dim=dim)


class Doubled(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2


NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": weight_norm(0),
    "weight_norm dim 1": weight_norm(1),
    "weight_norm whole": weight_norm(None),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m),
    "user's": lambda m: parametrize.register_parametrization(m, "weight", Doubled()),
    "user's bias": lambda m: parametrize.register_parametrization(m, "bias", Doubled()),
}
STYLES = [Colwise(), Rowwise(), ColwiseParallel(output_layouts=R), None]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("style", STYLES, ids=lambda s: type(s).__name__)
def test_parametrized_modules(name: str, style: Any) -> None:
    def program(mesh: DeviceMesh) -> None:
        torch.manual_seed(1)
        inner = NORMS[name](nn.Linear(3, 5).double())
        serial = nn.Sequential(inner, nn.Linear(5, 2).double())
        model = copy.deepcopy(serial)
        after = (
            ReplicateParallel()
            if style is not STYLES[2]
            else RowwiseParallel(input_layouts=R)
        )
        plan: dict[str, Any] = (
            {"1": after} if style is None else {"0": style, "1": after}
        )
        if style is None:
            plan = {"1": RowwiseParallel(input_layouts=R)}
        parallelize_module(model, mesh, plan)
        if style is not None and "bias" not in name:
            cut = [p.placements for p in model[0].parametrizations.parameters()]  # type: ignore[index,union-attr]
            assert any(isinstance(p, Shard) for places in cut for p in places)
        for training in (True, True, False):
            for module in (serial, model):
                module.train(training)
                module.zero_grad()
            want, got = serial(X), model(X)
            close(got, want)
            want.square().sum().backward()
            got.square().sum().backward()
            check_gradients(serial, model)
            for key, b in serial.named_buffers():
                close(model.get_buffer(key), b)
        parametrize.remove_parametrizations(
            model[0], "bias" if "bias" in name else "weight"
        )  # type: ignore[index]
        close(model(X), want)

    run(program)


def test_weights_computed_in_hooks_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = [
            (nn.utils.weight_norm, "WeightNorm", "parametrizations.weight_norm"),
            (nn.utils.spectral_norm, "SpectralNorm", "parametrizations.spectral_norm"),
        ]
        made = [(f(nn.Linear(2, 2)), kind, instead) for f, kind, instead in old]
    pruned = prune.random_unstructured(nn.Linear(2, 2), "weight", 0.5)
    made.append((pruned, "RandomUnstructured", r"prune.remove\(module, name\) first"))
    for module, kind, instead in made:
        outer = nn.Sequential(module)
        text = rf"'0' computes a weight in a hook \({kind}\).*Use .*{instead}"
        with pytest.raises(ValueError, match="parallelize_module: " + text):
            parallelize_module(outer, mesh, {"0": Colwise})
        with pytest.raises(ValueError, match="distribute_module: " + text):
            distribute_module(outer, mesh)
        assert not any(isinstance(p, DTensor) for p in outer.parameters())


def test_recurrent_modules_between_styles() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(3, 4).double()
            self.rnn = nn.LSTM(4, 4, batch_first=True).double()
            self.down = nn.Linear(4, 3).double()

        def forward(self, x: Any) -> Any:
            return self.down(self.rnn(self.up(x))[0])

    def program(mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        serial = Model()
        model = copy.deepcopy(serial)
        plan = {
            "up": ColwiseParallel(output_layouts=R),
            "down": RowwiseParallel(input_layouts=R),
        }
        parallelize_module(model, mesh, plan)
        for _ in range(2):
            want, got = serial(X.view(1, 4, 3)), model(X.view(1, 4, 3))
            close(got, want)
            want.sum().backward()
            got.sum().backward()
            check_gradients(serial, model)
        assert all(isinstance(w, DTensor) for w in model.rnn._flat_weights)

    run(program)


# ---- entries without a style -------------------------------------------------------------
def test_plans_that_give_no_style() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model = net()
    with pytest.warns(UserWarning, match=r"no plan was given for '0' \(Linear\)"):
        parallelize_module(model, mesh, {"0": None, "2": [Colwise(), DataParallel()]})
    assert isinstance(model[0].weight, DTensor)
    text = "no plan was given, Linear '2' is left as it is"
    with pytest.warns(UserWarning, match=text):
        parallelize_module(model[2], mesh)
    text = r"the plan's key '4' \(None\) matches no module"
    with pytest.raises(ValueError, match=text):
        parallelize_module(net(), mesh, {"4": None})
