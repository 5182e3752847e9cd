"""Finding the communicator of a mesh axis: made once, by its members only.

Communicators are kept in the memo of the rank's world. Axes over the same ranks share
one channel below them: MPI libraries allow some two thousand communicators. On a mesh of
GPUs there are two, NCCL for what lies on the GPUs and MPI for what lies on the host.
"""

from __future__ import annotations

from dtensor.collectives.checked import Alone, CheckedCommunicator
from dtensor.collectives.communicator import Channel, Communicator
from dtensor.collectives.counter import tally_of
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.mesh.world import World, current_world


def communicator(mesh: DeviceMesh, axis: str | int = 0) -> Communicator:
    """The communicator of this rank's row along one axis of a mesh.

    Every rank of the row must call it, before or in the same order as the other
    collectives of these ranks.

    Args:
        mesh: A mesh this rank is on.
        axis: Name or number of the axis.

    Raises:
        ValueError: No such axis, this rank is not on the mesh, or the mesh names ranks
            that the world does not have.
    """
    world = current_world()
    found: Communicator | None = world.memo.get((mesh, axis))
    if found is None:
        index = mesh.axis(axis)
        ranks = mesh.axis_ranks(index)
        found = communicator_of(ranks, mesh.axis_name(index), mesh.device_type)
        world.memo[(mesh, axis)] = found
    return found


def communicator_of(
    ranks: tuple[int, ...], label: str, device_type: str = "cpu"
) -> Communicator:
    """The communicator of some world ranks, this one among them.

    Args:
        ranks: World ranks in the order of their positions.
        label: What messages and counts call the axis.
        device_type: Kind of the ranks' devices. Tensors on others travel by the host.

    Raises:
        ValueError: This rank is not one of them, or the world does not have them.
    """
    world = current_world()
    key = ("communicator", ranks, label, device_type)
    found: Communicator | None = world.memo.get(key)
    if found is None:
        if world.rank not in ranks:
            raise ValueError(
                f"communicator_of: only members can have it, got rank {world.rank}, "
                f"expected one of {ranks} on axis {label!r}. "
                f"Ask `mesh.coordinate is not None` first."
            )
        if max(ranks) >= world.size:
            raise ValueError(
                f"communicator_of: the world is too small, got {world.size} ranks, "
                f"expected at least {max(ranks) + 1} for the ranks {ranks} of axis "
                f"{label!r}. Start with `dtensor-run -n {max(ranks) + 1} script.py`, "
                f"or simulate(fn, ranks={max(ranks) + 1})."
            )
        channel = _channel(world, ranks, label)
        device = _device_channel(world, ranks, label, channel, device_type)
        tally = tally_of(world)
        found = CheckedCommunicator(ranks, world.rank, label, channel, tally, device)
        world.memo[key] = found
    return found


def _channel(world: World, ranks: tuple[int, ...], label: str) -> Channel | Alone:
    key = ("channel", ranks)
    found: Channel | Alone | None = world.memo.get(key)
    if found is None:
        if len(ranks) == 1:
            found = Alone()
        elif world.kind == "threads":
            from dtensor.collectives.threads import ThreadsChannel

            found = ThreadsChannel(world.hub, ranks, ranks.index(world.rank))
        elif world.kind == "dry":
            from dtensor.collectives.dry import DryChannel

            found = DryChannel(ranks.index(world.rank))
        else:
            from dtensor.collectives.mpi import make_channel

            found = make_channel(world, ranks, label)
        world.memo[key] = found
    return found


def _device_channel(
    world: World,
    ranks: tuple[int, ...],
    label: str,
    host: Channel | Alone,
    device_type: str,
) -> Channel | None:
    """NCCL on a mesh of GPUs; None where all tensors travel by the host.

    ``memo["streams", device_type]`` may hold the streams of the rank's device, of a
    kind of the caller's making; the tests put streams on host memory there.
    """
    streams = world.memo.get(("streams", device_type))
    if world.kind != "mpi" or isinstance(host, Alone):
        return None
    if device_type != "cuda" and streams is None:
        return None
    key = ("channel", ranks, device_type)
    found: Channel | None = world.memo.get(key)
    if found is None:
        from dtensor.collectives.nccl import make_channel

        found = world.memo[key] = make_channel(world, ranks, label, host, streams)
    return found
