"""From mesh to mesh: a tensor moves point to point, by the parts that blocks share.

The ranks of both meshes take part: the same ranks in another shape, some of them, or
others altogether. A rank holds its source, its target and, of large tensors, one block.
"""

from __future__ import annotations

import dataclasses

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.collectives.communicator import Communicator
from dtensor.collectives.registry import communicator_of
from dtensor.custom_placement import CustomPlacement
from dtensor.exchange import Box, Exchange, exchange
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.moves import LARGE, alias, box_of, plain
from dtensor.placement import Partial, Placement, Placements, Replicate, Shard, show
from dtensor.plan import local_elements
from dtensor.redistribute import transition
from dtensor.spec import Spec, spec_of
from dtensor.tensor import DTensor, redistributed, typed


def to_mesh(x: DTensor, mesh: DeviceMesh, places: Placements) -> DTensor:
    """The same global value on another mesh; every rank of either mesh must call.

    The adjoint moves the cotangent back, from the duals of the new placements to those
    of the old. A rank of one mesh alone takes part in it with nothing at one of its ends,
    so a backward that crosses must be called on every rank of either mesh, too.

    Args:
        x: The tensor; on a rank outside of its mesh, what stands for it there.
        mesh: The other mesh, of ranks of the same world.
        places: Placements on it, checked already.

    Bytes sent per rank: those of the parts of its block that others get. Where the
    meshes have unlike ranks, one byte more: whether anyone wants a gradient.
    """
    spec = x._spec
    goal = spec_of(mesh, places, spec.shape, spec.world)
    union = tuple(sorted({*spec.mesh.ranks, *mesh.ranks}))
    if spec.world.rank not in union:
        return typed(plain(x).new_empty(goal.local_shape), goal)
    comm = communicator_of(union, "meshes", mesh.device_type)
    start = spec.replace(_blocks(spec))
    end = goal.replace(_whole_addends(places))
    local = plain(redistributed(x, start))
    unlike = {*spec.mesh.ranks} != {*mesh.ranks}
    if unlike and _recorded_by_any(local, comm):
        # Placeholders may come without a history; their backward must come by here.
        local = local if local.requires_grad else local.detach().requires_grad_()
    boxes = [_box(start, rank) for rank in union]
    targets = [_box(end, rank) for rank in union]
    itemsize = local.element_size()
    large = local_elements(start.mesh, start.placements, start.shape) * itemsize > LARGE
    owners = [_owners(start, union, position) for position in range(len(union))]
    plan = Exchange.between(boxes, targets, comm, large, owners)
    plan = dataclasses.replace(plan, agree=unlike)
    with NoTF():
        out = exchange(local.reshape(plan.before), plan)
        if end.coordinate is None:
            return typed(alias(out), goal)
        out = transition(end, goal, itemsize)(out.reshape(end.local_shape))
        if type(out) is not torch.Tensor or out is local:
            out = alias(out)
    return typed(out, goal)


def _recorded_by_any(local: torch.Tensor, comm: Communicator) -> bool:
    """Whether autograd records the move on any rank; all ranks learn the same."""
    flows = local.is_floating_point() or local.is_complex()
    if not torch.is_grad_enabled() or not flows:
        return False
    flag = torch.tensor([local.requires_grad], dtype=torch.uint8, device=local.device)
    return bool(comm.all_reduce(flag, "max").item())


def _blocks(spec: Spec) -> Placements:
    """Placements of blocks: addends are reduced into pieces where a dim is long enough."""
    whole = spec.mesh.size()
    dims = [d for d, n in enumerate(spec.shape) if n >= whole]
    found: list[Placement] = []
    for p in spec.placements:
        if isinstance(p, Partial):
            p = Shard(dims[0]) if dims else Replicate()
        elif isinstance(p, CustomPlacement):
            p = Replicate()
        found.append(p)
    return tuple(found)


def _whole_addends(places: Placements) -> Placements:
    """Placements to arrive in: addends and user-defined ones come from the whole."""
    return tuple(
        Replicate() if isinstance(p, (Partial, CustomPlacement)) else p for p in places
    )


def _box(spec: Spec, rank: int) -> Box:
    """The block of a rank, an empty one outside of the mesh."""
    at = spec.mesh.coordinate_of(rank)
    if at is None:
        return tuple((0, 0) for _ in spec.shape) or ((0, 0),)
    if not spec.shape:  # one element stands for a tensor of no dims
        return ((0, 1),)
    return box_of(spec.mesh, spec.placements, spec.shape, at)


def _owners(spec: Spec, union: tuple[int, ...], position: int) -> list[int]:
    """Positions of the ranks that one rank reads from: one copy of each block."""
    mesh = spec.mesh
    mine = mesh.coordinate_of(union[position])
    copies = [a for a, p in enumerate(spec.placements) if isinstance(p, Replicate)]
    wanted = {
        a: mine[a] if mine is not None else position % mesh.shape[a] for a in copies
    }
    found = []
    for i, rank in enumerate(union):
        at = mesh.coordinate_of(rank)
        if at is not None and all(at[a] == c for a, c in wanted.items()):
            found.append(i)
    assert found, f"every block of {show(spec.placements)} has an owner"
    return found
