"""``check_replicas``: whether the copies of replicated tensors are still alike."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.clipping import Rows, row_of
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Placement, Replicate
from dtensor.redistribute import plain
from dtensor.spec import Spec, spec_of
from dtensor.tensor import DTensor

T = torch.Tensor
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd 64-bit constants (Steele et al. 2014, Fast splittable pseudorandom generators).
STRIDE = 0x9E3779B97F4A7C15 - 2**64
MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
STRETCH = 1 << 22  # elements hashed at a time: 32 MiB of int64


class ReplicaError(RuntimeError):
    """Copies of one tensor differ.

    Attributes:
        name: The tensor's name.
        axis: Name of the mesh axis along which its copies differ.
        ranks: World ranks whose copy differs from that of most; all that have a copy
            where there is no majority.
    """

    def __init__(self, name: str, axis: str, ranks: tuple[int, ...], text: str) -> None:
        super().__init__(text)
        self.name = name
        self.axis = axis
        self.ranks = ranks


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor, or the shard of one, that other ranks have as well."""

    name: str
    local: T
    spec: Spec


def check_replicas(
    module: torch.nn.Module | Mapping[str, T], mesh: DeviceMesh | None = None
) -> None:
    """Compare all copies of replicated parameters and buffers, bit by bit.

    A copy drifts when ranks do not do the same: unlike seeds, an update that one rank
    left out, a write into ``to_local()``. Each rank hashes what it has; the hashes
    travel, 8 bytes per tensor. Every rank of the meshes must call; all raise alike.

    Args:
        module: The module, or tensors by name (such as a state of an optimizer). On an
            axis that cuts a tensor, or holds addends of it, there are no copies.
        mesh: Plain tensors, and those on a slice of this mesh, are taken for the same
            on all of it. Without it plain ones are left out, and the others compared
            over the mesh they are on.

    Raises:
        ReplicaError: Names the first that drifted, the axis, and the ranks that differ
            from most, or all of them where there is no majority, as of two copies.

    Bytes sent per rank: over n ranks in all, 8 (n-1) for each tensor, in one all-gather
    per axis.

    Example:
        >>> from dtensor import Replicate, init_device_mesh, parallelize_module, simulate
        >>> mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        >>> def program():
        ...     model = torch.nn.Linear(2, 2)
        ...     parallelize_module(model, mesh, {})
        ...     check_replicas(model)
        >>> simulate(program, ranks=2)
        [None, None]
    """
    copies = list(_copies(module, mesh))
    rows = Rows(c.spec for c in copies)
    if not rows.comms:
        return
    rank = copies[0].spec.world.rank
    device = copies[0].local.device
    hashes = [hash_of(c.local).to(device) for c in copies]
    table = torch.stack([*hashes, torch.tensor(rank, device=device)])
    with torch.no_grad():
        for comm in rows.comms.values():
            flat = comm.all_gather(table.reshape(-1), [table.numel()] * comm.size)
            table = flat.view(comm.size, *table.shape)
    # (last row, ..., first row, tensors and the rank)
    table = table.cpu()
    ranks = table[..., -1]
    keys = list(rows.comms)
    for i, c in enumerate(copies):
        axes = {
            len(keys) - 1 - keys.index(row_of(c.spec, a)): c.spec.mesh.axis_name(a)
            for a, p in enumerate(c.spec.placements)
            if isinstance(p, Replicate) and c.spec.mesh.shape[a] > 1
        }
        found = _differing(table[..., i], ranks, list(axes))
        if found is not None:
            raise _drifted(c, axes[found[0]], found[1])


def _differing(
    values: T, ranks: T, dims: list[int]
) -> tuple[int, tuple[int, ...]] | None:
    """Where copies differ.

    Args:
        values: Hash of one tensor on each rank of the grid.
        ranks: World rank at each place of the grid.
        dims: Dims of the grid along which the tensor has copies.

    Returns:
        The first of the dims along which some differ, and the ranks that are not in the
        majority of their copies; None where all are alike.
    """
    for dim in dims:
        if bool((values != values.narrow(dim, 0, 1)).any()):
            break
    else:
        return None
    rest = [d for d in range(values.ndim) if d not in dims]
    order = rest + dims
    copies = math.prod(values.shape[d] for d in dims)
    odd: set[int] = set()
    lines = values.permute(order).reshape(-1, copies).tolist()
    for line, names in zip(
        lines, ranks.permute(order).reshape(-1, copies).tolist(), strict=True
    ):
        usual, count = Counter(line).most_common(1)[0]
        if count < copies:
            most = 2 * count > copies
            odd |= {n for v, n in zip(line, names) if v != usual or not most}
    return dim, tuple(sorted(odd))


def _drifted(c: _Copy, axis: str, ranks: tuple[int, ...]) -> ReplicaError:
    here = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
    return ReplicaError(
        c.name,
        axis,
        ranks,
        f"check_replicas: the copies of {c.name!r} differ on axis {axis!r}, got other "
        f"bits on {here}, expected the same on all ranks of the axis. Look for what only "
        "some ranks did: a write into to_local(), a seed, a skipped step; to go on, "
        "load one state on all ranks.",
    )


def _copies(
    module: torch.nn.Module | Mapping[str, T], mesh: DeviceMesh | None
) -> Iterable[_Copy]:
    for name, x in _named(module):
        if isinstance(x, DTensor):
            spec = _on(x._spec, mesh)
        elif mesh is not None and isinstance(x, T):
            spec = spec_of(mesh, (Replicate(),) * mesh.ndim, x.shape)
        else:
            continue
        if spec.coordinate is not None and not x.is_meta:
            yield _Copy(name, plain(x).detach(), spec)


def _on(spec: Spec, mesh: DeviceMesh | None) -> Spec:
    """The spec on a mesh of which its own is a slice: copies on the other axes."""
    names = spec.mesh.mesh_dim_names
    if (
        mesh is None
        or names is None
        or not set(names) <= {*(mesh.mesh_dim_names or ())}
    ):
        return spec
    if mesh is spec.mesh or mesh[names] is not spec.mesh:
        return spec
    places: list[Placement] = [Replicate()] * mesh.ndim
    for name, p in zip(names, spec.placements, strict=True):
        places[mesh.axis(name)] = p
    return spec_of(mesh, tuple(places), spec.shape, spec.world)


def _named(module: torch.nn.Module | Mapping[str, T]) -> Iterable[tuple[str, Any]]:
    if isinstance(module, Mapping):
        yield from module.items()
        return
    yield from module.named_parameters()
    yield from module.named_buffers()


def hash_of(x: T) -> T:
    """64 bits that depend on every bit of a tensor and on its place.

    Each word is mixed with its index as splitmix64 mixes its counter, and all are added,
    so that the order in which they are added does not matter.
    """
    with NoTF(), torch.no_grad():
        x = x.resolve_conj().resolve_neg()
        if x.is_complex():
            x = torch.view_as_real(x)
        flat = x.contiguous().reshape(-1)
        if flat.dtype not in BITS.values():
            flat = flat.view(BITS[flat.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=x.device)
        for start in range(0, flat.numel(), STRETCH):
            words = flat[start : start + STRETCH].to(torch.int64)
            index = torch.arange(
                start + 1, start + 1 + words.numel(), device=words.device
            )
            mixed = words + index * STRIDE
            for factor, shift in zip(MIX, (30, 27), strict=True):
                high = (mixed >> shift) & ((1 << (64 - shift)) - 1)
                mixed = (mixed ^ high) * factor
            high = (mixed >> 31) & ((1 << 33) - 1)
            total = total + (mixed ^ high).sum()
        return total
