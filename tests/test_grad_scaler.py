"""GradScaler, and averaged models: the ranks decide alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from op_harness import place
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_multi_avg_fn,
)

from dtensor import (
    DTensor,
    Replicate,
    Shard,
    count_collectives,
    init_device_mesh,
    parallelize_module,
    simulate,
)

T = torch.Tensor
torch.set_num_threads(1)
R = Replicate()
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def parameters() -> list[Any]:
    """On the mesh, on a slice of it, and a plain one."""
    values = [torch.arange(1.0, 9.0).view(2, 4), torch.ones(5), torch.full((3,), 2.0)]
    return [
        torch.nn.Parameter(place(values[0], GRID, (Shard(0), Shard(1)))),
        torch.nn.Parameter(place(values[1], GRID["tp"], (Shard(0),))),
        torch.nn.Parameter(values[2].clone()),
    ]


def full(x: Any) -> T:
    return x.full_tensor() if isinstance(x, DTensor) else x.detach()


@pytest.mark.parametrize("kind", ["foreach", "fused", "loop"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), None])
def test_one_infinite_gradient_skips_the_step_on_all(kind: str, bad: Any) -> None:
    def program() -> tuple[float, list[T]]:
        ps = parameters()
        kw = {"foreach": kind == "foreach"} if kind != "fused" else {"fused": True}
        optimizer = torch.optim.AdamW(ps, 0.1, **kw)  # type: ignore[arg-type]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = [full(p).clone() for p in ps]
        loss = sum((p.to_local() if isinstance(p, DTensor) else p).sum() for p in ps)
        assert isinstance(loss, T)
        scaler.scale(loss).backward()
        if bad is not None and GRID.coordinate == (1, 0):
            ps[0].grad.to_local()[0, 1] = bad
        with count_collectives() as c:
            scaler.unscale_(optimizer)
        assert c.rows() == {("all_reduce", "dp"): (1, 4), ("all_reduce", "tp"): (1, 4)}
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(full(p), b) for p, b in zip(ps, before, strict=True)]
        assert moved == [bad is None] * 3
        if bad is None:
            assert torch.equal(full(ps[1].grad), torch.ones(5))
        return scaler.get_scale(), [full(p) for p in ps]

    found = simulate(program, ranks=4)
    for scale, values in found:
        assert scale == (4.0 if bad is None else 2.0)
        for v, w in zip(values, found[0][1], strict=True):
            assert torch.equal(v, w)


def test_scaled_training_is_the_serial_one() -> None:
    """Scale, unscale, clip, step, update, with a step that overflows."""

    def train(model: Any, x: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**100, growth_interval=3, growth_factor=4.0
        )
        scales = []
        for _ in range(8):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)
    )
    start = copy.deepcopy(model)
    x = 1e10 * torch.ones(4, 4)
    want = train(model, x)
    assert len(set(want)) > 2

    def program() -> None:
        from dtensor import Colwise, Rowwise

        mine = copy.deepcopy(start)
        parallelize_module(mine, GRID["tp"], {"0": Colwise(), "2": Rowwise()})
        d = place(x, GRID["tp"], (R,))
        assert train(mine, d) == want
        for p, w in zip(mine.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(full(p), w.detach(), rtol=1e-4, atol=1e-5)

    simulate(program, ranks=4)


@pytest.mark.parametrize("how", ["mean", "ema"])
def test_averaged_model(how: str) -> None:
    """A deep copy keeps the layout; the averages are those of the whole."""
    multi = None if how == "mean" else get_ema_multi_avg_fn(0.9)

    def train(model: Any) -> Any:
        average = AveragedModel(model, multi_avg_fn=multi, use_buffers=how == "ema")
        for step in range(5):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.0 + 0.1 * step)
            average.update_parameters(model)
        return average

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2)
    ).double()
    start = copy.deepcopy(model)
    want = train(model)

    def program() -> None:
        from dtensor import Colwise, Rowwise

        mine = copy.deepcopy(start)
        parallelize_module(mine, GRID["tp"], {"0": Colwise(), "2": Rowwise()})
        average = train(mine)
        pairs = zip(average.named_parameters(), want.named_parameters(), strict=True)
        for (name, p), (_, w) in pairs:
            assert p.placements == mine.get_parameter(name[7:]).placements
            torch.testing.assert_close(full(p), w.detach(), rtol=1e-12, atol=1e-12)

    simulate(program, ranks=4)
