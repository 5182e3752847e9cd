"""Something goes wrong over the double of NCCL; run under mpiexec by test_nccl.py.

Run: mpiexec -n 2 python nccl_faults.py LIBRARY FAULT
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import nccl_over_double as checks  # noqa: E402  (loads the double)
import torch  # noqa: E402
from nccl_double.host_streams import HostStreams  # noqa: E402

from dtensor import get_rank, init_device_mesh  # noqa: E402
from dtensor.collectives import nccl  # noqa: E402
from dtensor.collectives.communicator import CollectiveError  # noqa: E402
from dtensor.collectives.registry import communicator  # noqa: E402
from dtensor.collectives.streams import start  # noqa: E402

rank = get_rank()
streams = HostStreams(checks.DOUBLE)


def comm() -> Any:
    return communicator(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))


def channel() -> nccl.NCCLChannel:
    found = comm()._device
    assert isinstance(found, nccl.NCCLChannel)
    return found


def report(error: CollectiveError) -> None:
    """Each rank says what it got, in one write; then the job ends well."""
    print(f"rank {rank} got {error}", flush=True)


# ------------------------------------------------- breaks the backend, then checks it
def break_input_wait() -> None:
    """The side stream does not wait for the input."""
    wait = streams.wait
    streams.wait = lambda s, e: None if s == streams.side() else wait(s, e)  # type: ignore[method-assign]
    checks.check_overlap()


def break_result_wait() -> None:
    """The reader does not wait for the side stream."""
    wait = streams.wait
    streams.wait = lambda s, e: wait(s, e) if s == streams.side() else None  # type: ignore[method-assign]
    checks.check_overlap()


def break_count() -> None:
    """One rank posts one element less."""
    if rank == 1:
        whole = nccl._stretches
        nccl._stretches = lambda n: ((i, k - 1) for i, k in whole(n))
    checks.check_values()


def break_order() -> None:
    """One rank begins the broadcasts of an uneven gather with the other rank's."""
    if rank == 1:

        class Turned:
            """CuPy's communicator, whose broadcasts change their roots."""

            def __getattr__(self, name: str) -> Any:
                return getattr(found._comm_before, name)

            def broadcast(self, *args: Any) -> None:
                *rest, root, stream = args
                found._comm_before.broadcast(*rest, 1 - root, stream)

        found: Any = channel()
        found._comm_before, found._comm = found._comm, Turned()
    checks.check_values()


# ----------------------------------------------------- a program that goes wrong
def unlike() -> None:
    """The ranks call unlike reductions."""
    try:
        comm().all_reduce(torch.ones(3), "sum" if rank else "product")
    except CollectiveError as error:
        report(error)
    try:
        comm().all_reduce(torch.ones(3))
    except CollectiveError as error:
        report(error)


def absent() -> None:
    """Rank 1 does not come."""
    comm().all_reduce(torch.ones(3))
    if rank == 0:
        try:
            comm().all_reduce(torch.ones(3))
        except CollectiveError as error:
            report(error)
    comm().all_gather_object(None)  # over MPI, which goes on


def leaves() -> None:
    """Rank 1 ends, while rank 0 has begun a collective on the side stream."""
    comm().all_reduce(torch.ones(3))
    if rank == 0:
        start(streams, comm().all_reduce, torch.ones(3))
        streams.synchronize(streams.side())


def leaves_at_once() -> None:
    """The same, where rank 0 waits inside of NCCL, as in the first calls."""
    comm().all_reduce(torch.ones(3))
    if rank == 0:
        comm().all_reduce(torch.ones(3))


def late() -> None:
    """Rank 1 is late at its end: rank 0 waits a while, and gives up its communicator."""
    comm().all_reduce(torch.ones(3))
    if rank == 1:
        time.sleep(1.5)
    print(f"rank {rank} gave up {nccl.close_all(0.3)}", flush=True)
    try:
        comm().all_reduce(torch.ones(3))
    except CollectiveError as error:
        report(error)


def late_start() -> None:
    """Rank 1 is late in a collective that rank 0 has posted before its end: no fault."""
    c, x = comm(), torch.ones(3)
    if rank == 1:
        time.sleep(2.5)
    pending = start(streams, c.all_reduce, x)
    print(f"rank {rank} gave up {nccl.close_all(1.0)}", flush=True)
    print(f"rank {rank} has {pending.wait().tolist()}", flush=True)


def wrong_device() -> None:
    """A tensor that lies elsewhere; meta stands for another GPU."""
    try:
        x = torch.ones(2, device="meta")
        call = checks.nccl.Call("all_reduce", "tp", rank, 7, (2,), x.dtype)
        channel()._check_device(call, x)
    except CollectiveError as error:
        report(error)


def same_gpu() -> None:
    """Both ranks have one device."""
    streams.name = lambda: "GPU-1 of host a"  # type: ignore[method-assign]
    try:
        comm()
    except CollectiveError as error:
        report(error)


def no_binding() -> None:
    """One rank lacks CuPy: both are told."""
    if rank == 1:
        nccl.missing_binding = lambda: "CuPy cannot be loaded."
    try:
        comm()
    except CollectiveError as error:
        report(error)


if __name__ == "__main__":
    torch.set_num_threads(1)
    checks.use_streams(streams)
    globals()[sys.argv[2]]()
