"""Dry worlds: layouts, plans and counts of a rank whose peers are not there."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from dtensor import (
    CollectiveError,
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    count_collectives,
    dry_run,
    get_rank,
    get_world_size,
    init_device_mesh,
    simulate,
)
from dtensor.collectives.functional import all_reduce
from dtensor.collectives.registry import communicator

WORLD = 65_536


def test_a_dry_world_is_current_until_its_block_ends():
    with dry_run(WORLD, rank=7):
        assert (get_rank(), get_world_size()) == (7, WORLD)
        with dry_run(4, 1):
            assert (get_rank(), get_world_size()) == (1, 4)
        assert get_world_size() == WORLD
    assert get_world_size() == 1


@pytest.mark.parametrize("given", [(0, 0), (4, 4), (4, -1), (4.0, 0), (True, 0)])
def test_sizes_that_are_none_are_refused(given):
    with (
        pytest.raises(ValueError, match=r"not a rank of a world.*Call for example"),
        dry_run(*given),
    ):
        pass


@pytest.mark.parametrize("shape", [(WORLD,), (256, 256), (256, 16, 16)])
def test_making_a_large_mesh_stays_below_50_mb(shape):
    names = tuple(f"bytes{len(shape)}_{i}" for i in range(len(shape)))
    with dry_run(WORLD, rank=WORLD - 1):
        tracemalloc.start()
        try:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            assert mesh.coordinate == tuple(n - 1 for n in shape)
            assert len(mesh.axis_ranks(0)) == shape[0]
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 50e6


def test_coordinates_and_slices_are_those_of_the_grid():
    shape, names = (3, 4, 2), ("a", "b", "c")
    grid = torch.randperm(24, generator=torch.Generator().manual_seed(0)) + 5
    for ranks in (torch.arange(24), grid):
        mesh = DeviceMesh("cpu", ranks.view(shape), mesh_dim_names=names)
        for place in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
            rank = int(ranks.view(shape)[tuple(place)])
            assert mesh.coordinate_of(rank) == tuple(place)
            with dry_run(64, rank):
                row = ranks.view(shape)[place[0], :, place[2]]
                assert mesh.axis_ranks("b") == tuple(row.tolist())
                part = ranks.view(shape)[:, place[1]].T
                assert torch.equal(mesh["c", "a"].mesh, part)
        assert mesh.coordinate_of(40) is None
        assert mesh.coordinate_of(-1) is None


@pytest.mark.parametrize("src", [Shard(0), Shard(1), Replicate(), Partial()])
@pytest.mark.parametrize("dst", [Shard(0), Shard(1), Replicate()])
def test_counts_and_shapes_are_those_of_ranks_that_are_there(src, dst):
    def program():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        rows, cols = (8, 12)
        shape = (
            rows // 4 if src == Shard(0) else rows,
            cols // 4 if src == Shard(1) else cols,
        )
        x = DTensor.from_local(torch.ones(shape), mesh, [src], run_check=False)
        with count_collectives() as c:
            y = x.redistribute(mesh, [dst])
        return c.rows(), tuple(y.shape), tuple(y.to_local().shape)

    for rank, there in enumerate(simulate(program, ranks=4)):
        with dry_run(4, rank):
            assert program() == there


def test_a_plan_over_65536_ranks_is_counted():
    with dry_run(WORLD, rank=300):
        names = ("pp", "dp", "tp")
        mesh = init_device_mesh("cpu", (256, 16, 16), mesh_dim_names=names)
        x = DTensor.from_local(
            torch.ones(2, 8), mesh, [Replicate(), Replicate(), Shard(0)]
        )
        with count_collectives() as c:
            y = x.redistribute(mesh, [Replicate()] * 3)
        assert y.shape == (32, 8)
        assert c.rows() == {("all_gather", "tp"): (1, 15 * 2 * 8 * 4)}


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.int64, torch.iinfo(torch.int64).min), (torch.uint8, 255)],
)
def test_moved_integers_are_no_indices(dtype, value):
    with dry_run(8, 3):
        mesh = init_device_mesh("cpu", (8,))
        out = communicator(mesh).all_gather(torch.ones(2, dtype=dtype), (2,) * 8)
        assert out.tolist() == [value] * 16


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
    ],
)
def test_results_have_no_values(dtype):
    with dry_run(8, 3):
        mesh = init_device_mesh("cpu", (8,))
        x = torch.ones(2).to(dtype)
        for out in (
            communicator(mesh).all_reduce(x),
            communicator(mesh).all_gather(x, (2,) * 8),
            communicator(mesh).broadcast(x, 0),
        ):
            assert out.dtype is dtype
            wide = torch.complex64 if dtype.is_complex else torch.float32
            assert out.to(wide).isnan().all()
        assert torch.equal(communicator(mesh).broadcast(x, 3).to(wide), x.to(wide))


def test_gradients_run_and_are_counted():
    with dry_run(WORLD):
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
        x = torch.ones(3, requires_grad=True)
        with count_collectives() as c:
            all_reduce(x, mesh).sum().backward()
        assert x.grad is not None
        assert c.calls("all_reduce", "dp") >= 1


def test_objects_of_other_ranks_are_refused():
    with dry_run(4):
        mesh = init_device_mesh("cpu", (4,))
        with pytest.raises(CollectiveError, match="not known in a dry world"):
            communicator(mesh).all_gather_object("mine")
