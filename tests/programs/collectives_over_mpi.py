"""Checks of the MPI communicators; every rank runs all that are named.

Run: mpiexec -n N python collectives_over_mpi.py CHECK ...
Rank 0 prints ``ok CHECK`` after each; a failed check ends the job.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from dtensor.collectives import registry
from dtensor.collectives.communicator import CollectiveError
from dtensor.collectives.conjugate import all_reduce_identity, identity_all_reduce
from dtensor.collectives.counter import count_collectives
from dtensor.collectives.functional import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    permute,
    reduce_scatter,
)
from dtensor.collectives.registry import communicator
from dtensor.collectives.simulate import simulate
from dtensor.mesh.device_mesh import DeviceMesh, init_device_mesh
from dtensor.mesh.world import current_world, get_rank, get_world_size

MOVED = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.complex64, torch.complex128,
]  # fmt: skip


def require(truth: bool, text: object) -> None:
    if not truth:
        raise AssertionError(f"rank {get_rank()}: {text}")


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (get_world_size(),), mesh_dim_names=("tp",))


def bits(x: torch.Tensor) -> tuple[Any, ...]:
    flat = x.detach().contiguous().reshape(-1).view(torch.uint8)
    return tuple(x.shape), str(x.dtype), flat.tolist()


def verbs() -> list[tuple[Any, ...]]:
    """Every verb on whole numbers, so that the order of additions does not matter."""
    mesh, n, rank = line(), get_world_size(), get_rank()
    x = torch.arange(24.0, dtype=torch.float64).view(4, 6) + 100 * rank
    ragged = x[: (2 * rank + 1) % 4]
    strided = x.t()[::2]
    results = [all_reduce(v, mesh) for v in (x, strided, x[0, 0], x[:0])]
    results += [all_reduce(x, mesh, op) for op in ("avg", "max", "min")]
    results += [all_gather(v, mesh, 0) for v in (x, ragged, strided, x[:0])]
    results += [all_gather(ragged.t(), mesh, 1)]
    results += [reduce_scatter(v, mesh, 0) for v in (x, strided, x[:0], x[:1])]
    sizes = [0] * n
    sizes[-1], sizes[0] = 2, sizes[0] + 4
    results += [reduce_scatter(x, mesh, 1, sizes, "max")]
    results += [all_to_all(x, mesh, 0, 1), all_to_all(strided, mesh, 1, 0)]
    lengths = [(rank + j) % 3 for j in range(n)]
    rows = x.view(-1, 1)[: sum(lengths)]
    results += [all_to_all(rows, mesh, 0, 0, lengths)]
    results += [broadcast(v, mesh, n - 1) for v in (x, strided, x[0, 0], x[:0])]
    results += [permute(v, mesh, s) for v in (x, x[:0]) for s in (1, -1, n)]
    comm = communicator(mesh)
    open_ended = (x, None if rank == n - 1 else rank + 1)
    source = None if rank == 0 else rank - 1
    results += [comm.permute(*open_ended, source, 24 if rank else 0)]
    comm.barrier()
    objects = comm.all_gather_object({"rank": rank, "data": "x" * 500 * rank})
    return [*(bits(y) for y in results), ("objects", len(objects), str(objects))]


def same_as_simulated(program: Callable[[], Any]) -> None:
    """The program gives the same over MPI as among threads."""
    mine = program()
    threads = simulate(program, ranks=get_world_size())[get_rank()]
    for i, (got, want) in enumerate(zip(mine, threads, strict=True)):
        require(got == want, f"result {i}: got {got}, expected {want}")


# ----------------------------------------------------------------------------- checks
def check_lazy() -> None:
    """MPI is not loaded for imports, worlds, meshes, or axes of one rank."""
    require(current_world().kind == "mpi", current_world())
    grid = init_device_mesh("cpu", (get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    all_reduce(torch.ones(2), grid["tp"])
    require("mpi4py" not in sys.modules, "mpi4py is imported")


def check_values() -> None:
    same_as_simulated(verbs)


def check_large() -> None:
    """Buffers that one MPI call cannot take are cut."""
    from dtensor.collectives import mpi

    usual, mpi.LARGEST = mpi.LARGEST, 7
    try:
        same_as_simulated(verbs)
    finally:
        mpi.LARGEST = usual


def check_dtypes() -> None:
    def program() -> list[Any]:
        mesh, n, rank = line(), get_world_size(), get_rank()
        z = torch.complex(torch.ones(3), torch.arange(3.0) + rank)
        results = [all_gather(z.conj(), mesh), all_reduce(z.conj().imag, mesh)]
        for dtype in MOVED:
            x = torch.tensor([0, 1, 1, rank]).to(dtype)
            results += [all_gather(x[:rank], mesh), all_gather(x, mesh)]
            results += [broadcast(x, mesh, n - 1), permute(x, mesh, 1)]
            results += [all_to_all(x, mesh, 0, 0)]
            ops = ["sum", "product", "max", "min", "band", "bor", "bxor", "avg"]
            if dtype is torch.bool:
                ops = ops[2:7]
            elif dtype.is_complex:
                ops = ["sum", "product", "avg"]
            elif dtype.is_floating_point:
                ops = [*ops[:4], "avg"]
            else:
                ops = ops[:7]
            results += [all_reduce(x, mesh, op) for op in ops]
            results += [reduce_scatter(x, mesh, op=op) for op in ops]
        return [bits(y) for y in results]

    same_as_simulated(program)


def check_rounding() -> None:
    """bfloat16 and float16 are added in float32 and rounded once."""
    n = get_world_size()
    for dtype in (torch.bfloat16, torch.float16):
        large = 4 / torch.finfo(dtype).eps
        x = torch.tensor([large if get_rank() == 0 else 1.5]).to(dtype)
        want = torch.tensor([large + 1.5 * (n - 1)]).to(dtype)
        require(torch.equal(all_reduce(x, line()), want), dtype)


def check_same_bits() -> None:
    """All ranks get the same bits, of floats, NaNs and signed zeros."""
    generator = torch.Generator().manual_seed(get_rank())
    x = torch.randn(1001, generator=generator)
    x[0] = math.nan if get_rank() == 1 else 1.0
    x[1] = 0.0 if get_rank() == 0 else -0.0
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for op in ("sum", "max", "min", "product"):
            mine = bits(all_reduce(x.to(dtype), line(), op))
            every = communicator(line()).all_gather_object(mine)
            require(all(other == mine for other in every), (dtype, op))
    require(bool(all_reduce(x, line(), "max")[0].isnan()), "NaN is lost")


def check_gradients() -> None:
    """First and second derivatives through all verbs at once."""

    def program() -> list[Any]:
        mesh, rank = line(), get_rank()
        x = (torch.arange(12.0, dtype=torch.float64).view(4, 3) + rank) / 4
        x.requires_grad_()
        y = all_gather(reduce_scatter(x * x, mesh), mesh)
        y = all_to_all(all_to_all(y, mesh, 0, 1), mesh, 1, 0)
        y = permute(broadcast(y, mesh, 0), mesh, 1)
        y = all_reduce_identity(identity_all_reduce(all_reduce(y, mesh), mesh), mesh)
        (g,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad((g * g).sum(), x)
        return [bits(y), bits(g), bits(h)]

    same_as_simulated(program)


def check_meshes() -> None:
    """Axes of a grid, ranks out of order, subsets (4 ranks)."""

    def program() -> list[Any]:
        grid = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))
        mine = torch.tensor([float(get_rank())])
        results = []
        for _ in range(2):
            for axis in ("dp", "tp"):
                results.append(all_gather(mine, grid[axis]))
                results.append(all_reduce(mine, grid[axis]))
        results.append(all_gather(mine, grid.flatten()))
        part = DeviceMesh("cpu", [2, 0])
        if part.coordinate is not None:
            results.append(all_gather(mine, part))
        # Overlapping axes, made in an order that differs between their members.
        for pair in ([0, 1], [2, 3], [1, 2]):
            if get_rank() in pair:
                results.append(all_gather(mine, DeviceMesh("cpu", pair)))
        return [bits(y) for y in results]

    same_as_simulated(program)
    # one channel for the axes over the same ranks
    world = current_world()
    tp = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    for name in ("a", "b", "c"):
        communicator(DeviceMesh("cpu", tp.mesh, (name,))).barrier()
    channels = [key for key in world.memo if key[0] == "channel"]
    require(channels.count(("channel", (0, 1, 2, 3))) == 1, channels)


def check_counts() -> None:
    def program() -> list[Any]:
        with count_collectives() as c:
            verbs()
        return sorted(c.rows().items())

    same_as_simulated(program)


def check_errors() -> None:
    """What MPI finds wrong says who, where and what (2 ranks)."""
    comm, rank = communicator(line()), get_rank()
    comm.barrier()
    try:
        if rank == 0:
            comm.permute(torch.ones(3), 1, None, 0)
        else:
            comm.permute(torch.ones(0), None, 0, 2)
    except CollectiveError as error:
        require(rank == 1, error)
        for text in ("permute: MPI failed: ", "on axis 'tp' (rank 1, call "):
            require(text in str(error), error)
        require("shape (0,), dtype float32" in str(error), error)
    else:
        require(rank == 0, "no error")
    far = init_device_mesh("cpu", (5,))
    try:
        registry.communicator(far)
    except ValueError as error:
        require("the world is too small, got 2 ranks" in str(error), error)
    else:
        require(False, "no error")


def check_activity() -> None:
    """A thread can see what the rank waits in, and which calls are done (2 ranks)."""
    from dtensor.collectives import mpi
    from dtensor.collectives.activity import activity

    comm = communicator(line())
    comm.barrier()
    done = mpi.finished()[comm.ranks]
    require((activity.verb, activity.entered) == (None, 0.0), "not idle")
    seen: list[tuple[Any, ...]] = []

    def watch() -> None:
        time.sleep(0.4)
        a = activity
        seen.append((a.verb, a.axis, a.sequence, a.ranks, a.entered > 0))

    thread = threading.Thread(target=watch)
    thread.start()
    if get_rank() == 1:
        time.sleep(0.8)
    comm.all_reduce(torch.ones(1))
    thread.join()
    if get_rank() == 0:
        require(seen == [("all_reduce", "tp", done + 1, (0, 1), True)], seen)
    require(mpi.finished()[comm.ranks] == done + 1, mpi.finished())


def check_peers() -> None:
    """Large reductions read the other ranks' memory, with MPI's own results."""
    from dtensor.collectives import mpi
    from dtensor.collectives.communicator import CollectiveError

    comm, n = communicator(line()), get_world_size()
    whole = 200_003  # elements; not a multiple of the ranks, in blocks or in bytes
    counts = [whole // n] * n
    counts[0] = whole - sum(counts[1:])
    uneven = [0, whole] if n == 2 else [0, 7, 0, whole - 7]

    def results() -> list[torch.Tensor]:
        found = []
        for dtype in (torch.float32, torch.float64, torch.int32, torch.complex64):
            torch.manual_seed(get_rank())
            x = (9 * torch.randn(whole, dtype=torch.float64)).to(dtype)
            for op in ("sum", "product") if dtype.is_complex else ("sum", "max", "min"):
                found.append(comm.all_reduce(x.view(1, -1), op))
                found.append(comm.reduce_scatter(x, counts, op))
                found.append(comm.reduce_scatter(x, uneven, op))
        short = torch.randn(2 * whole).to(torch.bfloat16).requires_grad_()
        return [*found, comm.all_reduce(short, "avg")]

    asked: list[bool] = []
    usual = mpi.MPIChannel._peers

    def count(self: Any, call: Any, size: int) -> Any:
        found = usual(self, call, size)
        asked.append(found is not None)
        return found

    mpi.MPIChannel._peers = count
    near = results()
    mpi.MPIChannel._peers = lambda self, call, size: None
    far = results()
    mpi.MPIChannel._peers = usual
    require(sum(asked) >= 30, asked)  # those of 32 bits and more are large enough
    for a, b in zip(near, far):
        require(a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape))
        exact = n == 2 or not (a.is_floating_point() or a.is_complex())
        same = torch.equal(a, b) if exact else torch.allclose(a, b, 1e-4, 1e-3)
        require(same, (a, b))
        require(not a.requires_grad, "requires grad")
    for a in near[::3]:  # all ranks have the same bits of a sum
        told = comm.all_gather_object(
            a.numpy().tobytes()
            if a.dtype != torch.bfloat16
            else a.float().numpy().tobytes()
        )
        require(len(set(told)) == 1, "ranks differ")
    nan = torch.zeros(whole)
    nan[get_rank()] = torch.nan
    require(comm.all_reduce(nan, "max").isnan().sum() == n, "a NaN got lost")
    if n == 2:  # another operation on each rank is told to both
        try:
            comm.all_reduce(torch.ones(whole), ("sum", "max")[get_rank()])
        except CollectiveError as error:
            require("the ranks are in different calls" in str(error), error)
        else:
            require(False, "no error")


def check_results_are_new() -> None:
    """A result that somebody holds is never written by a later call (2 ranks)."""
    comm, large = communicator(line()), 1 << 19
    ones = comm.all_reduce(torch.ones(large))
    view = ones[3:5]
    array = comm.all_reduce(torch.full((large,), 2.0)).numpy()
    gathered = comm.all_gather(torch.full((large // 2,), 3.0), [large // 2] * 2)
    first = ones.data_ptr()
    del ones
    for value in range(4):
        comm.all_reduce(torch.full((large,), float(value + 10)))
    n = get_world_size()
    require(view.tolist() == [n, n], view)
    require((array == 2 * n).all() and (gathered == 3).all(), "overwritten")
    again = comm.all_reduce(torch.ones(large))
    require(again.data_ptr() != first, "its memory is in use")


def check_forbidden() -> None:
    """Without leave to read, one rank's is enough, all use MPI."""
    from dtensor.collectives import mpi

    comm = communicator(line())
    if get_rank() == 1:
        os.environ["DTENSOR_PEER_MEMORY"] = "0"
    found = mpi.peer_memory(mpi.start(), mpi.start().COMM_WORLD)
    os.environ.pop("DTENSOR_PEER_MEMORY", None)
    require(found is None, found)
    comm.barrier()


def check_notices() -> None:
    """Notices reach every other rank, whatever it does."""
    from dtensor.collectives import mpi

    require(mpi.started(), "not started")
    require(mpi.leave_channel() is mpi.leave_channel(), "two channels")
    # with a tag of this test's own: the exit watcher reads the usual one
    channel = mpi.LeaveChannel(mpi.start(), mpi.LEAVE_TAG + 1)
    if get_rank() == 1:
        channel.post(b"bye")
        notices = []
    else:
        notices = []
        limit = time.monotonic() + 10
        while not notices and time.monotonic() < limit:
            notices = channel.poll()
    require(notices == ([] if get_rank() == 1 else [(1, b"bye")]), notices)
    communicator(line()).barrier()
    require(channel.poll() == [], "a second notice")


def check_on_start() -> None:
    """What asks to be told is told once, when MPI starts."""
    from dtensor.collectives import mpi

    calls: list[int] = []
    mpi.on_start.append(lambda: calls.append(1))
    require(not mpi.started(), "started before the first communicator")
    for _ in range(2):
        communicator(line()).barrier()
    require(calls == [1], calls)


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        globals()[f"check_{name}"]()
        if get_rank() == 0:
            print(f"ok {name}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # noqa: BLE001 - whatever it was, the job must end
        traceback.print_exc()
        from dtensor.collectives.mpi import abort

        abort(1)
