"""fully_shard: parameters, states and models of every kind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sharded_helpers import (
    FSDP,
    R,
    S,
    check_gradients,
    close,
    local_loss_on,
    loss_on,
    mesh_of,
    mine,
    odd,
    serial,
    unit_bytes,
    watched,
    whole,
)
from sharded_runs import lay_out, make_model, place
from torch import Tensor, nn

from dtensor import (
    Colwise,
    DataParallel,
    DeviceMesh,
    DTensor,
    FusedColwise,
    Rowwise,
    count_collectives,
    distribute_tensor,
    full_state_dict,
    fully_shard,
    parallelize_module,
    simulate,
)
from dtensor.sections import Sections
from dtensor.styles.unit import UNIT


@pytest.mark.parametrize("local", [False, True], ids=["dtensor", "local"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_odd_parameters(ranks: int, local: bool) -> None:
    plain = odd()
    ids = torch.arange(12).reshape(12, 1) % 5
    plain(ids).square().sum().backward()

    def program() -> None:
        mesh = mesh_of(ranks)
        model = odd()
        fully_shard(model.inner, mesh)
        fully_shard(model, mesh)
        assert model.head.weight is model.embed.weight
        assert model.scale.placements == (R,) and model.shift.placements == (R,)
        if local:
            x = ids.chunk(ranks)[mesh.get_local_rank()]
        else:
            x = distribute_tensor(ids, mesh, [S(0)])
        out = model(x)
        assert isinstance(out, DTensor) is not local
        out.square().sum().backward()
        assert model.frozen.weight.grad is None
        for (name, p), q in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            assert isinstance(p, DTensor), name
            assert p.requires_grad is q.requires_grad
            if q.grad is not None:
                close(p.grad, q.grad)
        for name, x in full_state_dict(model, rank0_only=False).items():
            close(x, plain.state_dict()[name])

    simulate(program, ranks=ranks)


@pytest.mark.parametrize("local", [False, True], ids=["dtensor", "local"])
def test_frozen_units_let_the_gradient_through(
    monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(1)
        layers = [nn.Linear(4, 4) for _ in range(4)]
        for layer in layers[1:]:
            layer.requires_grad_(False)
        return nn.Sequential(*layers).double()

    plain = build()
    x = torch.ones(4, 4).double()
    plain(x).square().sum().backward()

    def program() -> None:
        mesh = mesh_of(2)
        model = build()
        buffers, most = mine(found), []
        for layer in model:
            fully_shard(layer, mesh)

        def probe(module: nn.Module, args: Any, out: Tensor) -> None:
            out.register_hook(lambda g: most.append(buffers.bytes()))

        for layer in model:
            layer.register_forward_hook(probe)
        fed = x.chunk(2)[mesh.get_local_rank()] if local else place(x, mesh, FSDP)
        loss = model(fed).square().sum()
        with count_collectives() as counted:
            loss.backward()
        assert counted.calls("all_gather") == 4
        assert counted.calls("reduce_scatter") == 1
        assert most == [0] + [unit_bytes(model[0])] * 3
        assert buffers.bytes() == 0
        close(model[0].weight.grad, plain[0].weight.grad)
        assert model[1].weight.grad is None

    with watched(monkeypatch) as found:
        simulate(program, ranks=2)


def test_tensor_cuts_stay_outermost() -> None:
    """Gathered over dp, a rank has just what tensor parallelism gave it; uneven."""

    def program() -> None:
        mesh = mesh_of(2, 2, names=("dp", "tp"))
        torch.manual_seed(0)
        layer = nn.Linear(3, 7)
        parallelize_module(layer, mesh, Colwise)
        piece = layer.weight.to_local().detach().clone()
        fully_shard(layer, mesh["dp"])  # the mesh is that of the parameters
        assert layer.weight.placements == (S(0, depth=1), S(0, depth=0))
        rows = layer.weight.to_local().shape[0]
        assert (
            rows
            == ([2, 2], [2, 1])[mesh.get_local_rank("tp")][mesh.get_local_rank("dp")]
        )
        inside = []

        def spy(module: nn.Module, args: Any) -> None:
            inside.append(module.weight)

        layer.register_forward_pre_hook(spy)
        layer(distribute_tensor(torch.ones(4, 3), mesh, [S(0), R]))
        assert inside[0].placements == (R, S(0))
        assert torch.equal(inside[0].to_local(), piece)

    simulate(program, ranks=4)


def test_fused_projections_are_cut_along_the_other_dim() -> None:
    """Sections keep dim 0; a bias of sections stays whole along the axis."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 12)
            self.last = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.first(x).split([6, 6], -1)
            found: Tensor = self.last(torch.tanh(gate) * up)
            return found

    torch.manual_seed(0)
    plain = Net().double()
    x = torch.randn(4, 5, dtype=torch.float64)
    plain(x).square().sum().backward()

    def program() -> None:
        mesh = mesh_of(2, 2, names=("dp", "tp"))
        model = copy.deepcopy(plain)
        model.zero_grad()
        plan = {"first": FusedColwise((6, 6), use_local_output=False), "last": Rowwise}
        parallelize_module(model, mesh, plan)
        fully_shard(model, mesh)
        cut = Sections(0, (6, 6))
        assert model.first.weight.placements == (S(1), cut)
        assert model.first.bias.placements == (R, cut)
        assert model.last.weight.placements == (S(0), S(1))
        fed = distribute_tensor(x, mesh, [S(0), R])
        with count_collectives() as counted:
            loss = model(fed).square().sum()
        assert counted.calls("all_gather", "dp") == 1
        loss.backward()
        check_gradients(model, plain)

    simulate(program, ranks=4)


def test_state_loads_and_copies() -> None:
    plain = make_model(0.0)

    def program() -> None:
        mesh = mesh_of(4)
        model = make_model(0.0)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
        lay_out(model, mesh, FSDP)
        state = model.state_dict()
        assert all(x.placements == (S(0),) for x in state.values())
        model.load_state_dict(plain.state_dict())
        for name, x in full_state_dict(model, rank0_only=False).items():
            close(x, plain.state_dict()[name])
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            loss_on(other, mesh).backward()
            check_gradients(other, serial())
            assert all(p.grad is None for p in model.parameters())
            assert other.__dict__[UNIT] is not model.__dict__[UNIT]
        block = copy.deepcopy(model.blocks[0])
        unit = block.__dict__[UNIT]
        assert unit.slots[0].places[0][0] in set(block.modules())
        model.load_state_dict(model.state_dict(), assign=True)
        model.float()
        loss_on(model, mesh).backward()
        assert model.head.weight.grad.dtype is torch.float32

    simulate(program, ranks=4)


def test_modules_on_meta_get_their_values_from_a_file() -> None:
    plain = make_model(0.0)

    def program() -> None:
        mesh = mesh_of(4)
        with torch.device("meta"):
            model = make_model(0.0)
        lay_out(model, mesh, FSDP)
        model.load_state_dict(plain.state_dict())
        loss_on(model, mesh).backward()
        check_gradients(model, serial())

    simulate(program, ranks=4)


def test_every_optimizer_equals_one_process() -> None:
    makers: list[Callable[..., torch.optim.Optimizer]] = [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.AdamW, lr=1e-3, eps=1e-6, foreach=True),
        partial(torch.optim.AdamW, lr=1e-3, eps=1e-6, fused=True),
        partial(torch.optim.Adagrad, lr=1e-2, eps=1e-6),
    ]
    wanted = []
    for make in makers:
        model = make_model(0.0)
        optimizer = make(model.parameters())
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            loss_on(model, None).backward()
            optimizer.step()
        wanted.append(model.state_dict())

    def program() -> None:
        mesh = mesh_of(3)
        for make, want in zip(makers, wanted, strict=True):
            model = make_model(0.0)
            lay_out(model, mesh, FSDP)
            optimizer = make(model.parameters())
            for _ in range(3):
                optimizer.zero_grad(set_to_none=False)
                loss_on(model, mesh).backward()
                optimizer.step()
            for name, x in model.state_dict().items():
                torch.testing.assert_close(whole(x), want[name], rtol=0, atol=1e-9)

    simulate(program, ranks=3)


# ---- models of other kinds -------------------------------------------------------------------
def test_a_recurrent_model_with_a_norm_of_its_weights() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)
            self.out = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(self.rnn(x)[0])
            return found

    torch.manual_seed(0)
    plain = Net().double()
    x = torch.randn(4, 3, 3, dtype=torch.float64)
    plain(x).square().sum().backward()

    def program() -> None:
        mesh = mesh_of(2)
        model = copy.deepcopy(plain)
        model.zero_grad()
        fully_shard(model.rnn, mesh)
        fully_shard(model, mesh)
        model(x.chunk(2)[mesh.get_local_rank()]).square().sum().backward()
        check_gradients(model, plain)

    simulate(program, ranks=2)


class Thrice(nn.Module):
    """One layer, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        found: Tensor = self.out(x)
        return found


@pytest.mark.parametrize("local", [False, True], ids=["dtensor", "local"])
def test_a_unit_that_is_called_several_times(local: bool) -> None:
    torch.manual_seed(0)
    plain = Thrice().double()
    x = torch.randn(4, 4, dtype=torch.float64)
    plain(x).square().sum().backward()

    def program() -> None:
        mesh = mesh_of(2)
        model = copy.deepcopy(plain)
        model.zero_grad()
        fully_shard(model.layer, mesh)
        fully_shard(model, mesh)
        fed = x.chunk(2)[mesh.get_local_rank()] if local else place(x, mesh, FSDP)
        model(fed).square().sum().backward()
        check_gradients(model, plain)

    simulate(program, ranks=2)


def test_ranks_outside_of_the_mesh_pass_by() -> None:
    def program() -> None:
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
        model = Thrice()
        fully_shard(model.layer, mesh)
        fully_shard(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(place(torch.ones(4, 4), mesh, FSDP)).square().sum().backward()
        optimizer.step()

    simulate(program, ranks=3)


def test_local_pieces_with_tensor_parallelism_inside() -> None:
    """Plain activations: parallelize_module sees to them, fully_shard to the rest."""
    from dtensor import ColwiseParallel, RowwiseParallel

    def program() -> None:
        mesh = mesh_of(2, 2, names=("dp", "tp"))
        model = make_model(0.0)
        first, then = ColwiseParallel(), RowwiseParallel()
        plan = {
            "": DataParallel(),
            "blocks.*.attention": {"qkv": first, "out": then},
            "blocks.*.mlp": {"up": first, "down": then},
        }
        parallelize_module(model, mesh, plan)
        for block in model.blocks:
            fully_shard(block, mesh)
        fully_shard(model, mesh)
        with count_collectives() as counted:
            loss = local_loss_on(model, mesh)
        assert not isinstance(loss, DTensor)
        assert counted.calls("all_gather", "dp") == 3
        loss.backward()
        check_gradients(model, serial())

    simulate(program, ranks=4)


def test_forward_without_grad_and_parts_with_it() -> None:
    def program() -> None:
        mesh = mesh_of(2)
        torch.manual_seed(0)
        layer = nn.Linear(2, 2).double()
        plain = copy.deepcopy(layer)

        def forward(module: nn.Module, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return F.linear(x, module.weight, module.bias).sum()

        layer.forward = partial(forward, layer)  # type: ignore[method-assign]
        fully_shard(layer, mesh)
        x = torch.arange(4.0, dtype=torch.float64).view(2, 2)
        with torch.no_grad():
            out = layer(place(x, mesh, FSDP))
        out.backward()
        plain(x).sum().backward()
        check_gradients(layer, plain)
        with torch.inference_mode():
            layer(place(x, mesh, FSDP))

    simulate(program, ranks=2)
