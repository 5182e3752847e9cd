"""Styles and parallelize_module: layouts, values, gradients, refusals."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
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
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    get_rank,
    init_device_mesh,
    simulate,
)
from dtensor.errors import ShardingError
from dtensor.mesh.chunks import chunk_offset, chunk_sizes
from dtensor.styles import (
    Colwise,
    ColwiseParallel,
    DataParallel,
    Layout,
    ParallelStyle,
    Port,
    Rowwise,
    RowwiseParallel,
    layout_of,
    parallelize_module,
)
from dtensor.styles.plan import axis_of, bound, flatten_plan, match_plan, nearest

R, S, P = Replicate(), Shard, Partial()
GRIDS = {(1,): ("tp",), (2,): ("tp",), (3,): ("tp",), (2, 2): ("dp", "tp")}


def run(program: Callable[..., Any], shape: tuple[int, ...], *args: Any) -> list[Any]:
    """A program on the mesh of a shape, over all its ranks."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=GRIDS.get(shape))
    return simulate(program, torch.Size(shape).numel(), args=(mesh, *args))


def close(got: Any, want: Any) -> None:
    if isinstance(got, DTensor):
        got = got.full_tensor()
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


class MLP(nn.Module):
    """The names that the plans below speak of."""

    def __init__(self, d: int = 6, h: int = 10, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d).double()
        self.up = nn.Linear(d, h, bias=bias).double()
        self.down = nn.Linear(h, d, bias=bias).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    """Two of them between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 6).double()
        self.layers = nn.ModuleList(MLP() for _ in range(2))
        self.head = nn.Linear(6, 7, bias=False).double()
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = x + layer(x)
        y: Tensor = self.head(x) * self.scale
        return y


def seeded(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    serial = make()
    return serial, copy.deepcopy(serial)


def check_gradients(serial: nn.Module, model: nn.Module) -> None:
    pairs = zip(serial.named_parameters(), model.parameters(), strict=True)
    for (name, p), q in pairs:
        assert isinstance(q, nn.Parameter), name
        assert isinstance(q, DTensor), name
        if not p.requires_grad:
            assert not q.requires_grad and q.grad is None, name
            continue
        assert q.grad is not None, name
        assert q.grad.placements == q.placements, name
        close(q.grad, p.grad)


# ---- the four styles, against the serial module --------------------------------------
@pytest.mark.parametrize("shape", GRIDS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_colwise_and_rowwise_linears(shape: tuple[int, ...], bias: bool) -> None:
    def program(mesh: DeviceMesh) -> None:
        for style, out in ((Colwise, S(2)), (Rowwise, P)):
            serial, model = seeded(lambda: nn.Linear(5, 7, bias=bias).double())
            assert parallelize_module(model, mesh, style) is model
            tp = mesh.axis("tp")
            x = torch.randn(2, 3, 5, dtype=torch.float64)
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            want, got = serial(a), model(b)
            assert got.placements[tp] == out
            close(got, want)
            want.square().sum().backward()
            got.square().sum().backward()
            assert b.grad is not None
            close(b.grad, a.grad)
            check_gradients(serial, model)

    run(program, shape)


@pytest.mark.parametrize("place", [R, S(0), S(1), S(2), P], ids=str)
def test_dtensor_inputs_are_brought_where_the_module_wants_them(place: Any) -> None:
    def program(mesh: DeviceMesh) -> None:
        for style in (Colwise(), Rowwise(), ColwiseParallel(), RowwiseParallel()):
            serial, model = seeded(lambda: nn.Linear(5, 7).double())
            parallelize_module(model, mesh, style)
            x = torch.randn(2, 3, 5, dtype=torch.float64)
            a = x.clone().requires_grad_()
            b = distribute_tensor(x, mesh, [place]).requires_grad_()
            want, got = serial(a), model(b)
            if isinstance(style, ColwiseParallel):
                assert type(got) is Tensor
                close(got, want.chunk(2, -1)[get_rank()])
                got = DTensor.from_local(got, mesh, [S(2)])
            elif isinstance(style, RowwiseParallel):
                assert type(got) is Tensor
                close(got, want)
                got = DTensor.from_local(got, mesh, [R], grad_placements=[R])
            want.square().sum().backward()
            got.square().sum().backward()
            check_gradients(serial, model)
            if place != P:
                close(b.grad, a.grad)

    run(program, (2,))


@pytest.mark.parametrize("shape", GRIDS, ids=str)
def test_embeddings(shape: tuple[int, ...]) -> None:
    def program(mesh: DeviceMesh) -> None:
        tp = mesh.axis("tp")
        ids = torch.tensor([[0, 3, 6], [6, 6, 1]])
        for style, weight, out in (
            (Colwise(), S(1), S(2)),
            (Rowwise(), S(0), P),
            (ColwiseParallel(output_layouts=R), S(1), None),
            (RowwiseParallel(input_layouts=R), S(0), None),
        ):
            serial, model = seeded(lambda: nn.Embedding(7, 5).double())
            parallelize_module(model, mesh, style)
            assert model.weight.placements[tp] == weight  # type: ignore[union-attr]
            want, got = serial(ids), model(ids)
            close(got, want)
            if out is not None:
                assert got.placements[tp] == out
            want.square().sum().backward()
            got.square().sum().backward()
            check_gradients(serial, model)

    run(program, shape)


@pytest.mark.parametrize("shape", GRIDS, ids=str)
def test_parallel_pair_with_every_layout(shape: tuple[int, ...]) -> None:
    """Layouts of the outer sides; with three ranks uneven features and empty rows."""

    def piece(x: Tensor, place: Any, mesh: DeviceMesh) -> Tensor:
        if place == R:
            return x
        dim, n, at = place.dim % x.ndim, mesh.size("tp"), mesh.get_local_rank("tp")
        size = chunk_sizes(x.shape[dim], n)[at]
        return x.narrow(dim, chunk_offset(x.shape[dim], n, at), size)

    def program(mesh: DeviceMesh) -> None:
        places: list[Any] = [R, S(0), S(1), S(-1)]
        for first, last, local in itertools.product(places, places, (True, False)):
            serial, model = seeded(
                lambda: nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6)).double()
            )
            row = RowwiseParallel(output_layouts=last, use_local_output=local)
            plan = {"0": ColwiseParallel(input_layouts=first), "1": row}
            parallelize_module(model, mesh, plan)
            whole = torch.randn(4, 5, 6, dtype=torch.float64)
            a = whole.clone().requires_grad_()
            b = piece(whole, first, mesh).clone().requires_grad_()
            want, got = serial(a), model(b)
            if local:
                assert type(got) is Tensor
                close(got, piece(want, last, mesh))
            else:
                assert got.placements[mesh.axis("tp")].is_replicate() == (last == R)
                close(got, want)
            want.square().sum().backward()
            got.square().sum().backward()
            assert b.grad is not None and a.grad is not None
            close(b.grad, piece(a.grad, first, mesh))
            check_gradients(serial, model)

    run(program, shape)


def test_rowwise_adds_its_bias_once() -> None:
    def program(mesh: DeviceMesh) -> None:
        model = nn.Linear(4, 3).double()
        with torch.no_grad():
            model.weight.zero_()
            model.bias.fill_(1.0)
        parallelize_module(model, mesh, RowwiseParallel(input_layouts=R))
        out = model(torch.zeros(2, 4, dtype=torch.float64))
        close(out, torch.ones(2, 3, dtype=torch.float64))
        out.sum().backward()
        close(model.bias.grad, torch.full((3,), 2.0, dtype=torch.float64))

    run(program, (3,))


# ---- whole modules ---------------------------------------------------------------------
TYPED = {
    "layers.*.up": Colwise(),
    "layers.*.down": RowwiseParallel(use_local_output=False),
}
LOCAL = {"layers.*": {"up": ColwiseParallel(), "down": RowwiseParallel()}}


@pytest.mark.parametrize("shape", GRIDS, ids=str)
@pytest.mark.parametrize("plan", [TYPED, LOCAL], ids=["typed", "local"])
def test_model_by_a_plan_from_outside(shape: tuple[int, ...], plan: Any) -> None:
    def program(mesh: DeviceMesh) -> None:
        serial, model = seeded(Net)
        with mesh:
            parallelize_module(model, plan)
        lay = layout_of(model)
        tp = mesh.axis("tp")
        cut = {name: places[tp] for name, places in lay.items() if places[tp] != R}
        right = {"up.weight": S(0), "up.bias": S(0), "down.weight": S(1)}
        assert cut == {f"layers.{i}.{k}": p for i in (0, 1) for k, p in right.items()}
        if mesh.ndim == 2:
            assert all(places[0] == R for places in lay.values())
        ids = torch.tensor([[0, 3, 6], [6, 6, 1]])
        want, got = serial(ids), model(ids)
        assert isinstance(got, DTensor) == (plan is TYPED)
        close(got, want)
        want.square().mean().backward()
        got.square().mean().backward()
        check_gradients(serial, model)
        # The plain tensors were lent for the call only.
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert isinstance(model.scale, DTensor)

    run(program, shape)


@pytest.mark.parametrize("local", [True, False])
def test_batch_split_over_the_other_axis(local: bool) -> None:
    def program(mesh: DeviceMesh) -> None:
        serial, model = seeded(Net)
        plan: dict[str, Any] = dict(LOCAL if local else TYPED)
        if local:
            plan[""] = DataParallel()
        parallelize_module(model, mesh, plan)
        ids = torch.tensor([[0, 3, 6], [6, 6, 1], [2, 2, 2], [5, 4, 3]])
        want = serial(ids).square().mean()
        want.backward()
        if local:
            mine = ids.chunk(2)[mesh.get_local_rank("dp")]
            (model(mine).square().mean() / 2).backward()
        else:
            got = model(distribute_tensor(ids, mesh, [S(0), R])).square().mean()
            close(got, want)
            got.backward()
        check_gradients(serial, model)

    run(program, (2, 2))


def test_modules_laid_out_inside_and_the_rest_from_outside() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            up, down = nn.Linear(6, 8).double(), nn.Linear(8, 6).double()
            self.up = parallelize_module(up, Colwise)
            self.down = parallelize_module(down, Rowwise())
            self.norm = nn.LayerNorm(6).double()

        def forward(self, x: Tensor) -> Any:
            y: Any = self.down(F.relu(self.up(x)))
            return self.norm(y.redistribute(R))

    def program(mesh: DeviceMesh) -> None:
        with mesh:
            model = Inside()
            assert type(model.norm.weight) is nn.Parameter
            parallelize_module(model, {})
        assert layout_of(model)["norm.weight"] == (R,) * mesh.ndim
        assert layout_of(model)["up.weight"][-1] == S(0)
        out = model(torch.ones(2, 6, dtype=torch.float64))
        assert out.placements == (R,) * mesh.ndim

    run(program, (2, 2))


def test_blocks_laid_out_after_the_root() -> None:
    """The order of many training scripts: outer parts first, then block by block."""

    def program(mesh: DeviceMesh, plan: Any) -> None:
        serial, model = seeded(Net)
        parallelize_module(model, mesh, {"head": plan["head"]})
        frozen = model.layers[0].up.bias.requires_grad_(False)  # type: ignore[index,union-attr]
        frozen.decay = False
        serial.layers[0].up.bias.requires_grad_(False)  # type: ignore[index,union-attr]
        for layer in model.layers:  # type: ignore[union-attr]
            parallelize_module(
                layer, mesh, {k: v for k, v in plan.items() if k != "head"}
            )
        assert layout_of(model)["layers.1.up.weight"] == (S(0),)
        again = model.layers[0].up.bias  # type: ignore[index,union-attr]
        assert again is not frozen and again.decay is False and not again.requires_grad
        ids = torch.tensor([[0, 3, 6], [6, 6, 1]])
        want, got = serial(ids), model(ids)
        close(got, want)
        want.square().mean().backward()
        got.square().mean().backward()
        check_gradients(serial, model)

    row = RowwiseParallel()
    local = {"head": ColwiseParallel(output_layouts=R), "up": ColwiseParallel()}
    run(program, (2,), local | {"down": row})
    row = RowwiseParallel(use_local_output=False)
    typed = {"head": Colwise(), "up": Colwise(), "down": row}
    run(program, (2,), typed)


def test_frozen_stays_frozen_and_training_state_and_marks_survive() -> None:
    def program(mesh: DeviceMesh) -> None:
        model = MLP()
        model.up.weight.requires_grad_(False)
        model.norm.bias.requires_grad_(False)
        model.down.weight.decay = False  # type: ignore[assignment]
        model.eval()
        seen: list[Any] = []
        model.up.register_forward_pre_hook(lambda m, a: seen.append("before"))
        model.up.register_forward_hook(lambda m, a, out: seen.append(type(out)))
        parallelize_module(model, mesh, {"up": Colwise, "down": Rowwise})
        frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
        assert frozen == {"up.weight", "norm.bias"}
        assert model.down.weight.decay is False  # type: ignore[comparison-overlap]
        assert not model.training and not model.up.training
        model(distribute_tensor(torch.ones(2, 6, dtype=torch.float64), mesh, [R]))
        assert seen == ["before", DTensor]

    run(program, (2,))


@pytest.mark.parametrize("local", [True, False])
def test_tied_parameters_stay_one(local: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(8, 4).double()
            self.head = nn.Linear(4, 8, bias=False).double()
            self.head.weight = self.emb.weight

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.head(self.emb(ids))
            return y

    def program(mesh: DeviceMesh) -> None:
        serial, model = seeded(Tied)
        plan = {
            "emb": RowwiseParallel(input_layouts=R, use_local_output=local),
            "head": ColwiseParallel(output_layouts=R, use_local_output=local),
        }
        parallelize_module(model, mesh, plan)
        assert model.emb.weight is model.head.weight  # type: ignore[union-attr]
        ids = torch.tensor([1, 5, 7, 1])
        want, got = serial(ids), model(ids)
        close(got, want)
        want.square().sum().backward()
        got.square().sum().backward()
        check_gradients(serial, model)

    run(program, (2,))

    def refused(mesh: DeviceMesh) -> None:
        model = Tied()
        with pytest.raises(ValueError, match="tied parameters must lie alike"):
            parallelize_module(model, mesh, {"emb": Colwise, "head": Colwise})
        assert type(model.emb.weight) is nn.Parameter
        emb = RowwiseParallel(input_layouts=R)
        with pytest.raises(ValueError, match=r"'head.weight' is tied to a parameter"):
            parallelize_module(model, mesh, {"emb": emb})
        assert model.emb.weight is model.head.weight

    run(refused, (2,))


def test_deepcopy_and_pickle_of_a_laid_out_module() -> None:
    def program(mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        model = parallelize_module(MLP(), mesh, LOCAL["layers.*"])
        x = torch.randn(3, 6, dtype=torch.float64)
        want = model(x)
        again = copy.deepcopy(model)
        assert again.up.weight is not model.up.weight
        close(again(x), want)
        again(x).sum().backward()
        assert model.up.weight.grad is None  # type: ignore[union-attr]
        if hasattr(DTensor, "__reduce_ex__"):
            close(pickle.loads(pickle.dumps(model))(x), want)

    run(program, (2,))


def test_a_failing_forward_gives_the_parameters_back() -> None:
    def program(mesh: DeviceMesh) -> None:
        model = parallelize_module(MLP(), mesh, LOCAL["layers.*"])
        with pytest.raises(RuntimeError, match="normalized_shape"):
            model(torch.ones(2, 5, dtype=torch.float64))
        assert isinstance(model.norm.weight, DTensor)
        assert model(torch.ones(2, 6, dtype=torch.float64)).shape == (2, 6)

    run(program, (2,))


def test_running_statistics_of_a_module_on_plain_tensors() -> None:
    def program(mesh: DeviceMesh) -> None:
        serial, model = seeded(
            lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
        )
        plan = {"0": ColwiseParallel(output_layouts=R)}
        plan["2"] = RowwiseParallel(input_layouts=R)  # type: ignore[assignment]
        parallelize_module(model, mesh, plan)
        x = torch.randn(5, 4)
        torch.testing.assert_close(model(x), serial(x))
        for (name, b), c in zip(serial.named_buffers(), model.buffers(), strict=True):
            assert isinstance(c, DTensor), name
            torch.testing.assert_close(c.full_tensor(), b)

    run(program, (2,))


def test_a_mesh_of_some_ranks_and_in_another_order() -> None:
    def program() -> None:
        for ranks in ([2, 0], [3, 1, 0, 2]):
            mesh = DeviceMesh("cpu", ranks)
            serial, model = seeded(MLP)
            parallelize_module(model, mesh, {"up": Colwise, "down": Rowwise})
            if mesh.coordinate is not None:
                x = torch.randn(2, 6, dtype=torch.float64)
                fed = distribute_tensor(x, mesh, [R])
                close(model(fed), serial(x))

    simulate(program, 4)


def test_values_come_from_one_rank_or_from_each() -> None:
    def program(mesh: DeviceMesh) -> None:
        def make() -> nn.Linear:
            model = nn.Linear(2, 2, bias=False)
            nn.init.constant_(model.weight, get_rank())
            return model

        for src, want in ((0, [0, 0]), (1, [1, 1]), (None, [0, 1])):
            model = parallelize_module(make(), mesh, Colwise, src_data_rank=src)
            full = model.weight.full_tensor()  # type: ignore[operator,union-attr]
            assert full[:, 0].tolist() == want

    run(program, (2,))


# ---- a style of one's own ----------------------------------------------------------------
class Filters(ParallelStyle):
    def layout(self, module: nn.Module) -> Layout:
        return Layout(
            {"weight": Shard(0), "bias": Shard(0)},
            inputs=Port(given=Replicate(), wanted=Replicate()),
        )


def test_a_style_is_one_class_with_one_method() -> None:
    def program(mesh: DeviceMesh) -> None:
        serial, model = seeded(lambda: nn.Bilinear(3, 4, 6).double())
        parallelize_module(model, mesh, Filters)
        assert layout_of(model) == {"weight": (S(0),), "bias": (S(0),)}
        scaled = parallelize_module(nn.Linear(4, 6).double(), mesh, Filters())
        assert scaled(torch.ones(2, 4, dtype=torch.float64)).placements == (S(1),)

    run(program, (2,))


def test_a_style_without_its_method_or_with_a_wrong_answer() -> None:
    class Empty(ParallelStyle):
        pass

    class Wrong(ParallelStyle):
        def layout(self, module: nn.Module) -> Any:
            return {"weight": Shard(0)}

    class Misspelt(ParallelStyle):
        def layout(self, module: nn.Module) -> Layout:
            return Layout({"wieght": Shard(0)})

    class TooDeep(ParallelStyle):
        def layout(self, module: nn.Module) -> Layout:
            return Layout({"bias": Shard(1)})

    mesh = init_device_mesh("cpu", (1,))
    for style, kind, text in (
        (Empty, NotImplementedError, "a style defines layout"),
        (Wrong, TypeError, "must give a Layout"),
        (Misspelt, ValueError, r"got 'wieght', expected one of \['weight', 'bias'\]"),
        (TooDeep, ShardingError, "'bias'.*shards a dim that is not there"),
    ):
        model = nn.Linear(2, 2)
        with pytest.raises(kind, match=text):
            parallelize_module(model, mesh, style)
        assert type(model.weight) is nn.Parameter


# ---- plans ---------------------------------------------------------------------------------
def test_names_wildcards_and_nesting() -> None:
    names = ["", "a", "a.0", "a.0.up", "a.1", "a.1.up", "a.1.mlp", "a.1.mlp.up", "up"]
    c, r = Colwise(), Rowwise()

    def matched(plan: Any) -> dict[str, list[str]]:
        found = match_plan(flatten_plan(plan), names, strict=True)
        return {name: [repr(s) for _, s in given] for name, given in found.items()}

    def only(*keys: str) -> dict[str, list[str]]:
        return {key: ["Colwise()"] for key in keys}

    assert matched(c) == matched({"": Colwise}) == only("")
    assert matched({"a.*.up": c}) == only("a.0.up", "a.1.up")
    assert matched({"**.up": c}) == only("a.0.up", "a.1.up", "a.1.mlp.up", "up")
    assert matched({"a.**": c}) == only(*(n for n in names if n.startswith("a.")))
    assert matched({"a": {"[01]": {"u?": c}}}) == only("a.0.up", "a.1.up")
    assert matched({"a.1": {"": c, "up": c}}) == only("a.1", "a.1.up")
    assert matched({"*": c}) == only("a", "up")
    # An exact name goes before a wildcard, on the same axis.
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    for d in (Colwise(mesh_dim="dp"), Colwise()):
        found = match_plan(flatten_plan({"a.*.up": d, "a.0.up": r}), names, True)
        rows = [style for _, style, _ in bound(found["a.0.up"], "a.0.up", mesh, None)]
        assert rows == ([d, r] if d.mesh_dim else [r])
    both = [Colwise(mesh_dim="tp"), DataParallel()]
    assert len(matched({"up": both})["up"]) == 2


def test_names_that_match_nothing() -> None:
    mesh = init_device_mesh("cpu", (1,))
    net = Net()
    with pytest.raises(ValueError, match=r"'layers.\*.upp' .*matches no module, the n"):
        parallelize_module(net, mesh, {"layers.*.upp": Colwise, "head": Colwise})
    assert type(net.head.weight) is nn.Parameter
    with pytest.warns(UserWarning, match=r"'hed' .*nearest are \['head'\]"):
        parallelize_module(net, mesh, {"hed": Colwise}, strict=False)
    assert nearest("layers.0.dwn", [n for n, _ in net.named_modules()])[0] == (
        "layers.0.down"
    )


def test_wrong_plans() -> None:
    mesh = init_device_mesh("cpu", (1,))
    linear = nn.Linear(2, 2)
    for plan, text in (
        ({"": 3}, "not a plan, got 3"),
        ({3: Colwise}, "a plan key must be a module's name, got 3"),
        ({"": nn.Linear}, "not a plan"),
    ):
        with pytest.raises(TypeError, match=text):
            parallelize_module(linear, mesh, plan)
    with pytest.raises(TypeError, match="two plans"):
        parallelize_module(linear, Colwise, Rowwise)
    with pytest.raises(TypeError, match="not a module, got int"):
        parallelize_module(3, mesh, Colwise)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Colwise: no layout for .*got LayerNorm"):
        parallelize_module(nn.LayerNorm(3), mesh, Colwise)
    with pytest.raises(TypeError, match=r"output_layouts is not a placement, got 0"):
        ColwiseParallel(output_layouts=0)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="no plan was given, Linear is left as it is"):
        assert parallelize_module(linear, mesh) is linear
    assert type(linear.weight) is nn.Parameter


def test_the_second_argument_may_be_mesh_or_plan() -> None:
    mesh = init_device_mesh("cpu", (1,))
    with mesh:
        for args in ((Colwise,), (Colwise(),), ({"": Colwise},), (None, Colwise)):
            assert isinstance(
                parallelize_module(nn.Linear(2, 2), *args).weight, DTensor
            )
    made = parallelize_module(
        nn.Linear(2, 2), device_mesh=mesh, parallelize_plan=Colwise
    )
    assert isinstance(made.weight, DTensor)


def test_no_mesh() -> None:
    with pytest.raises(ValueError, match="No active device mesh.*with mesh:"):
        parallelize_module(nn.Linear(2, 2), Colwise)


def test_two_keys_for_one_module_and_a_plan_applied_twice() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    net = Net()
    plan = {"layers.*.up": Colwise, "layers.0.u*": Rowwise}
    with pytest.raises(
        ValueError, match="two styles for 'layers.0.up' along axis 'tp'"
    ):
        parallelize_module(net, mesh, plan)
    parallelize_module(net, mesh, TYPED)
    text = r"'layers.0.up' is laid out already along axis 'tp', by Colwise\(\)"
    with pytest.raises(ValueError, match=text):
        parallelize_module(net, mesh, TYPED)
    other = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match="laid out already on another mesh"):
        parallelize_module(net, other, {"layers.*.up": Colwise})


def test_all_or_nothing() -> None:
    mesh = init_device_mesh("cpu", (1,))
    net = Net()
    before = dict(net.named_parameters())
    with pytest.raises(TypeError, match="no layout"):
        parallelize_module(net, mesh, {"head": Colwise, "layers.1.norm": Rowwise})
    assert all(p is before[n] for n, p in net.named_parameters())
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_lazy_modules_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lazy = nn.LazyLinear(3)
    with pytest.raises(ValueError, match="has no shape yet"):
        parallelize_module(lazy, mesh, Colwise)


# ---- axes ----------------------------------------------------------------------------------
def test_which_axis_a_style_binds_to() -> None:
    line = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    bare = init_device_mesh("cpu", (2, 2))
    assert axis_of(Colwise(), line, None) == 0
    assert axis_of(Colwise(), grid, None) == 1
    assert axis_of(Colwise(), grid, "dp") == 0
    assert axis_of(Colwise(mesh_dim="tp"), grid, "dp") == 1
    assert axis_of(Colwise(mesh_dim=1), bare, None) == 1
    with pytest.raises(ValueError, match=re.escape("expected one of 'a', 'b'")):
        axis_of(Colwise(), other, None)
    with pytest.raises(ValueError, match=r"Colwise\(mesh_dim=1\), or pass mesh_dim="):
        axis_of(Colwise(), bare, None)
    with pytest.raises(ValueError, match=r"does not have\..*'dp', 'tp'"):
        axis_of(Colwise(mesh_dim="pp"), grid, None)


def test_styles_of_two_axes_on_one_module() -> None:
    """Output features over one axis, input features over the other."""

    def program(mesh: DeviceMesh) -> None:
        serial, model = seeded(lambda: nn.Linear(6, 8).double())
        parallelize_module(
            model, mesh, [Colwise(mesh_dim="tp"), Rowwise(mesh_dim="dp")]
        )
        assert model.weight.placements == (S(1), S(0))  # type: ignore[union-attr]
        assert model.bias.placements == (R, S(0))  # type: ignore[union-attr]
        x = torch.randn(3, 6, dtype=torch.float64)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        want, got = serial(a), model(b)
        assert got.placements == (P, S(1))
        close(got, want)
        want.square().sum().backward()
        got.square().sum().backward()
        assert b.grad is not None
        close(b.grad, a.grad)
        check_gradients(serial, model)

    run(program, (2, 2))


def test_inputs_on_another_mesh_are_refused() -> None:
    def program(mesh: DeviceMesh) -> None:
        model = parallelize_module(nn.Linear(2, 2), mesh, Colwise)
        other = init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
        x = distribute_tensor(torch.ones(2, 2), other, [R])
        with pytest.raises(
            ShardingError, match="Linear: the input lies on another mesh"
        ):
            model(x)

    run(program, (2,))


def test_the_same_plan_on_several_meshes_and_its_text() -> None:
    plan = {"up": Colwise(mesh_dim="tp"), "down": RowwiseParallel(output_layouts=S(0))}
    assert repr(plan["up"]) == "Colwise(mesh_dim='tp')"
    assert "output_layouts=Shard(dim=0)" in repr(plan["down"])

    def program(mesh: DeviceMesh) -> None:
        parallelize_module(MLP(), mesh, plan)

    for shape in ((1,), (2,), (2, 2)):
        run(program, shape)


def test_data_parallel_alone_takes_plain_pieces_of_the_batch() -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Embedding(6, 3), nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2)]
        return nn.Sequential(*layers)

    x = torch.arange(8) % 6
    serial = network()
    (serial(x) ** 2).sum().backward()

    def program() -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model = parallelize_module(network(), mesh, DataParallel())
        y = model(x.chunk(4)[mesh.get_local_rank("dp")])
        assert type(y) is torch.Tensor
        (y**2).sum().backward()
        return [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr, operator]

    for found in simulate(program, ranks=4):
        for got, p in zip(found, serial.parameters(), strict=True):
            torch.testing.assert_close(got, p.grad)
