"""Checks of CuPy's NCCL binding over the double; run under mpiexec by test_nccl.py.

Run: mpiexec -n N python nccl_over_double.py LIBRARY CHECK ...
Rank 0 prints ``ok CHECK`` after each; a failed check ends the job. The double is loaded
before CuPy looks for NCCL; then meshes of the host use the NCCL backend on host memory.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from nccl_double import host_streams  # noqa: E402

DOUBLE = host_streams.load(sys.argv[1])

import collectives_over_mpi as base  # noqa: E402
import torch  # noqa: E402

from dtensor import (  # noqa: E402
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    get_rank,
    get_world_size,
    init_device_mesh,
)
from dtensor.collectives import nccl  # noqa: E402
from dtensor.collectives.functional import all_gather, all_reduce  # noqa: E402
from dtensor.collectives.registry import communicator  # noqa: E402
from dtensor.collectives.streams import start  # noqa: E402
from dtensor.mesh.world import current_world  # noqa: E402

require = base.require


def use_streams(streams: host_streams.HostStreams) -> host_streams.HostStreams:
    """Make meshes of the host use NCCL with these streams; before the first call."""
    current_world().memo["streams", "cpu"] = streams
    return streams


def posts() -> list[str]:
    """What this rank has posted so far; it is cleared."""
    path = Path(f"{os.environ['NCCL_DOUBLE_LOG']}.{get_rank()}")
    text = path.read_text() if path.exists() else ""
    path.unlink(missing_ok=True)
    return text.splitlines()


# ----------------------------------------------------------------------------- checks
def check_backend() -> None:
    """Tensors go over NCCL, objects over MPI, an axis of one rank over nothing."""
    mesh, n, rank = base.line(), get_world_size(), get_rank()
    comm = communicator(mesh)
    posts()
    x = torch.ones(6)
    all_reduce(x, mesh)
    sent = posts()
    require(sent == [f"rank {rank} allReduce count 6 dtype 7 op 0 root 0"], sent)
    all_gather(x[: rank + 1], mesh, 0, range(1, n + 1))
    require(len(posts()) == n, "an uneven gather is a broadcast for each rank")
    comm.all_gather_object({"rank": rank})
    comm.barrier()
    grid = init_device_mesh("cpu", (n, 1), mesh_dim_names=("dp", "tp"))
    all_reduce(torch.ones(2), grid["tp"])
    require(posts() == [], "objects, barriers and axes of one rank need no NCCL")
    require("cupy.cuda.nccl" in sys.modules, "CuPy is not used")


def check_values() -> None:
    base.check_values()


def check_dtypes() -> None:
    base.check_dtypes()


def check_same_bits() -> None:
    base.check_same_bits()


def check_gradients() -> None:
    base.check_gradients()


def check_meshes() -> None:
    base.check_meshes()


def check_large() -> None:
    """Buffers that one NCCL call shall not take are cut, and none are gathered."""
    usual, nccl.LARGEST, nccl.GATHERED = (nccl.LARGEST, nccl.GATHERED), 7, 0
    try:
        base.check_values()
        base.check_dtypes()
    finally:
        nccl.LARGEST, nccl.GATHERED = usual


def check_short() -> None:
    """Floats of 16 bits travel as they are; those of 8 bits are widened to be folded."""
    mesh, n = base.line(), get_world_size()
    numbers = {torch.float16: 6, torch.bfloat16: 9, torch.float8_e4m3fn: 7}
    for dtype, number in numbers.items():
        x = torch.full((5,), 2.0).to(dtype)
        posts()
        total = all_reduce(x, mesh)
        require(f"dtype {number} op 0" in posts()[0], dtype)
        mean = all_reduce(x, mesh, "avg")
        require(f"dtype {number} op 4" in posts()[0], dtype)
        require(bool((total.float() == 2 * n).all()), (dtype, total))
        require(bool((mean.float() == 2).all()), (dtype, mean))


def places(shape: Sequence[int]) -> list[tuple[Any, ...]]:
    choices = [Shard(0), Shard(1), Replicate(), Partial(), Partial("avg")]
    return list(itertools.product(choices, repeat=len(shape)))


def check_pairs() -> None:
    """All pairs of placements, values and gradients, with uneven and empty shards."""
    n = get_world_size()
    shapes = [(2,)] if n == 2 else [(4,), (2, 2)]
    full = torch.arange(15, dtype=torch.float64).view(5, 3) + 1
    slope = torch.arange(15, dtype=torch.float64).view(5, 3).sin()
    count = 0
    for shape in shapes:
        mesh = init_device_mesh("cpu", shape)
        weight = distribute_tensor(slope, mesh, [Replicate()] * len(shape))
        for src in places(shape):
            for dst in places(shape):
                x = distribute_tensor(full, mesh, src).detach().requires_grad_()
                y = x.redistribute(mesh, dst)
                torch.testing.assert_close(y.full_tensor(), full)
                (y.redistribute(mesh, weight.placements) * weight).sum().backward()
                assert isinstance(x.grad, DTensor)
                require(x.grad.placements == src or x.grad.shape == full.shape, src)
                if not any(isinstance(p, Partial) for p in src):
                    torch.testing.assert_close(x.grad.full_tensor(), slope)
                count += 1
    if get_rank() == 0:
        print(f"pairs {count}", flush=True)


def check_reductions() -> None:
    """What only some backends reduce: max, min and product, between placements."""
    mesh, n = base.line(), get_world_size()
    mine = torch.tensor([[1.0 + get_rank(), -0.0], [float("nan"), 2.0]])
    every = torch.stack([mine + torch.tensor([[r - get_rank(), 0], [0, 0]])
                         for r in range(n)])  # fmt: skip
    wants = {"max": every.amax(0), "min": every.amin(0), "product": every.prod(0)}
    for op, want in wants.items():
        x = DTensor.from_local(mine, mesh, [Partial(op)])
        for dst in (Replicate(), Shard(0), Shard(1)):
            got = x.redistribute(mesh, [dst]).full_tensor()
            torch.testing.assert_close(got, want, equal_nan=True)


def check_training() -> None:
    """A sharded layer trains as a plain one does."""
    mesh = base.line()
    full = [
        torch.randn(6, 5, generator=torch.Generator().manual_seed(i)) for i in (1, 2)
    ]
    plain = full[1].clone().requires_grad_()
    ours = torch.nn.Parameter(distribute_tensor(full[1], mesh, [Shard(0)]))
    for weight, data in ((plain, full[0]), (ours, None)):
        if data is None:
            data = distribute_tensor(full[0], mesh, [Replicate()])
        for _ in range(3):
            (data @ weight.t()).relu().square().mean().backward()
            with torch.no_grad():
                weight -= 0.1 * weight.grad
                weight.grad = None
    torch.testing.assert_close(ours.full_tensor().detach(), plain.detach())


def check_overlap() -> None:
    """A collective on the side stream waits for its input, its reader for the result."""
    streams, n = current_world().memo["streams", "cpu"], get_world_size()
    # The usual stream runs at once; this one is a queue, as a GPU's is.
    queue = streams.side() + 1000
    comm = communicator(base.line())
    for verb in (comm.all_reduce, lambda x: comm.all_gather(x, [4] * n)):
        with streams.use(queue):
            x, read = torch.full((4,), -1.0), []

            def produce(x: torch.Tensor = x) -> None:
                time.sleep(0.05)
                x.fill_(2.0)

            streams.call(produce)
            pending = start(streams, verb, x)
            total = pending.wait()
            streams.call(lambda total=total, read=read: read.append(total.clone()))
            streams.synchronize(queue)
        want = 2.0 if len(total) > 4 else 2.0 * n
        require(bool((read[0] == want).all()), f"overlap read {read[0].tolist()}")
        require(pending.ready(), "what was waited for is not done")
        require(
            (x.data_ptr(), streams.side()) in streams.kept, "the input may be freed"
        )
        require((total.data_ptr(), queue) in streams.kept, "the result may be freed")
        comm.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    use_streams(host_streams.HostStreams(DOUBLE))
    for name in sys.argv[2:]:
        globals()[f"check_{name}"]()
        if get_rank() == 0:
            print(f"ok {name}", flush=True)
