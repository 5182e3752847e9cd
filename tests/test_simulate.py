"""``simulate``: results, failures, what a rank inherits, and the turns it takes."""

from __future__ import annotations

import contextvars
import random
import sys
import threading
import time
import traceback
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dtensor.collectives.communicator import CollectiveError
from dtensor.collectives.counter import count_collectives
from dtensor.collectives.functional import all_gather, all_reduce
from dtensor.collectives.registry import communicator
from dtensor.collectives.simulate import simulate
from dtensor.mesh.ambient import current_mesh
from dtensor.mesh.device_mesh import init_device_mesh
from dtensor.mesh.world import current_world, get_rank, get_world_size

LINE = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
PAIR = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def meet(mesh: object = LINE) -> float:
    assert mesh is LINE or mesh is PAIR
    return float(all_reduce(torch.tensor(1.0 + get_rank()), mesh))  # type: ignore[arg-type]


# ---------------------------------------------------------------------------- results
def test_results_come_in_rank_order() -> None:
    def program(base: int, *, step: int) -> tuple[int, int]:
        return base + step * get_rank(), get_world_size()

    got = simulate(program, ranks=3, args=(10,), kwargs={"step": 2})
    assert got == [(10, 3), (12, 3), (14, 3)]
    assert simulate(meet) == [10.0] * 4
    assert simulate(get_rank, ranks=1) == [0]


def test_the_caller_keeps_its_world() -> None:
    before = current_world()
    simulate(meet)
    assert current_world() is before


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0, "2"])
def test_the_number_of_ranks_is_checked(ranks: int) -> None:
    with pytest.raises(ValueError, match="simulate: not a number of ranks, got"):
        simulate(get_rank, ranks=ranks)


def test_it_nests() -> None:
    def program() -> tuple[float, list[float], float]:
        before = meet()
        inner = simulate(meet, ranks=2, args=(PAIR,))
        return before, inner, meet()

    assert simulate(program) == [(10.0, [3.0, 3.0], 10.0)] * 4


# --------------------------------------------------------------------------- failures
def explode() -> None:
    raise KeyError("boom")


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_exception_is_the_ranks_own(when: str) -> None:
    def program() -> float:
        if when == "after":
            meet()
        if get_rank() == 2:
            explode()
        return meet()

    with pytest.raises(KeyError) as caught:
        simulate(program)
    assert caught.value.args == ("boom",) or sys.version_info < (3, 11)
    text = "".join(traceback.format_exception(caught.value))
    assert "raised on rank 2 of 4 in simulate" in text
    assert "in explode" in text


def test_an_exception_in_backward() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            if get_rank() == 1:
                explode()
            return all_reduce(grads[0], LINE)

    def program() -> None:
        x = torch.ones(2, requires_grad=True)
        Fails.apply(x).sum().backward()  # type: ignore[no-untyped-call]

    with pytest.raises(KeyError) as caught:
        simulate(program)
    assert "raised on rank 1" in "".join(traceback.format_exception(caught.value))


def test_the_first_to_fail_is_named() -> None:
    def program() -> None:
        if get_rank() == 0:
            meet()
        raise ValueError(f"from {get_rank()}")

    # rank 0 waits, so rank 1 is the first to fail
    with pytest.raises(ValueError, match="from 1"):
        simulate(program)


def test_the_others_learn_who_failed() -> None:
    seen: dict[int, str] = {}

    def program() -> None:
        if get_rank() == 3:
            explode()
        try:
            meet()
        except CollectiveError as error:
            seen[get_rank()] = str(error)
            raise

    with pytest.raises(KeyError):
        simulate(program)
    assert sorted(seen) == [0, 1, 2]
    for rank, text in seen.items():
        assert "rank 3 raised KeyError before it came here" in text
        assert f"rank {rank}, call 1, shape (), dtype float32" in text


def test_a_failure_stops_ranks_at_their_next_collective() -> None:
    stopped: list[int] = []

    def program() -> None:
        communicator(GRID, "dp").barrier()
        if get_rank() == 0:
            explode()
        try:
            while True:  # rank 0 is not in this row
                communicator(GRID, "tp").barrier()
        finally:
            stopped.append(get_rank())

    with pytest.raises(KeyError):
        simulate(program)
    assert sorted(stopped) == [1, 2, 3]


def test_a_rank_that_ends_early_releases_who_waits_for_it() -> None:
    with pytest.raises(
        CollectiveError, match=r"rank 1 has ended and will not come"
    ) as e:
        simulate(lambda: None if get_rank() == 1 else meet())
    assert "all_reduce on axis 'tp'" in str(e.value)


def test_exit_codes() -> None:
    def leave(code: object) -> None:
        if get_rank() == 1:
            sys.exit(code)  # type: ignore[arg-type]

    assert simulate(leave, args=(0,)) == [None] * 4
    with pytest.raises(SystemExit, match="3"):
        simulate(leave, args=(3,))


def test_a_deadlock_is_found_at_once() -> None:
    def program() -> None:
        communicator(GRID, "dp" if get_rank() in (0, 3) else "tp").barrier()

    start = time.monotonic()
    with pytest.raises(CollectiveError, match="no rank can go on") as caught:
        simulate(program)
    assert time.monotonic() - start < 5
    for rank, axis in enumerate(["dp", "tp", "tp", "dp"]):
        assert f"barrier on axis '{axis}' (rank {rank}, call 1" in str(caught.value)


def test_a_caught_error_does_not_end_the_world() -> None:
    def program() -> float:
        with pytest.raises(CollectiveError):
            all_reduce(torch.ones(2 + get_rank()), PAIR)
        return meet(PAIR)

    assert simulate(program, ranks=2) == [3.0, 3.0]


def test_the_time_limit_says_what_each_rank_does() -> None:
    def spin() -> None:
        while True:
            pass

    def program() -> float:
        if get_rank() == 1:
            spin()
        return meet()

    with pytest.raises(TimeoutError) as caught:
        simulate(program, timeout=0.3)
    text = str(caught.value)
    assert "got 0.3 seconds" in text
    assert "rank 0 waits in all_reduce on axis 'tp' (rank 0, call 1" in text
    assert "rank 1 runs spin (" in text
    assert "test_simulate.py:" in text
    assert "rank 2 waits for its turn" in text


def test_no_limit() -> None:
    assert simulate(meet, timeout=None) == [10.0] * 4


# -------------------------------------------------------------- what a rank inherits
NAME: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="unset")


def test_context_variables_are_copied() -> None:
    def program() -> str:
        before = NAME.get()
        NAME.set(f"rank {get_rank()}")
        meet()
        return f"{before}, {NAME.get()}"

    token = NAME.set("caller")
    try:
        got = simulate(program)
        assert got == [f"caller, rank {rank}" for rank in range(4)]
        assert NAME.get() == "caller"
    finally:
        NAME.reset(token)


def test_the_ambient_mesh_is_the_callers() -> None:
    with GRID:
        assert simulate(current_mesh) == [GRID] * 4
        assert simulate(lambda: GRID.coordinate)[3] == (1, 1)


def test_grad_mode() -> None:
    assert simulate(torch.is_grad_enabled) == [True] * 4
    with torch.no_grad():
        assert simulate(torch.is_grad_enabled) == [False] * 4
    with torch.inference_mode():
        assert simulate(torch.is_inference_mode_enabled) == [True] * 4
        assert simulate(meet) == [10.0] * 4
    assert torch.is_grad_enabled()


def test_autocast() -> None:
    def program() -> torch.dtype:
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    assert simulate(program) == [torch.float32] * 4
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert simulate(program) == [torch.bfloat16] * 4
        with torch.autocast("cpu", enabled=False):
            assert simulate(program) == [torch.float32] * 4


def test_the_default_device() -> None:
    with torch.device("meta"):
        assert simulate(lambda: torch.ones(1).device.type) == ["meta"] * 4
        mine = simulate(lambda: all_gather(torch.ones(1, device="cpu"), LINE))
        assert mine[0].tolist() == [1.0] * 4


def test_a_state_changed_on_a_rank_stays_there() -> None:
    def program() -> bool:
        if get_rank() == 0:
            torch.set_grad_enabled(False)
        meet()
        return torch.is_grad_enabled()

    assert simulate(program) == [False, True, True, True]
    assert torch.is_grad_enabled()


def test_a_rank_counts_its_own_collectives() -> None:
    with count_collectives() as c:
        simulate(meet)
    assert c.calls() == 0


# ------------------------------------------------------------------- random numbers
def draw() -> tuple[list[float], float, float, list[float]]:
    return (
        torch.rand(3).tolist(),
        random.random(),
        float(np.random.rand()),
        np.random.randn(1).tolist(),
    )


def test_ranks_that_seed_alike_draw_alike() -> None:
    def program() -> list[object]:
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        seen: list[object] = []
        for _ in range(4):
            seen.append(draw())
            meet()
        return seen

    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    got = simulate(program)
    assert got == [got[0]] * 4
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert str(np.random.get_state()) == str(state[2])
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    assert got[0] == [draw() for _ in range(4)]


def test_ranks_that_seed_apart_draw_apart() -> None:
    def program(apart: bool) -> list[object]:
        if apart:
            torch.manual_seed(get_rank())
            random.seed(get_rank())
            np.random.seed(get_rank())
        meet()
        first = draw()
        meet()
        return [first, draw()]

    apart = simulate(program, args=(True,))
    alike = simulate(program, args=(False,))
    assert len({str(got) for got in apart}) == 4
    assert len({str(got) for got in alike}) == 1
    assert simulate(program, args=(True,)) == apart


def test_half_a_pair_of_normals_stays_with_its_rank() -> None:
    def program() -> list[float]:
        np.random.seed(get_rank())
        got = []
        for _ in range(5):
            got.append(np.random.randn())  # NumPy keeps a second one back
            meet()
        return got

    for rank, got in enumerate(simulate(program)):
        generator = np.random.RandomState(rank)
        assert got == [generator.randn() for _ in range(5)]


def test_a_run_is_deterministic() -> None:
    def trace() -> list[str]:
        steps: list[str] = []

        def program() -> None:
            for i in range(3):
                steps.append(f"{get_rank()}:{i}")
                communicator(GRID, i % 2).barrier()

        simulate(program)
        return steps

    assert trace() == trace()


def test_dropout_is_the_same_on_all_ranks() -> None:
    def program() -> list[float]:
        meet()
        torch.manual_seed(3)
        layer = torch.nn.Linear(4, 4)
        meet()
        mask = torch.nn.functional.dropout(torch.ones(16), 0.5)
        return [*layer.weight.flatten().tolist(), *mask.tolist()]

    got = simulate(program)
    assert got == [got[0]] * 4
