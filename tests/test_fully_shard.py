"""fully_shard: whole parameters only while they are used, one process's numbers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sharded_runs import SERIAL, WAYS, Way, distance, lay_out, make_model, place, train
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from dtensor import (
    Colwise,
    DataParallel,
    DeviceMesh,
    DTensor,
    FusedColwise,
    MixedPrecision,
    Replicate,
    Rowwise,
    Shard,
    ShardingError,
    count_collectives,
    distribute_tensor,
    full_state_dict,
    fully_shard,
    init_device_mesh,
    no_grad_sync,
    parallelize_module,
    simulate,
)
from dtensor.sections import Sections
from dtensor.styles.gathering import Packing
from dtensor.styles.saved import state_of
from dtensor.styles.unit import UNIT

import gpt  # isort: skip - found by way of sharded_runs

R, S = Replicate(), Shard
FSDP = WAYS["fsdp=4"]


@cache
def serial_run() -> list[Tensor]:
    return simulate(lambda: train(SERIAL), ranks=1, timeout=300)[0]


@pytest.mark.parametrize("name", WAYS)
def test_twenty_steps_equal_one_process(name: str) -> None:
    """AdamW, dropout, two micro-batches; losses and parameters."""
    way, want = WAYS[name], serial_run()
    ranks = torch.Size(way.shape).numel()
    for got in simulate(lambda: train(way), ranks=ranks, timeout=300):
        assert distance(got, want) < 1e-9


@pytest.mark.mpi
def test_twenty_steps_equal_one_process_under_mpiexec(
    mpi_run: Callable[..., Any],
) -> None:
    done = mpi_run("fully_shard_equals_serial.py", 4, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal") == 4


# ---- helpers -----------------------------------------------------------------------------
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


# ---- what is held, and what is sent ----------------------------------------------------------
@pytest.mark.parametrize("local", [False, True], ids=["dtensor", "local"])
def test_parameters_are_a_piece_and_one_open_block(
    monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    """In forward and backward alike: 1/N, the model's own unit, and one block."""

    def program() -> None:
        mesh = mesh_of(4)
        model = make_model(0.0, layers=4, dim=16, vocab=16, context=8)
        total = sum(p.numel() for p in model.parameters())
        lay_out(model, mesh, FSDP)
        held = sum(p.to_local().numel() for p in model.parameters())
        # All dims but that of the scalars' kind divide by four here.
        assert held == total // 4
        buffers = mine(found)
        block, own = unit_bytes(model.blocks[0]), unit_bytes(model)
        forward, backward = [], []

        def probe(module: nn.Module, args: Any, out: Tensor) -> None:
            forward.append(buffers.bytes())
            if out.requires_grad:
                out.register_hook(lambda g: backward.append(buffers.bytes()))

        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Dropout)):
                module.register_forward_hook(probe)
        for _ in range(2):
            forward.clear(), backward.clear()
            loss = local_loss_on(model, mesh) if local else loss_on(model, mesh)
            assert max(forward) == own + block and len(forward) == 4 * 8 + 2
            assert buffers.bytes() == 0  # autograd holds none
            loss.backward()
            assert max(backward) == own + block and len(backward) == len(forward)
            assert buffers.bytes() == 0
            with torch.no_grad():
                loss_on(model, mesh) if not local else local_loss_on(model, mesh)
            assert buffers.bytes() == 0
        assert not state_of(model.head.weight._spec.world).buffers

    with watched(monkeypatch) as found:
        simulate(program, ranks=4)


@pytest.mark.parametrize("keep", [False, True], ids=["reshard", "keep"])
@pytest.mark.parametrize("local", [False, True], ids=["dtensor", "local"])
def test_collectives_of_a_step(local: bool, keep: bool) -> None:
    """Per unit one all-gather forward, one backward, one reduce-scatter."""

    def program() -> None:
        mesh = mesh_of(4)
        model = make_model(0.0, layers=3)
        lay_out(model, mesh, FSDP, reshard_after_forward=not keep)
        units = 3 + 1
        for _ in range(2):
            with count_collectives() as forward:
                loss = local_loss_on(model, mesh) if local else loss_on(model, mesh)
            assert forward.calls("all_gather", "dp") == units
            assert forward.calls() == units + (0 if local else 1)  # the loss itself
            with count_collectives() as backward:
                loss.backward()
            gathers = 0 if keep else units
            assert backward.calls("all_gather", "dp") == gathers
            assert backward.calls("reduce_scatter", "dp") == units
            assert backward.calls() == gathers + units
            size = sum(p.numel() for p in model.parameters()) * 8
            assert backward.bytes("reduce_scatter") == size * 3 // 4
            assert forward.bytes("all_gather") == size * 3 // 4
        with torch.no_grad(), count_collectives() as counted:
            loss_on(model, mesh)
        # With nothing in between, what the last one kept is not what it was told.
        assert counted.calls("all_gather") == units

    simulate(program, ranks=4)


def test_hybrid_reduces_once_over_the_replicas() -> None:
    way = WAYS["hybrid"]

    def program() -> None:
        mesh = mesh_of(2, 2, names=way.names)
        model = make_model(0.0)
        lay_out(model, mesh, way)
        with no_grad_sync(), count_collectives() as first:
            loss = loss_on(model, mesh, way) / 2
            reduced = first.calls("all_reduce", "replica")  # of the loss
            loss.backward()
        assert first.calls("all_reduce", "replica") == reduced
        assert first.calls("reduce_scatter", "dp") == 3
        loss = loss_on(model, mesh, way) / 2
        with count_collectives() as second:
            loss.backward()
        # One bucket of pieces of gradients.
        assert second.calls("all_reduce", "replica") == 1
        pieces = sum(p.to_local().numel() for p in model.parameters())
        assert second.bytes("all_reduce", "replica") == 8 * pieces
        check_gradients(model, serial())

    simulate(program, ranks=4)


@pytest.mark.parametrize("local", [False, True], ids=["dtensor", "local"])
def test_gathering_early_changes_neither_numbers_nor_counts(
    monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    """The order of a backend that overlaps, on one that does not."""
    monkeypatch.setattr("dtensor.styles.unit.overlaps", lambda comm: True)

    def program() -> None:
        mesh = mesh_of(4)
        model = make_model(0.0, layers=3)
        lay_out(model, mesh, FSDP)
        buffers = mine(found)
        block, own = unit_bytes(model.blocks[0]), unit_bytes(model)
        most = []
        for inner in model.blocks:
            inner.norm2.register_forward_hook(lambda *_: most.append(buffers.bytes()))
        for step in range(3):
            most.clear()
            model.zero_grad()
            with count_collectives() as counted:
                loss = local_loss_on(model, mesh) if local else loss_on(model, mesh)
                loss.backward()
            assert counted.calls("all_gather") == 8
            assert counted.calls("reduce_scatter") == 4
            ahead = [own + 2 * block] * 2 + [own + block]
            assert most == (ahead if step else [own + block] * 3)
            assert buffers.bytes() == 0
            if step == 0:
                check_order(model)
        model.eval()
        with torch.no_grad():
            model.blocks[0](distribute_tensor(torch.ones(4, 2, 12).double(), mesh, [R]))
        assert buffers.bytes() == 0  # what was fetched for nothing is let go of

    def check_order(model: gpt.GPT) -> None:
        chain, unit = [], model.__dict__[UNIT]
        while unit is not None:
            chain.append(unit)
            unit = unit.after() if unit.after is not None else None
        assert chain == [m.__dict__[UNIT] for m in (model, *model.blocks)]

    with watched(monkeypatch) as found:
        simulate(program, ranks=4)


# ---- every way to a gradient ------------------------------------------------------------------
def repeated(model: gpt.GPT, loss: Callable[[], Tensor]) -> list[Any]:
    loss().backward()
    (3 * loss()).backward()
    return [p.grad for p in model.parameters()]


def together(model: gpt.GPT, loss: Callable[[], Tensor]) -> list[Any]:
    """Two forwards, one backward."""
    (loss() + 3 * loss()).backward()
    return [p.grad for p in model.parameters()]


def retained(model: gpt.GPT, loss: Callable[[], Tensor]) -> list[Any]:
    value = loss()
    value.backward(retain_graph=True)
    (3 * value).backward()
    return [p.grad for p in model.parameters()]


def functional(model: gpt.GPT, loss: Callable[[], Tensor]) -> list[Any]:
    found = list(torch.autograd.grad(loss(), list(model.parameters())))
    assert all(p.grad is None for p in model.parameters())
    return found


def second(model: gpt.GPT, loss: Callable[[], Tensor]) -> list[Any]:
    parameters = list(model.parameters())
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels are differentiable once
        first = torch.autograd.grad(loss(), parameters, create_graph=True)
        norm: Any = sum(g.square().sum() for g in first)
        if not isinstance(norm, DTensor):
            norm = norm / 1
        return list(torch.autograd.grad(norm, parameters))


def inside(model: gpt.GPT, loss: Callable[[], Tensor], reentrant: bool) -> list[Any]:
    """The forward of each unit is what is computed again."""
    for block in model.blocks:
        plain = block.forward
        block.forward = partial(checkpoint, plain, use_reentrant=reentrant)  # type: ignore[method-assign]
    return repeated(model, loss)


class Again(nn.Module):
    """A block called through ``checkpoint``."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def outside(model: gpt.GPT, loss: Callable[[], Tensor], reentrant: bool) -> list[Any]:
    """The call of each unit is what is computed again."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = Again(block, reentrant)
    return repeated(model, loss)


def attention_alone(model: gpt.GPT, loss: Callable[[], Tensor]) -> list[Any]:
    """A part of a unit is what is computed again."""
    for block in model.blocks:
        plain = block.attention.forward
        block.attention.forward = partial(checkpoint, plain, use_reentrant=False)
    return repeated(model, loss)


GRADIENTS: dict[str, Callable[..., list[Any]]] = {
    "repeated": repeated,
    "together": together,
    "retained": retained,
    "functional": functional,
    "second": second,
    "checkpoint inside": partial(inside, reentrant=False),
    "reentrant inside": partial(inside, reentrant=True),
    "checkpoint outside": partial(outside, reentrant=False),
    "reentrant outside": partial(outside, reentrant=True),
    "checkpoint of a part": attention_alone,
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("kind", ["dtensor", "kept", "local", "tp"])
def test_every_way_to_a_gradient(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "local" and name == "second":
        pytest.skip("a norm of gradients is a DTensor; the loss of a piece is not")
    model = make_model(0.0)
    want = GRADIENTS[name](model, lambda: loss_on(model, None))
    way = WAYS["fsdp x tp"] if kind == "tp" else FSDP

    def program() -> None:
        mesh = mesh_of(*way.shape, names=way.names)
        model = make_model(0.0)
        lay_out(model, mesh, way, reshard_after_forward=kind != "kept")

        def loss() -> Tensor:
            if kind == "local":
                return local_loss_on(model, mesh)
            return loss_on(model, mesh, way)

        got = GRADIENTS[name](model, loss)
        for g, w in zip(got, want, strict=True):
            close(g, w)
        del got
        assert all(p.placements[0].is_shard(0) for p in model.parameters())
        assert not state_of(model.head.weight._spec.world).buffers
        if name != "second":
            model.zero_grad()
            assert mine(found).bytes() == 0

    with watched(monkeypatch) as found:
        simulate(program, ranks=4)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", [inside, outside])
def test_what_is_computed_again_gathers_once_and_keeps_nothing(
    where: Callable[..., Any], reentrant: bool
) -> None:
    """Checkpoints see all activations: ours do not hide them from theirs."""

    def program() -> None:
        mesh = mesh_of(4)
        model = make_model(0.0, layers=3)
        lay_out(model, mesh, FSDP)
        kept: list[StorageWeakRef] = []

        def note(module: nn.Module, args: Any, out: Tensor) -> None:
            kept.append(StorageWeakRef(out.untyped_storage()))

        for block in model.blocks:
            block.mlp.up.register_forward_hook(note)
        loss = loss_on(model, mesh)
        assert len(kept) == 3 and not any(ref.expired() for ref in kept)
        del loss
        where(model, lambda: loss_on(model, mesh), reentrant)
        kept.clear()
        with count_collectives() as forward:
            loss = loss_on(model, mesh)
        assert forward.calls("all_gather") == 4
        with count_collectives() as backward:
            loss.backward()
        assert backward.calls("all_gather") == 4
        assert backward.calls("reduce_scatter") == 4

        loss = loss_on(model, mesh)
        assert kept and all(ref.expired() for ref in kept)
        del loss

    simulate(program, ranks=4)


# ---- parameters -------------------------------------------------------------------------------
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


# ---- failures ---------------------------------------------------------------------------------
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
