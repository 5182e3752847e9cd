"""Every optimizer of torch.optim equals the serial run, parameters on several meshes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_harness import place

from dtensor import (
    Colwise,
    DeviceMesh,
    DTensor,
    Replicate,
    Rowwise,
    Shard,
    ShardingError,
    init_device_mesh,
    parallelize_module,
    simulate,
)
from dtensor.placement import Placements

T = torch.Tensor
optim = torch.optim
torch.set_num_threads(1)
R, S, C = Replicate(), Shard(0), Shard(1)
STEPS = 20
LINE = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
SHAPES = [(5, 3), (6, 4), (3, 4), (4, 4), (7, 2)]

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda p, **k: optim.SGD(p, 0.05, **k),
    "SGD momentum": lambda p, **k: optim.SGD(
        p, 0.05, momentum=0.9, dampening=0.1, weight_decay=0.1, **k
    ),
    "SGD nesterov": lambda p, **k: optim.SGD(
        p, 0.05, momentum=0.9, nesterov=True, maximize=True, **k
    ),
    "Adam": lambda p, **k: optim.Adam(p, 0.05, weight_decay=0.1, **k),
    "Adam amsgrad": lambda p, **k: optim.Adam(p, 0.05, amsgrad=True, **k),
    "Adam decoupled": lambda p, **k: optim.Adam(
        p, 0.05, weight_decay=0.1, decoupled_weight_decay=True, **k
    ),
    "AdamW": lambda p, **k: optim.AdamW(p, 0.05, **k),
    "AdamW maximize": lambda p, **k: optim.AdamW(p, 0.05, maximize=True, **k),
    "Adagrad": lambda p, **k: optim.Adagrad(p, 0.05, lr_decay=0.01, **k),
    "Adamax": lambda p, **k: optim.Adamax(p, 0.05, weight_decay=0.1, **k),
    "NAdam": lambda p, **k: optim.NAdam(p, 0.05, weight_decay=0.1, **k),
    "NAdam decoupled": lambda p, **k: optim.NAdam(
        p, 0.05, weight_decay=0.1, decoupled_weight_decay=True, **k
    ),
    "RAdam": lambda p, **k: optim.RAdam(p, 0.05, weight_decay=0.1, **k),
    "RMSprop": lambda p, **k: optim.RMSprop(p, 0.05, momentum=0.5, centered=True, **k),
    "Rprop": lambda p, **k: optim.Rprop(p, 0.05, **k),
    "Adadelta": lambda p, **k: optim.Adadelta(p, 0.5, weight_decay=0.1, **k),
    "ASGD": lambda p, **k: optim.ASGD(p, 0.05, t0=5, weight_decay=0.1, **k),
    "Adafactor": lambda p, **k: optim.Adafactor(p, 0.05, **k),
    "Muon": lambda p, **k: optim.Muon(p, 0.05, **k),
}
FUSED = {"SGD", "SGD momentum", "SGD nesterov", "Adagrad"}
FUSED |= {n for n in OPTIMIZERS if n.startswith("Adam") and n != "Adamax"}
KINDS: dict[str, dict[str, bool]] = {
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
    "fused": {"fused": True},
    "default": {},
}
# Mesh (whole, a slice by name, or None for a plain tensor) and placements of each.
LAYOUTS: dict[str, list[tuple[DeviceMesh, tuple[str, ...] | None, Placements]]] = {
    "one axis": [
        (LINE, ("tp",), (S,)),
        (LINE, ("tp",), (C,)),
        (LINE, ("tp",), (R,)),
        (LINE, ("tp",), (S,)),
        (LINE, ("tp",), (C,)),
    ],
    "nested": [
        (GRID, ("dp", "tp"), (S, S)),
        (GRID, ("dp", "tp"), (S, C)),
        (GRID, ("dp", "tp"), (R, R)),
        (GRID, ("dp", "tp"), (C, R)),
        (GRID, ("dp", "tp"), (Shard(0, 1), Shard(0, 0))),
    ],
    "mixed": [
        (GRID, ("dp", "tp"), (S, C)),
        (GRID, ("tp",), (S,)),
        (GRID, ("dp",), (R,)),
        (GRID, None, ()),
        (GRID, ("dp", "tp"), (R, C)),
    ],
}


def normal(shape: tuple[int, ...], seed: int) -> T:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


def placed(t: T, where: Any) -> Any:
    mesh, axes, places = where
    if axes is None:
        return t
    return place(t, mesh if axes == mesh.mesh_dim_names else mesh[axes], places)


def full(x: Any) -> T:
    return x.full_tensor().detach() if isinstance(x, DTensor) else x.detach()


def set_gradients(params: list[Any], step: int, rows: Any) -> None:
    """A gradient that depends on the parameter, so that errors would grow."""
    for i, (p, row) in enumerate(zip(params, rows, strict=True)):
        noise = normal(SHAPES[i], 1000 * step + i)
        p.grad = (0.3 * p + placed(noise, row)).detach()


def train(optimizer: Any, params: list[Any], rows: Any, first: int, last: int) -> None:
    for step in range(first, last):
        set_gradients(params, step, rows)
        optimizer.step()


def leaves(rows: Any) -> list[Any]:
    return [
        torch.nn.Parameter(placed(normal(s, i), row))
        for i, (s, row) in enumerate(zip(SHAPES, rows, strict=True))
    ]


SERIAL = [(GRID, None, ())] * len(SHAPES)


def options(name: str, kind: str) -> dict[str, bool] | None:
    if kind == "fused" and name not in FUSED:
        return None
    if name == "Muon" and kind != "default":
        return None
    return KINDS[kind]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_serial_run(name: str, layout: str) -> None:
    kinds = {k: o for k in KINDS if (o := options(name, k)) is not None}
    wants = {}
    for kind, kw in kinds.items():
        params = leaves(SERIAL)
        train(OPTIMIZERS[name](params, **kw), params, SERIAL, 0, STEPS)
        wants[kind] = params
    rows = LAYOUTS[layout]

    def program() -> list[str]:
        wrong = []
        for kind, kw in kinds.items():
            params = leaves(rows)
            optimizer = OPTIMIZERS[name](params, **kw)
            train(optimizer, params, rows, 0, STEPS)
            for p, w, row in zip(params, wants[kind], rows, strict=True):
                if not torch.allclose(full(p), w, 1e-9, 1e-9):
                    wrong.append(f"{name} {kind} at {row}: {full(p)} {w}")
                for key, value in optimizer.state[p].items():
                    if isinstance(p, DTensor) and isinstance(value, T):
                        if value.shape == p.shape:
                            assert isinstance(value, DTensor), key
                            assert value.placements == p.placements, key
                            assert value.device_mesh is p.device_mesh, key
        return wrong

    found = simulate(program, ranks=4, timeout=200)
    assert not any(found), "\n".join(dict.fromkeys(x for f in found for x in f))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs(layout: str, search: str | None) -> None:
    def run(rows: Any) -> list[T]:
        params = leaves(rows)
        aims = [
            placed(normal(s, 50 + i), r) for i, (s, r) in enumerate(zip(SHAPES, rows))
        ]
        optimizer = optim.LBFGS(params, 0.3, max_iter=2, line_search_fn=search)

        def closure() -> Any:
            optimizer.zero_grad()
            total: Any = 0.0
            for p, aim in zip(params, aims, strict=True):
                d = (p - aim).square().sum() + 0.1 * (p - aim).pow(4).sum()
                total = total + (d.full_tensor() if isinstance(d, DTensor) else d)
            total.backward()
            return total

        for _ in range(STEPS):
            optimizer.step(closure)
        return [full(p) for p in params]

    want = run(SERIAL)

    def program() -> None:
        for got, w in zip(run(LAYOUTS[layout]), want, strict=True):
            torch.testing.assert_close(got, w, rtol=1e-9, atol=1e-9)

    simulate(program, ranks=4, timeout=200)


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "Adafactor", "RMSprop"])
def test_state_goes_through_a_file(name: str) -> None:
    """Ten steps, saved and loaded into a new optimizer, ten more."""
    params = leaves(SERIAL)
    train(OPTIMIZERS[name](params), params, SERIAL, 0, STEPS)
    rows = LAYOUTS["mixed"]

    def program() -> None:
        mine = leaves(rows)
        first = OPTIMIZERS[name](mine)
        train(first, mine, rows, 0, STEPS // 2)
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        again = OPTIMIZERS[name](mine)
        again.load_state_dict(torch.load(file))
        train(again, mine, rows, STEPS // 2, STEPS)
        for p, w in zip(mine, params, strict=True):
            torch.testing.assert_close(full(p), full(w), rtol=1e-9, atol=1e-9)

    simulate(program, ranks=4)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: optim.lr_scheduler.StepLR(o, 4, 0.5),
    "cosine": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, STEPS),
    "warmup": lambda o: optim.lr_scheduler.SequentialLR(
        o,
        [
            optim.lr_scheduler.LinearLR(o, 0.1, total_iters=4),
            optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [4],
    ),
    "one cycle": lambda o: optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=STEPS + 1),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedules(schedule: str, tensor_lr: bool) -> None:
    def run(rows: Any) -> list[T]:
        params = leaves(rows)
        lr = torch.tensor(0.05, dtype=torch.float64) if tensor_lr else 0.05
        optimizer = optim.AdamW(params, lr, foreach=None if not tensor_lr else False)
        scheduler = SCHEDULES[schedule](optimizer)
        for step in range(STEPS):
            set_gradients(params, step, rows)
            optimizer.step()
            scheduler.step()
        return [full(p) for p in params]

    want = run(SERIAL)

    def program() -> None:
        for got, w in zip(run(LAYOUTS["mixed"]), want, strict=True):
            torch.testing.assert_close(got, w, rtol=1e-9, atol=1e-9)

    simulate(program, ranks=4)


def test_groups_and_hooks() -> None:
    """Parameter groups, step hooks and a closure are torch's own."""

    def run(rows: Any) -> list[T]:
        params = leaves(rows)
        optimizer = optim.AdamW(params[:2], 0.05)
        optimizer.add_param_group(
            {"params": params[2:], "lr": 0.01, "betas": (0.5, 0.9)}
        )
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        train(optimizer, params, rows, 0, STEPS)
        assert len(calls) == STEPS
        optimizer.zero_grad()
        assert all(p.grad is None for p in params)
        return [full(p) for p in params]

    want = run(SERIAL)

    def program() -> None:
        for got, w in zip(run(LAYOUTS["mixed"]), want, strict=True):
            torch.testing.assert_close(got, w, rtol=1e-9, atol=1e-9)

    simulate(program, ranks=4)


def test_made_before_the_module_is_laid_out() -> None:
    """Its first step says so: it would train nothing."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)).double()

    def program() -> str:
        mine = copy.deepcopy(model)
        early = optim.AdamW(mine.parameters())
        parallelize_module(mine, LINE, {"0": Colwise(), "1": Rowwise()})
        mine(place(normal((3, 4), 1), LINE, (R,))).sum().backward()
        with pytest.raises(ValueError) as error:
            early.step()
        optim.AdamW(mine.parameters()).step()
        return str(error.value)

    for text in simulate(program, ranks=4):
        assert text == (
            "AdamW.step: holds parameters that were replaced when their module was laid "
            "out, got 4 of 4, expected those of the module as it is now. Make the "
            "optimizer after parallelize_module."
        )


def test_sparse_gradients_are_refused() -> None:
    """In forward, on all ranks, whatever the layout; without a gradient all is well."""

    def program() -> list[str]:
        texts = []
        indices = torch.tensor([1, 3, 3])
        for p in (R, S, C):
            weight = torch.nn.Parameter(place(normal((8, 4), 1), LINE, (p,)))
            with pytest.raises(ShardingError) as error:
                torch.nn.functional.embedding(indices, weight, sparse=True)
            texts.append(str(error.value))
            with torch.no_grad():
                out = torch.nn.functional.embedding(indices, weight, sparse=True)
            assert torch.equal(full(out), normal((8, 4), 1)[indices])
        return texts

    for texts in simulate(program, ranks=4):
        assert (
            texts
            == [
                "embedding: a DTensor has no sparse gradient, got sparse=True and a weight "
                "that requires grad. Give sparse=False, and an optimizer of dense gradients: "
                "Adam in place of SparseAdam."
            ]
            * 3
        )
