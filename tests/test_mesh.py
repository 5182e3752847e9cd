"""Meshes: values, coordinates, slices, refusals; and the ambient mesh."""

from __future__ import annotations

import asyncio
import copy
import doctest
import importlib
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dtensor.collectives.simulate import simulate
from dtensor.mesh import world as world_module
from dtensor.mesh.ambient import current_mesh, use_mesh
from dtensor.mesh.chunks import chunk_offset, chunk_sizes
from dtensor.mesh.device_mesh import DeviceMesh, init_device_mesh
from dtensor.mesh.world import (
    World,
    current_world,
    get_rank,
    get_world_size,
    launcher_world,
    use_world,
)

GRID = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))


def at(rank: int) -> Any:
    """Be that rank of a large world."""
    return use_world(World(rank, 64, "threads"))


# ------------------------------------------------------------------------- the value
def test_equal_meshes_are_one_object() -> None:
    grids: list[Any] = [
        [[0, 1, 2], [3, 4, 5]],
        ((0, 1, 2), (3, 4, 5)),
        torch.arange(6).view(2, 3),
        np.arange(6, dtype=np.uint8).reshape(2, 3),
        [range(3), range(3, 6)],
        [[np.int32(0), 1, 2], [3, 4, 5]],
    ]
    for grid in grids:
        assert DeviceMesh("cpu", grid, mesh_dim_names=["dp", "tp"]) is GRID
    assert init_device_mesh("cpu", (2, 3), ("dp", "tp")) is GRID
    assert init_device_mesh("cpu", torch.Size([2, 3]), ("dp", "tp")) is GRID


@pytest.mark.parametrize(
    "other",
    [
        DeviceMesh("cuda", [[0, 1, 2], [3, 4, 5]], mesh_dim_names=("dp", "tp")),
        DeviceMesh("cpu", [[0, 1, 2], [3, 5, 4]], mesh_dim_names=("dp", "tp")),
        DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]], mesh_dim_names=("tp", "dp")),
        DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]]),
        init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp")),
        init_device_mesh("cpu", (6,)),
    ],
    ids=repr,
)
def test_unlike_meshes_are_unequal(other: DeviceMesh) -> None:
    assert other != GRID
    assert len({other, GRID}) == 2


def test_interning_holds_across_threads() -> None:
    start = threading.Barrier(8)
    made: list[DeviceMesh] = []

    def make() -> None:
        start.wait()
        made.append(DeviceMesh("cpu", list(range(100, 117))))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert len(set(made)) == 1


def test_copies_and_pickles_are_the_same_object() -> None:
    for mesh in (GRID, GRID["tp"], DeviceMesh("cpu", [3, 1, 0, 2])):
        assert copy.copy(mesh) is mesh
        assert copy.deepcopy(mesh) is mesh
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(mesh, protocol)) is mesh
    buffer = io.BytesIO()
    torch.save({"mesh": GRID}, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False)["mesh"] is GRID


def test_attributes() -> None:
    assert GRID.shape == (2, 3)
    assert GRID.ndim == 2
    assert GRID.size() == 6
    assert GRID.size("tp") == GRID.size(1) == GRID.size(-1) == 3
    assert GRID.device_type == "cpu"
    assert GRID.mesh_dim_names == ("dp", "tp")
    assert GRID.ranks == (0, 1, 2, 3, 4, 5)
    assert GRID.mesh.dtype == torch.int64
    assert GRID.mesh.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert [GRID.axis_name(i) for i in (0, 1, -1, "dp")] == ["dp", "tp", "tp", "dp"]
    unnamed = init_device_mesh("cpu", (2, 3))
    assert unnamed.mesh_dim_names is None
    assert [unnamed.axis_name(i) for i in range(2)] == ["0", "1"]


def test_it_cannot_be_changed() -> None:
    GRID.mesh.zero_()
    assert GRID.ranks == (0, 1, 2, 3, 4, 5)
    with pytest.raises(AttributeError, match="a mesh cannot be changed"):
        GRID.shape = (3, 2)
    with pytest.raises(AttributeError, match="a mesh cannot be changed"):
        del GRID.ranks
    with pytest.raises(AttributeError, match="a mesh cannot be changed"):
        GRID.note = 1  # type: ignore[attr-defined]


def test_repr() -> None:
    assert repr(GRID) == "DeviceMesh('cpu', (dp=2, tp=3))"
    assert repr(DeviceMesh("cuda", [0, 1, 2, 3])) == "DeviceMesh('cuda', (4))"
    assert repr(DeviceMesh("cpu", [2, 0])) == "DeviceMesh('cpu', (2), ranks=(2, 0))"


def test_the_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        assert GRID.mesh.tolist() == [[0, 1, 2], [3, 4, 5]]


# ------------------------------------------------------------------------- this rank
@pytest.mark.parametrize("ranks", [[3, 1, 0, 2], [0, 1, 2, 3], [7, 2]])
def test_coordinates_follow_the_mesh_order(ranks: list[int]) -> None:
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("tp",))
    for position, rank in enumerate(ranks):
        with at(rank):
            assert mesh.coordinate == (position,)
            assert mesh.get_coordinate() == [position]
            assert mesh.get_local_rank() == mesh.get_local_rank("tp") == position
            assert mesh.get_rank() == rank
            assert mesh.axis_ranks("tp") == tuple(ranks)


def test_rows_on_a_transposed_grid() -> None:
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b"))
    rows = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    for rank, row in rows.items():
        with at(rank):
            assert mesh.axis_ranks("a") == row
            assert mesh["a"].ranks == row
    with at(3):
        assert mesh.coordinate == (1, 1)
        assert mesh.axis_ranks(1) == (1, 3)
        assert mesh.get_local_rank("a") == 1


def test_a_rank_outside_has_an_inert_mesh() -> None:
    with at(17):
        assert GRID.coordinate is None
        assert GRID.get_coordinate() is None
        assert GRID.get_rank() == 17
        assert GRID.size("tp") == 3
        assert GRID["tp"].coordinate is None
        assert GRID.flatten().coordinate is None
        with pytest.raises(ValueError, match=r"not on the mesh, got rank 17, expected"):
            GRID.axis_ranks("tp")
        with pytest.raises(ValueError, match="Ask `mesh.coordinate is not None` first"):
            GRID.get_local_rank("tp")


def test_every_simulated_rank_sees_its_own_coordinate() -> None:
    seen = simulate(lambda: (GRID.coordinate, GRID["dp"].ranks), ranks=6)
    assert seen[4] == ((1, 1), (1, 4))
    assert [c for c, _ in seen] == [(i, j) for i in range(2) for j in range(3)]


# ---------------------------------------------------------------------------- slices
def test_slices_by_name_in_any_order() -> None:
    cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    with at(5):
        assert cube["tp"].ranks == (4, 5)
        assert cube["dp"].ranks == (5, 7)
        assert cube["pp"].ranks == (1, 5)
        assert cube["dp", "tp"].mesh.tolist() == [[4, 5], [6, 7]]
        assert cube["tp", "dp"].mesh.tolist() == [[4, 6], [5, 7]]
        assert cube["pp", "tp"].mesh.tolist() == [[0, 1], [4, 5]]
        assert cube["tp", "pp"].mesh_dim_names == ("tp", "pp")
        assert cube["tp", "dp"]["dp"] is cube["dp"]
        assert cube["pp", "dp", "tp"] is cube
        assert cube["tp"].get_local_rank() == 1


def test_slices_are_interned_over_ranks() -> None:
    with at(0):
        first = GRID["tp"]
    with at(2):
        assert GRID["tp"] is first
    with at(3):
        assert GRID["tp"] is not first


def test_flatten() -> None:
    assert GRID.flatten().mesh_dim_names == ("dp_tp",)
    assert GRID.flatten("all").mesh_dim_names == ("all",)
    assert GRID.flatten().ranks == GRID.ranks
    assert init_device_mesh("cpu", (2, 2)).flatten().mesh_dim_names is None
    with at(0):
        assert GRID["tp", "dp"].flatten().ranks == (0, 3, 1, 4, 2, 5)
        assert GRID["tp"].flatten() is GRID["tp"]


# -------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DeviceMesh("cpu", [0, 0]), r"got \[0\] more than once in \(0, 0\)"),
        (lambda: DeviceMesh("cpu", [0, -1]), "below zero, got -1"),
        (lambda: DeviceMesh("cpu", [True, False]), "got True, expected whole numbers"),
        (lambda: DeviceMesh("cpu", [0.0, 1.0]), "got 0.0, expected whole numbers"),
        (lambda: DeviceMesh("cpu", torch.tensor([0.0])), "expected whole numbers"),
        (lambda: DeviceMesh("cpu", torch.tensor([True])), "expected whole numbers"),
        (lambda: DeviceMesh("cpu", np.array([None])), "expected whole numbers"),
        (lambda: DeviceMesh("cpu", [[0, 1], [2]]), "expected rows of one length"),
        (lambda: DeviceMesh("cpu", [0, [1]]), "whole numbers, nested evenly"),
        (lambda: DeviceMesh("cpu", []), "expected at least one rank"),
        (lambda: DeviceMesh("cpu", 3), "expected at least one axis"),
        (lambda: DeviceMesh("cpu", torch.tensor(3)), "expected at least one axis"),
        (lambda: DeviceMesh("cpu", "01"), "expected at least one axis"),
        (lambda: DeviceMesh("gpu?", [0]), "got 'gpu[?]', expected 'cpu' or 'cuda'"),
        (lambda: DeviceMesh("cuda:1", [0]), "without an index"),
        (lambda: DeviceMesh("cpu", [0], ("a", "b")), r"got 2 names \('a', 'b'\) for 1"),
        (lambda: DeviceMesh("cpu", [[0]], ("a", "a")), "two axes share a name"),
        (lambda: DeviceMesh("cpu", [[0]], ("a", "")), "not names of axes"),
        (lambda: DeviceMesh("cpu", [[0]], ("a", 1)), "not names of axes"),  # type: ignore[arg-type]
        (lambda: init_device_mesh("cpu", (2, 0)), r"got \(2, 0\), expected one whole"),
        (lambda: init_device_mesh("cpu", (2, True)), "not a shape"),
        (lambda: init_device_mesh("cpu", (2.0,)), "not a shape"),  # type: ignore[arg-type]
        (lambda: init_device_mesh("cpu", ()), "a mesh needs an axis"),
        (lambda: GRID.axis("pp"), r"got 'pp', expected one of the axes 'dp', 'tp'"),
        (lambda: GRID.axis(2), r"got 2, expected one of the axes 'dp', 'tp' \(or 0, 1"),
        (lambda: GRID.axis(True), "got True"),
        (lambda: init_device_mesh("cpu", (2,)).axis("tp"), "they have no names"),
        (lambda: GRID["pp"], "got 'pp'"),
        (lambda: GRID["dp", "dp"], r"got \('dp', 'dp'\), expected different names"),
        (lambda: GRID[()], "not a choice of axes"),
        (lambda: GRID[0], "not a choice of axes"),  # type: ignore[index]
        (lambda: GRID.get_local_rank(), "which axis is meant"),
    ],
)
def test_refusals_say_what_is_wrong(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        make()
    assert "expected" in str(caught.value)


# -------------------------------------------------------------------- the ambient mesh
A = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
B = init_device_mesh("cpu", (2,), mesh_dim_names=("b",))


def test_ambient_nests_and_is_restored() -> None:
    assert current_mesh() is None
    with A as entered:
        assert entered is A
        with use_mesh(B) as inner:
            assert inner is B is current_mesh()
            with A, A:
                assert current_mesh() is A
            assert current_mesh() is B
        assert current_mesh() is A
        with pytest.raises(KeyError), B:
            raise KeyError
        assert current_mesh() is A
    assert current_mesh() is None


def test_use_mesh_objects_may_be_used_again() -> None:
    manager = use_mesh(A)
    with manager, B, manager:
        assert current_mesh() is A
    assert current_mesh() is None
    with manager:
        assert current_mesh() is A


def test_use_mesh_refuses_what_is_no_mesh() -> None:
    with pytest.raises(TypeError, match=r"use_mesh: not a mesh, got None, expected"):
        use_mesh(None)  # type: ignore[arg-type]


def test_threads_have_frames_of_their_own() -> None:
    steps = threading.Barrier(2)
    seen: dict[str, list[DeviceMesh | None]] = {"a": [], "b": []}

    def program(name: str, mesh: DeviceMesh) -> None:
        seen[name].append(current_mesh())
        with mesh:
            steps.wait(10)
            seen[name].append(current_mesh())
            steps.wait(10)
        seen[name].append(current_mesh())

    with A:
        threads = [
            threading.Thread(target=program, args=("a", A)),
            threading.Thread(target=program, args=("b", B)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert current_mesh() is A
    assert seen == {"a": [None, A, None], "b": [None, B, None]}


def test_tasks_interleave_on_one_mesh_object() -> None:
    async def program(mesh: DeviceMesh, steps: int) -> list[DeviceMesh | None]:
        seen = [current_mesh()]
        with mesh:
            for _ in range(steps):
                await asyncio.sleep(0)
                seen.append(current_mesh())
        seen.append(current_mesh())
        return seen

    async def main() -> list[list[DeviceMesh | None]]:
        with B:
            jobs = [program(A, 1), program(A, 3), program(B, 2)]
            return await asyncio.gather(*jobs)

    first, second, third = asyncio.run(main())
    assert first == [B, A, B]
    assert second == [B, A, A, A, B]
    assert third == [B, B, B, B]


def test_generators_may_close_out_of_order() -> None:
    def inside(mesh: DeviceMesh) -> Iterator[None]:
        with mesh:
            yield

    first, second = inside(A), inside(B)
    next(first)
    next(second)
    assert current_mesh() is B
    assert next(first, "end") == "end"
    assert current_mesh() is B
    assert next(second, "end") == "end"
    assert current_mesh() is None


def test_a_frame_of_another_context_is_nothing_to_close() -> None:
    with A:
        ran: list[DeviceMesh | None] = []

        def program() -> None:
            B.__exit__(None, None, None)
            ran.append(current_mesh())

        thread = threading.Thread(target=program)
        thread.start()
        thread.join()
        assert ran == [None]
        assert current_mesh() is A


# ------------------------------------------------------------------------------ world
NAMES = sorted({name for row in world_module.LAUNCHER_VARIABLES for name in row})


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher's variables."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(world_module, "_process", world_module._ProcessWorld())
    return monkeypatch


def test_without_a_launcher_the_world_is_one_rank(bare: pytest.MonkeyPatch) -> None:
    assert launcher_world() is None
    assert (get_rank(), get_world_size()) == (0, 1)
    assert current_world().kind == "self"
    assert current_world() is current_world()


@pytest.mark.parametrize(("rank_name", "size_name"), world_module.LAUNCHER_VARIABLES)
def test_launchers_are_recognised(
    bare: pytest.MonkeyPatch, rank_name: str, size_name: str
) -> None:
    bare.setenv(rank_name, "2")
    bare.setenv(size_name, "5")
    assert (get_rank(), get_world_size()) == (2, 5)
    assert current_world().kind == "mpi"


def test_a_rank_without_a_size_is_no_launcher(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("PMI_RANK", "1")
    assert launcher_world() is None


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("-1", "2"), ("x", "2")])
def test_launcher_variables_that_do_not_fit(
    bare: pytest.MonkeyPatch, rank: str, size: str
) -> None:
    bare.setenv("PMI_RANK", rank)
    bare.setenv("PMI_SIZE", size)
    with pytest.raises(ValueError, match=rf"got PMI_RANK='{rank}' and PMI_SIZE"):
        get_rank()


def test_use_world_is_undone_on_exceptions() -> None:
    before = current_world()
    with pytest.raises(KeyError), at(3):
        assert get_rank() == 3
        raise KeyError
    assert current_world() is before


# ----------------------------------------------------------------------------- chunks
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("length", range(14))
def test_chunks_are_those_of_torch(length: int, parts: int) -> None:
    pieces = [len(piece) for piece in torch.arange(length).chunk(parts)]
    if length == 0:
        pieces = []
    pieces += [0] * (parts - len(pieces))
    assert chunk_sizes(length, parts) == tuple(pieces)
    for index in range(parts):
        assert chunk_offset(length, parts, index) == sum(pieces[:index])


@pytest.mark.parametrize("name", ["ambient", "chunks", "device_mesh", "world"])
def test_examples_run(name: str) -> None:
    done = doctest.testmod(importlib.import_module(f"dtensor.mesh.{name}"))
    assert done.failed == 0
    assert done.attempted > 0
