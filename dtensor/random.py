"""Seeds and call numbers: which random numbers the next call of a mesh takes.

A random call on DTensors takes the stream of a key (seed, call number), and of that
stream each element the bits of its global index (``kernels/philox.py``). All ranks of
the mesh must have the same key. There are two ways to it:

* After ``manual_seed`` the mesh counts its calls, which all its ranks make alike.
  Nothing is sent. ``torch.get_rng_state`` and ``set_rng_state``, hence also
  ``torch.utils.checkpoint``, carry the count along.
* Before it, torch's default CPU generator of the mesh's first rank gives a number for
  each call, and 8 bytes travel from there. So ``torch.manual_seed``, saved states and
  the recomputation of a checkpoint count as for plain tensors, and unlike seeds on the
  ranks are harmless. No cheaper way is always right: a rank can seed or draw alone, and
  the others cannot know it without a message.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from typing import Any

import torch

from dtensor.collectives.registry import communicator_of
from dtensor.mesh.ambient import current_mesh
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.mesh.world import World, current_world

Key = tuple[int, int]
Ranks = tuple[int, ...]
_STATE = struct.Struct("<8sQQ")
_MARK = b"dtensor1"


@dataclass(frozen=True, slots=True)
class Count:
    """Seed of a mesh and number of its next call; whether a user gave the seed."""

    seed: int
    call: int
    given: bool = True


Counts = dict[Ranks, Count]


def _counts(world: World) -> Counts:
    found: Counts = world.memo.get("random counts", {})
    return found


def _put(world: World, counts: Counts) -> None:
    """Counts are replaced, never changed: saved states keep the old ones."""
    world.memo["random counts"] = counts


def _ranks(mesh: DeviceMesh | None, world: World) -> Ranks:
    mesh = current_mesh() if mesh is None else mesh
    return tuple(range(world.size)) if mesh is None else tuple(sorted(mesh.ranks))


def mixed(*words: int) -> int:
    """A number below 2**63 that depends on all bits of some others."""
    text = ",".join(map(str, words)).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def next_key(
    mesh: DeviceMesh, world: World, generator: torch.Generator | None = None
) -> Key:
    """The key of the next random call; every rank of the mesh calls.

    Args:
        mesh: The mesh of the operands, which this rank is on.
        world: This rank.
        generator: Where a number is drawn instead, if given.

    Returns:
        Seed and call number, alike on all ranks. Bytes sent per rank: 8, none after
        ``manual_seed``.
    """
    if generator is None:
        counts = _counts(world)
        if counts:
            ranks = tuple(sorted(mesh.ranks))
            count = counts.get(ranks) or _derived(counts, ranks)
            if count is not None:
                after = replace(count, call=count.call + 1)
                _put(world, counts | {ranks: after})
                return count.seed, count.call
    where = "cpu" if generator is None else generator.device
    seed = torch.randint(2**62, (1,), generator=generator, device=where).cpu()
    if mesh.size() > 1:
        seed = communicator_of(mesh.ranks, "mesh").broadcast(seed, 0)
    return int(seed), 0


def _derived(counts: Counts, ranks: Ranks) -> Count | None:
    """The first count of a part of a mesh that was seeded: a seed of its own."""
    for seeded in reversed(counts):
        if counts[seeded].given and set(ranks) <= set(seeded):
            return Count(mixed(counts[seeded].seed, *ranks), 0, False)
    return None


def manual_seed(seed: int | None, device_mesh: DeviceMesh | None = None) -> None:
    """Seed the random numbers of DTensors; every rank of the mesh calls.

    From here on random calls on the mesh send nothing, and torch's generators have no
    part in them. Meshes of some of its ranks get seeds of their own, derived from this
    one. The same seed gives the same global tensors on every mesh.

    Args:
        seed: The seed, alike on all ranks; None to go back to torch's generators.
        device_mesh: The mesh; the ambient one by default, else all ranks.

    Raises:
        ValueError: The ranks gave unlike seeds (on every rank).
        TypeError: Not a whole number.

    Example:
        >>> import dtensor
        >>> with dtensor.init_device_mesh("cpu", (1,)):
        ...     dtensor.manual_seed(7)
        ...     one = dtensor.rand(3)
        ...     dtensor.manual_seed(7)
        ...     torch.equal(one.to_local(), dtensor.rand(3).to_local())
        ...     dtensor.manual_seed(None)
        True
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(
            f"manual_seed: a seed is a whole number, got {seed!r}. Call "
            "dtensor.manual_seed(0)."
        )
    count = None if seed is None else Count(seed % 2**64, 0)
    _set("manual_seed", count, device_mesh)


def get_rng_state(device_mesh: DeviceMesh | None = None) -> torch.Tensor:
    """What the next random numbers of a mesh's DTensors depend on, as bytes to save.

    After ``manual_seed`` the seed and the call number, alike on all ranks, for any
    number of ranks. Before it the state of torch's CPU generator of this rank; that of
    the mesh's first rank counts. Sends nothing.

    Args:
        device_mesh: The mesh; the ambient one by default, else all ranks.
    """
    world = current_world()
    ranks = _ranks(device_mesh, world)
    counts = _counts(world)
    count = counts.get(ranks) or _derived(counts, ranks)
    if count is None:
        return torch.get_rng_state()
    packed = _STATE.pack(_MARK, count.seed, count.call)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def set_rng_state(state: torch.Tensor, device_mesh: DeviceMesh | None = None) -> None:
    """Go on from a state that ``get_rng_state`` gave; every rank of the mesh calls.

    Args:
        state: The bytes; those of a seeded mesh alike on all ranks.
        device_mesh: The mesh; the ambient one by default, else all ranks.

    Raises:
        ValueError: The ranks gave unlike states (on every rank).
    """
    if state.numel() != _STATE.size:
        _set("set_rng_state", None, device_mesh)
        torch.set_rng_state(state)
        return
    mark, seed, call = _STATE.unpack(bytes(state.tolist()))
    if mark != _MARK:
        raise ValueError(
            f"set_rng_state: not a state, got bytes that begin with {mark!r}. Give "
            "what dtensor.get_rng_state() returned."
        )
    _set("set_rng_state", Count(seed, call), device_mesh)


def _set(what: str, count: Count | None, mesh: DeviceMesh | None) -> None:
    world = current_world()
    ranks = _ranks(mesh, world)
    if world.rank not in ranks:
        return
    if len(ranks) > 1:
        given = communicator_of(ranks, "mesh").all_gather_object(count)
        if any(g != given[0] for g in given):
            shown = [None if g is None else (g.seed, g.call) for g in given]
            raise ValueError(
                f"{what}: the ranks must agree, got (seed, call) {shown} of the ranks "
                f"{ranks}. Give the same on every rank; what differs by rank belongs "
                "in torch.manual_seed."
            )
    kept = {r: c for r, c in _counts(world).items() if not set(r) <= set(ranks)}
    _put(world, kept if count is None else kept | {ranks: count})


# ---- torch's saved states carry the counts -------------------------------------------
def _install() -> None:
    get, put = torch.random.get_rng_state, torch.random.set_rng_state
    if getattr(get, "_by_dtensor", False):
        return

    def world_or_none() -> World | None:
        try:
            return current_world()
        except RuntimeError:  # a process of torchrun has none; that is no matter here
            return None

    def get_with_counts() -> torch.Tensor:
        state = get()
        world = world_or_none()
        if world is not None and "random counts" in world.memo:
            state.__dict__["_dtensor_counts"] = (world, _counts(world))
        return state

    def set_with_counts(new_state: torch.Tensor) -> None:
        put(new_state)
        saved: Any = getattr(new_state, "_dtensor_counts", None)
        # Another rank of a simulation may put back what this one saved.
        if saved is not None and saved[0] is world_or_none():
            _put(*saved)

    for name, old, new in (
        ("get_rng_state", get, get_with_counts),
        ("set_rng_state", put, set_with_counts),
    ):
        new.__name__, new.__doc__, new.__module__ = name, old.__doc__, old.__module__
        new.__dict__["_by_dtensor"] = True
        for module in (torch, torch.random):
            setattr(module, name, new)


_install()

__all__ = ["get_rng_state", "manual_seed", "mixed", "next_key", "set_rng_state"]
