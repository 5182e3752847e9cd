"""``fully_shard``: parameters in pieces over the ranks that share a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dtensor.custom_placement import CustomPlacement
from dtensor.mesh.ambient import mesh_or_ambient
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Placement, Replicate, Shard, placed, show
from dtensor.styles.crossing import AROUND
from dtensor.styles.held import (
    Held,
    check_weights,
    held_in,
    laid_out,
    lazy_names,
    moved,
)
from dtensor.styles.lent import Slot
from dtensor.styles.loading import watch_loading
from dtensor.styles.precision import MixedPrecision
from dtensor.styles.unit import UNIT, Unit
from dtensor.tensor import DTensor

WHAT = "fully_shard"


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    mesh_dim: str | int | Sequence[str | int] = "dp",
    reshard_after_forward: bool = True,
    mixed_precision: MixedPrecision | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Cut a module's parameters over an axis; each rank computes with all of them.

    Call it on the blocks of a model, then on the model: each call makes one unit of
    the parameters that no earlier call inside took. A parameter becomes a DTensor
    ``Shard(0)`` along the axis, inside of the cuts along other axes that
    ``parallelize_module`` gave it before. (One whose dim 0 is cut by ``Sections`` is cut
    along dim 1; one that has no other dim stays whole, and its gradient is reduced in
    the leaf bucket.) When the unit is called its parameters are
    gathered, and let go of afterwards; its backward gathers them once more and gives
    each rank its piece of the gradient (ZeRO stage 3; Rajbhandari et al.,
    arXiv:1910.02054, section 5; Zhao et al., arXiv:2304.11277, section 3).

    The batch is split over the axis. DTensors say so themselves. Plain tensors are
    taken for pieces of it, as under ``DataParallel``: gradients are sums over the
    ranks, and a rank that averages its loss over its own piece calls
    ``(loss / mesh.size("dp")).backward()``.

    With N ranks, P bytes of parameters, B bytes of those of the largest unit (as they
    are gathered: halved in bfloat16):

    =========================  ==========================================================
    held, forward              P/N + those of the units that are open: B, and the
                               model's own
    held, backward             P/N + the same + gradients: P/N, and up to 2 B until they
                               are scattered
    while one is gathered      B more, for a unit of several parameters
    sent per unit              (N-1)/N its bytes, three times: one all-gather in forward,
                               one in backward, one reduce-scatter
    =========================  ==========================================================

    Autograd keeps no gathered parameter, but it does keep what is computed from one: the
    casts of ``torch.autocast`` (``mixed_precision`` gathers in the other dtype instead),
    or a normed weight. A unit that is called several times is gathered for each call. A
    checkpointed stretch of several units has all of them open at once in backward.

    ``no_grad_sync()`` leaves out the reduction along axes where the parameters are
    replicated. Along this one every backward reduces: to leave it out would be to hold
    whole gradients.

    Args:
        module: The module, laid out by ``parallelize_module`` already or plain; changed
            in place. Every rank of the mesh must call.
        mesh: The mesh; that of the parameters, or the ambient one, by default. The
            parameters are replicated along its other axes.
        mesh_dim: The axis; a mesh of one axis may call it what it likes. Several cut one
            inside the other, the first outermost.
        reshard_after_forward: Let go of the parameters after the forward. False keeps
            them until the unit's backward, and saves the second all-gather.
        mixed_precision: Dtypes to compute, reduce and hand on in.
        src_data_rank: As in ``parallelize_module``.

    Returns:
        ``module``, of the same class. Make the optimizer after the last call.

    Raises:
        ValueError: No mesh or axis, a module that is a unit already, a parameter that
            another call has taken or that is cut along the axis.

    Bytes sent per rank by the call itself: at most those of the parameters.

    Example:
        >>> from dtensor.collectives.simulate import simulate
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        ...     for layer in (net[0], net[2], net):
        ...         fully_shard(layer, mesh)
        ...     net(torch.ones(3, 4)).sum().backward()
        ...     weight = net[0].weight
        ...     return weight.to_local().shape, weight.grad.placements
        >>> simulate(program, ranks=2)[0]
        (torch.Size([3, 4]), (Shard(dim=0),))
    """
    _check_arguments(module, mixed_precision)
    held = _untaken(module)
    mesh = _mesh_for(held, mesh)
    axes = _axes(mesh, mesh_dim)
    check_weights(WHAT, module)
    for name in lazy_names(held):
        raise ValueError(
            f"{WHAT}: {name!r} has no shape yet. Run the module once on an example "
            "before laying it out."
        )
    new, dynamic = _made(held, mesh, axes, src_data_rank)
    slots: dict[int, Slot] = {}
    for one in held:
        key, parameter = id(one.tensor), one.table == "_parameters"
        place = (one.owner, one.table, one.name)
        if key in slots:
            slots[key].places.append(place)
        else:
            dim = _dim(one.tensor) if parameter else None
            slots[key] = Slot(one.full, [place], dim, key in dynamic)
    for one in held:
        old, successor = one.tensor, new[id(one.tensor)]
        if slots[id(old)].sharded:
            old.__dict__["_dtensor_taken"] = one.full
        elif successor is not old:  # units may share a buffer
            old.__dict__["_dtensor_became"] = successor
        one.put(successor)
        watch_loading(one.owner)
    for inner in module.modules():
        around = dict(inner.__dict__.get(AROUND, {}))
        inner.__dict__[AROUND] = {axis: Shard(0) for axis in axes} | around
    kind = type(module).__name__
    kept = list(slots.values())
    Unit(kind, axes, kept, reshard_after_forward, mixed_precision).install(module)
    return module


def _check_arguments(module: object, mixed_precision: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{WHAT}: not a module, got {type(module).__name__}, expected an nn.Module. "
            f"Call {WHAT} on each block of the model, then on the model."
        )
    if UNIT in module.__dict__:
        raise ValueError(
            f"{WHAT}: {type(module).__name__} is a unit already, got a second call. "
            "Call it once on each block, and once on the model."
        )
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(
            f"{WHAT}: {type(module).__name__} is never called, so nothing would gather "
            "its parameters. Call it on the modules inside."
        )
    if mixed_precision is not None and not isinstance(mixed_precision, MixedPrecision):
        raise TypeError(
            f"{WHAT}: mixed_precision is no MixedPrecision, got {mixed_precision!r}. "
            "Write mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)."
        )


def _untaken(module: nn.Module) -> list[Held]:
    """The tensors of a module that no unit inside has taken."""
    taken = {
        (id(owner), table, name)
        for inner in module.modules()
        if UNIT in inner.__dict__
        for slot in inner.__dict__[UNIT].slots
        for owner, table, name in slot.places
    }
    held = [
        one
        for one in held_in(module)
        if (id(one.owner), one.table, one.name) not in taken
    ]
    for one in held:
        other = one.tensor.__dict__.get("_dtensor_taken")
        if other is not None:
            raise ValueError(
                f"{WHAT}: {one.full!r} is tied to a parameter of another unit, got it "
                f"after that one had been taken (there {other!r}). Leave "
                "both to the call on a module that holds both: do not call it on the "
                "modules of tied parameters themselves."
            )
    return held


def _mesh_for(held: list[Held], mesh: DeviceMesh | None) -> DeviceMesh:
    found: dict[int, Held] = {}
    for one in held:
        if isinstance(one.tensor, DTensor):
            found.setdefault(id(one.tensor.device_mesh), one)
    first = next(iter(found.values()), None)
    if first is None:
        return mesh_or_ambient(WHAT, mesh)
    assert isinstance(first.tensor, DTensor)
    lies: DeviceMesh = first.tensor.device_mesh
    for one in found.values():
        assert isinstance(one.tensor, DTensor)
        if one is not first:
            raise ValueError(
                f"{WHAT}: the parameters of a unit lie on one mesh, got "
                f"{one.tensor.device_mesh!r} for {one.full!r} and {lies!r} for "
                f"{first.full!r}. Call it on each part by itself."
            )
    if mesh is not None and mesh is not lies and not _is_part(mesh, lies):
        raise ValueError(
            f"{WHAT}: {first.full!r} lies on another mesh, got {mesh!r}, expected "
            f"{lies!r}. Lay a module out once, on the mesh that has all its axes."
        )
    return lies


def _is_part(mesh: DeviceMesh, whole: DeviceMesh) -> bool:
    """Whether a mesh is ``whole["dp"]`` or the like."""
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= set(whole.mesh_dim_names or ()):
        return False
    return whole[tuple(names)] is mesh


def _axes(
    mesh: DeviceMesh, mesh_dim: str | int | Sequence[str | int]
) -> tuple[int, ...]:
    names = [mesh_dim] if isinstance(mesh_dim, (str, int)) else list(mesh_dim)
    if mesh.ndim == 1 and names == ["dp"]:
        return (0,)
    try:
        axes = tuple(mesh.axis(name) for name in names)
    except ValueError as error:
        raise ValueError(f"{WHAT}: the mesh has no such axis. {error}") from None
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(
            f"{WHAT}: mesh_dim names axes once each, got {mesh_dim!r}. Write for "
            'example mesh_dim="dp".'
        )
    return axes


def _dim(x: Tensor) -> int | None:
    """The dim to cut: the first that is not dealt out in a way of its own.

    None where there is none: then every rank of the axis has the parameter.
    """
    places = x.placements if isinstance(x, DTensor) else ()
    dealt = {p.along for p in places if isinstance(p, CustomPlacement)}
    if None in dealt:
        return None
    return next((d for d in range(x.ndim) if d not in dealt), None)


def _made(
    held: list[Held], mesh: DeviceMesh, axes: tuple[int, ...], src: int | None
) -> tuple[dict[int, Tensor], set[int]]:
    """The successors of all tensors by the old ones' ids; and which were plain."""
    new: dict[int, Tensor] = {}
    plain: set[int] = set()
    whole: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
    with torch.no_grad():
        for one in held:
            old = one.tensor
            if id(old) in new:
                continue
            dim = _dim(old) if one.table == "_parameters" else None
            if isinstance(old, DTensor):
                if dim is None:
                    new[id(old)] = old
                    continue
                for axis in axes:
                    if not old.placements[axis].is_replicate():
                        raise ValueError(
                            f"{WHAT}: {one.full!r} is laid out along axis "
                            f"{mesh.axis_name(axis)!r} already, got "
                            f"{show(old.placements)}, expected R there. Choose another "
                            "axis with mesh_dim=."
                        )
                places = placed(old.placements, axes, Shard(dim))
                new[id(old)] = moved(WHAT, one.full, old, places)
                continue
            plain.add(id(old))
            if "_dtensor_became" in old.__dict__:
                new[id(old)] = old.__dict__["_dtensor_became"]
                continue
            places = placed(whole, axes, Shard(dim)) if dim is not None else whole
            new[id(old)] = laid_out(WHAT, one.full, old, mesh, places, src)
    return new, plain


__all__ = ["fully_shard"]
