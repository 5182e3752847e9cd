"""The ambient mesh in threads, tasks and after exceptions; how torchrun is answered."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from dtensor import (
    DeviceMesh,
    DTensor,
    current_mesh,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
    simulate,
    use_mesh,
    zeros,
)
from dtensor.mesh import world as world_module
from dtensor.styles import Colwise

A = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
B = init_device_mesh("cpu", (1,), mesh_dim_names=("b",))


def mesh_used() -> DeviceMesh:
    """The mesh that a laid-out module lands on."""
    weight = parallelize_module(nn.Linear(2, 2), Colwise).weight
    assert isinstance(weight, DTensor)
    return weight.device_mesh


def in_thread(*programs: Callable[[], Any]) -> list[Any]:
    """Results of programs that run at once, exceptions among them."""
    results: list[Any] = [None] * len(programs)

    def call(i: int) -> None:
        try:
            results[i] = programs[i]()
        except ValueError as error:
            results[i] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# ---- threads -------------------------------------------------------------------------
def test_two_threads_do_not_see_each_others_mesh() -> None:
    meet = threading.Barrier(2, timeout=20)

    def program(mesh: DeviceMesh) -> list[Any]:
        seen = [current_mesh()]
        with mesh:
            meet.wait()
            seen.append(mesh_used())
            meet.wait()
        meet.wait()
        return [*seen, current_mesh()]

    with A:
        got = in_thread(lambda: program(A), lambda: program(B))
        assert current_mesh() is A
    assert got == [[None, A, None], [None, B, None]]


def test_a_new_thread_has_no_mesh_and_the_error_says_how_to_hand_it_on() -> None:
    with A:
        (error,) = in_thread(mesh_used)
        assert isinstance(error, ValueError)
        text = str(error)
        assert text.startswith("parallelize_module: No active device mesh. Give one")
        assert "Thread(target=contextvars.copy_context().run, args=(fn,))" in text
        context = contextvars.copy_context()
        assert in_thread(lambda: context.run(mesh_used)) == [A]


def test_the_hint_is_only_for_threads_of_the_users() -> None:
    def program() -> str:
        with pytest.raises(ValueError, match="No active device mesh") as caught:
            mesh_used()
        return str(caught.value)

    texts = [program(), *simulate(program, 2)]
    assert len(set(texts)) == 1
    assert "copy_context" not in texts[0]


# ---- tasks ---------------------------------------------------------------------------
def test_two_tasks_do_not_see_each_others_mesh() -> None:
    async def program(mesh: DeviceMesh) -> list[Any]:
        seen: list[Any] = [current_mesh()]
        with mesh:
            for _ in range(3):
                await asyncio.sleep(0)  # the other task runs meanwhile
                seen.append(mesh_used())
        await asyncio.sleep(0)
        return [*seen, current_mesh()]

    async def both() -> list[Any]:
        with A:
            got = await asyncio.gather(program(B), program(A))
            assert current_mesh() is A
        return list(got)

    assert asyncio.run(both()) == [[A, B, B, B, A], [A, A, A, A, A]]


def test_a_task_keeps_the_mesh_it_was_made_under() -> None:
    async def late() -> DeviceMesh:
        await asyncio.sleep(0)
        return mesh_used()

    async def program() -> DeviceMesh:
        with A:
            task = asyncio.create_task(late())
        with B:
            return await task

    assert asyncio.run(program()) is A


# ---- exceptions ----------------------------------------------------------------------
@pytest.mark.parametrize("enter", [lambda mesh: mesh, use_mesh], ids=["with", "use"])
def test_an_exception_restores_the_outer_mesh(enter: Any) -> None:
    with A:
        with pytest.raises(KeyError), enter(B):
            assert mesh_used() is B
            raise KeyError
        assert mesh_used() is A
        with pytest.raises(TypeError, match="no layout"), enter(B):
            parallelize_module(nn.LayerNorm(2), Colwise)
        assert mesh_used() is A
    assert current_mesh() is None


# ---- all that takes a mesh -------------------------------------------------------------
def test_every_call_finds_it_and_says_so_without() -> None:
    import torch

    calls: dict[str, Callable[..., Any]] = {
        "distribute_tensor": lambda **k: distribute_tensor(torch.ones(2), **k),
        "from_local": lambda **k: DTensor.from_local(torch.ones(2), **k),
        "distribute_module": lambda **k: distribute_module(nn.Linear(1, 1), **k).bias,
        "zeros": lambda **k: zeros(2, **k),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{name}: No active device mesh"):
            call()
        with A:
            assert call().device_mesh is A
            assert call(device_mesh=B).device_mesh is B


def test_the_models_own_signature_stays() -> None:
    class Model(nn.Linear):
        def forward(self, x: Any, scale: float = 1.0) -> Any:  # type: ignore[override]
            return super().forward(x) * scale

    model = Model(2, 2)
    before = inspect.signature(model.forward), inspect.signature(Model.__init__)
    with A:
        parallelize_module(model, Colwise)
    assert type(model) is Model
    assert before == (
        inspect.signature(model.forward),
        inspect.signature(Model.__init__),
    )


# ---- torchrun ------------------------------------------------------------------------
NAMES = [n for pair in world_module.LAUNCHER_VARIABLES for n in pair]


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The variables of a process that torchrun started."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    started = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    for name, value in {**started, "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world_module, "_process", world_module._ProcessWorld())
    return monkeypatch


def test_torchrun_is_told_how_to_start(torchrun: pytest.MonkeyPatch) -> None:
    text = "got RANK='1' and WORLD_SIZE='4' without.*Start with `dtensor-run -n 4"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=text):
            parallelize_module(nn.Linear(2, 2), A, Colwise)
    torchrun.delenv("TORCHELASTIC_RUN_ID")
    with pytest.raises(RuntimeError, match=text):
        world_module.get_rank()


def test_torchrun_with_mpi_or_with_one_process(torchrun: pytest.MonkeyPatch) -> None:
    assert simulate(world_module.get_rank, 2) == [0, 1]
    torchrun.setenv("WORLD_SIZE", "1")
    assert world_module.get_world_size() == 1
    torchrun.setattr(world_module, "_process", world_module._ProcessWorld())
    torchrun.setenv("WORLD_SIZE", "4")
    torchrun.setenv("PMI_RANK", "3")
    torchrun.setenv("PMI_SIZE", "4")
    assert world_module.get_rank() == 3
