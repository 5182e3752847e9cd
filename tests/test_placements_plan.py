"""Plans: never dearer than an exhaustive search; explained; priced by measurement."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtensor import (
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardingError,
    calibrate,
    count_collectives,
    distribute_tensor,
    explain,
    init_device_mesh,
    simulate,
)
from dtensor.costs import CostTable, costs_of, set_costs
from dtensor.placement import Placements, normal
from dtensor.plan import plan_steps
from dtensor.steps import average_shard, edges
from dtensor.tensor import local_of

R = Replicate()
SWEEP = bool(os.environ.get("DTENSOR_SWEEP"))  # make sweep-placements
TARGETS: tuple[Placement, ...] = (
    R,
    Shard(0),
    Shard(1),
    Partial(),
    Partial("avg"),
    Partial("max"),
)


def every_state(
    axes: int, targets: tuple[Placement, ...] = TARGETS
) -> list[Placements]:
    """All layouts, in every nesting order."""
    found: dict[Placements, None] = {}
    for places in itertools.product(targets, repeat=axes):
        for depths in itertools.permutations(range(axes)):
            found[
                normal(
                    tuple(
                        Shard(p.dim, d) if isinstance(p, Shard) else p
                        for p, d in zip(places, depths, strict=True)
                    )
                )
            ] = None
    return list(found)


class Shortest:
    """Costs of the cheapest paths between all states (Floyd and Warshall).

    The paths run through all layouts with the kinds of addends that the ends have and
    shards no larger than theirs.
    """

    def __init__(
        self, mesh_shape: tuple[int, ...], nbytes: float, t: CostTable
    ) -> None:
        self.mesh_shape, self.nbytes, self.table = mesh_shape, nbytes, t
        self.found: dict[Any, dict[Placements, dict[Any, float]]] = {}

    def __call__(self, src: Placements, dst: Placements) -> float:
        """The cost of the cheapest path."""
        kinds = frozenset(p for p in (*src, *dst) if p.is_partial())
        limit = max(average_shard(self.mesh_shape, p, 1) for p in (src, dst))
        if (kinds, limit) not in self.found:
            self.found[kinds, limit] = self.search(kinds, limit)
        return self.found[kinds, limit][src][dst]

    def search(self, kinds: frozenset[Placement], limit: float) -> Any:
        """All costs, for paths with these kinds of addends and no larger shards."""
        targets = tuple(p for p in TARGETS if not p.is_partial() or p in kinds)
        states = every_state(len(self.mesh_shape), targets)
        index = {s: i for i, s in enumerate(states)}
        cost = np.full((len(states), len(states)), np.inf)
        np.fill_diagonal(cost, 0.0)
        for s in states:
            for e in edges(self.mesh_shape, s, targets):
                if e.after > limit:
                    continue
                i, j = index[s], index[e.dst]
                cost[i, j] = min(cost[i, j], e.seconds(self.nbytes, self.table))
        for k in range(len(states)):
            np.minimum(cost, cost[:, k : k + 1] + cost[k : k + 1, :], out=cost)
        return {s: dict(zip(states, cost[index[s]], strict=True)) for s in states}


def settings(axes: int) -> list[tuple[int, CostTable]]:
    """Lengths of a square float32 tensor, with prices."""
    slow_last = tuple(1e-9 * 10**a for a in range(axes))
    return [
        (64, CostTable((20e-6,) * axes, (1e-9,) * axes)),
        (4096, CostTable((20e-6,) * axes, (1e-9,) * axes)),
        (1024, CostTable((0.0,) * axes, slow_last)),
        (1024, CostTable((5e-4, *(1e-6,) * (axes - 1)), slow_last[::-1])),
        (256, CostTable((0.0,) * axes, (0.0,) * axes)),
    ]


@pytest.mark.parametrize("setting", range(5))
def test_every_plan_on_two_axes_is_as_cheap_as_any(
    setting: int, record_property: Callable[[str, object], None]
) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    n, table = settings(2)[setting]
    states = every_state(2)
    best = Shortest((2, 2), 4.0 * n * n, table)
    for src, dst in itertools.product(states, repeat=2):
        steps = plan_steps(mesh, src, dst, (n, n), 4, table)
        got = sum(s.seconds for s in steps)
        assert got == pytest.approx(best(src, dst), rel=1e-9), (src, dst)
        assert not steps or (steps[0].src, steps[-1].dst) == (src, dst)
    record_property("plans", (f"(2, 2), prices {setting}", len(states) ** 2))


@pytest.mark.parametrize("setting", range(5))
def test_plans_on_three_axes_are_as_cheap_as_any(
    setting: int, record_property: Callable[[str, object], None]
) -> None:
    """A sample; ``make sweep-placements`` takes all pairs for three settings.

    The tensor is square: of two pairs that differ in the names of the dims, one is made.
    """
    mesh = init_device_mesh("cpu", (2, 2, 2))
    n, table = settings(3)[setting]
    states = every_state(3)
    best = Shortest((2, 2, 2), 4.0 * n * n, table)
    g = torch.Generator().manual_seed(setting)
    some = torch.randint(len(states), (30, 2), generator=g).tolist()
    pairs = [(states[i], states[j]) for i, j in some]
    if SWEEP and setting in (
        1,
        2,
        3,
    ):  # those with the same kinds of addends come together: prices are kept
        every = {
            min((a, b), (turned(a), turned(b)), key=str)
            for a, b in itertools.product(states, states)
        }
        pairs = sorted(every, key=lambda p: (kinds_of(*p), str(p)))
    for src, dst in pairs:
        steps = plan_steps(mesh, src, dst, (n, n), 4, table)
        got = sum(s.seconds for s in steps)
        want = best(src, dst)
        assert abs(got - want) <= 1e-9 * want, (src, dst, got, want)
    record_property("plans", (f"(2, 2, 2), prices {setting}", len(pairs)))


def turned(places: Placements) -> Placements:
    """The same layout of the transposed matrix."""
    return tuple(p.at_dim(1 - p.dim) if isinstance(p, Shard) else p for p in places)


def kinds_of(src: Placements, dst: Placements) -> list[str]:
    """The kinds of addends of two layouts."""
    return sorted({str(p) for p in (*src, *dst) if p.is_partial()})


def test_one_collective_over_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole, cut = (R, R), (Shard(0), Shard(0))
    swapped = (Shard(0, depth=1), Shard(0, depth=0))
    for src, dst, verb in [
        ((Partial(), Partial()), whole, "all_reduce"),
        ((Partial(), Partial()), cut, "reduce_scatter"),
        (cut, whole, "all_gather"),
        ((Shard(0), Shard(1)), (Shard(1), Shard(0)), "all_to_all"),
        (cut, swapped, "all_to_all"),
    ]:
        steps = plan_steps(mesh, src, dst, (8, 8))
        assert [(s.verb, s.axes) for s in steps] == [(verb, (0, 1))], (src, dst)


def test_a_slow_axis_gets_less_to_carry() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    table = CostTable((0.0, 0.0), (1e-7, 1e-9))
    steps = plan_steps(mesh, (Partial(), Partial()), (R, R), (1024, 1024), 4, table)
    assert [(s.verb, s.axes) for s in steps] == [
        ("reduce_scatter", (1,)),
        ("all_reduce", (0,)),
        ("all_gather", (1,)),
    ]


def test_explanations_are_read_by_people() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    found = explain([Shard(0), Partial()], [R, Shard(1)], (64, 64), mesh)
    assert str(found).splitlines() == [
        "(S(0), P) -> (R, S(1)) of (64, 64) float32 on DeviceMesh('cpu', (dp=2, tp=4))",
        "step            axis  from          to            bytes sent     time  memory",
        "reduce-scatter  tp    (S(0), P)     (S(0), S(1))       6 KiB  26.3 us  10 KiB",
        "all-gather      dp    (S(0), S(1))  (R, S(1))          2 KiB  22.2 us   6 KiB",
        "total                                                  8 KiB  48.5 us  10 KiB",
    ]
    assert found.sent_bytes == 8192 and found.peak_bytes == 10240
    page = found._repr_html_()
    assert page.count("<tr>") == 4 and "reduce-scatter" in page
    assert "nothing to do" in str(explain([R, R], [R, R], (4,), mesh))
    double = explain(
        [Shard(0), Partial()], [R, Shard(1)], (64, 64), mesh, dtype=torch.float64
    )
    assert double.sent_bytes == 2 * found.sent_bytes
    with pytest.raises(ShardingError, match="explain: one placement per mesh axis"):
        explain([R], [R, R], (4,), mesh)


def test_a_tensor_explains_what_it_then_does() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Shard(1)])
        for dst in ([Shard(1), Shard(0)], [R, Shard(1)], [Partial(), R]):
            plan = x.explain_redistribute(dst)
            with count_collectives() as c:
                x.redistribute(dst)
            names = ["+".join(mesh.axis_name(a) for a in s.axes) for s in plan.steps]
            calls = [
                (s.verb, n)
                for s, n in zip(plan.steps, names, strict=True)
                if s.elements
            ]
            assert sorted(c.rows()) == sorted(calls)
        assert str(x.explain_redistribute(R)) == str(
            explain(x.placements, [R, R], (8, 8), mesh)
        )

    simulate(program, 4)


def test_measured_prices_are_alike_on_all_ranks_and_are_planned_with() -> None:
    def program() -> CostTable:
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(torch.ones(64, 64), mesh, [Partial(), Partial()])
        before = x.explain_redistribute(R)
        assert [s.verb for s in before.steps] == ["all_reduce"]
        table = calibrate(mesh, large=1 << 16, repeats=2)
        assert costs_of(mesh) is table
        set_costs(mesh, CostTable((0.0, 0.0), (1e-6, 1e-9)))
        assert len(x.explain_redistribute(R).steps) == 3
        with count_collectives() as c:
            y = x.redistribute(R)
        assert c.calls("reduce_scatter") == 1
        assert torch.equal(local_of(y), torch.ones(64, 64))
        set_costs(mesh, None)
        assert str(x.explain_redistribute(R)) == str(before)
        return table

    tables = simulate(program, 4)
    assert len(set(tables)) == 1
    assert all(s > 0 for s in (*tables[0].latency, *tables[0].seconds_per_byte))


def test_prices_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="seconds must be finite and not negative"):
        CostTable((-1.0,), (0.0,))
    with pytest.raises(ValueError, match="one latency and one bandwidth per axis"):
        CostTable((1.0,), ())
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(ValueError, match="one latency and one bandwidth per mesh axis"):
        set_costs(mesh, CostTable((1.0, 1.0), (0.0, 0.0)))
    with pytest.raises(ValueError, match="calibrate: sizes must grow"):
        calibrate(mesh, small=8, large=4)


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="reads the planner of this PyTorch"
)
@pytest.mark.parametrize("mesh", ["2x2", "2x2x2"] if SWEEP else ["2x2"])
def test_no_plan_sends_more_than_that_of_pytorch(mesh: str) -> None:
    """With latency zero; the table of all pairs is in docs/redistribution_plans.md."""
    root = Path(__file__).parent.parent
    script = root / "benchmarks" / "redistribution_plans.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), "--mesh", mesh],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    head, row = lines[0].split(" | "), lines[2].split(" | ")
    assert dict(zip(head, row, strict=True))["more"] == "0"
