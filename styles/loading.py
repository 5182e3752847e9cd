"""State of laid-out modules: in from whole tensors, out as whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dtensor.mesh.world import current_world
from dtensor.tensor import DTensor, distribute_tensor

WATCHED = "_dtensor_loading"


def watch_loading(module: nn.Module) -> None:
    """Let ``load_state_dict`` keep the layout of the tensors that a module holds."""
    if WATCHED not in module.__dict__:
        module.__dict__[WATCHED] = True
        module.register_load_state_dict_pre_hook(_fit)  # type: ignore[no-untyped-call]


def _fit(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    *_: Any,
) -> None:
    """Cut what is about to be loaded, where ``copy_`` would not do it.

    With ``assign=True`` torch puts the loaded tensor itself in the module's table: it
    becomes a shard first. Without, torch copies into the tensor that is there, and
    what is on meta gets memory first.
    """
    assign = local_metadata.get("assign_to_params_buffers", False)
    tables: tuple[Any, ...] = (module._parameters, module._buffers)
    for table in tables:
        for name, held in table.items():
            value = state_dict.get(prefix + name)
            if not isinstance(held, DTensor) or not isinstance(value, Tensor):
                continue
            if value.shape != held.shape:  # torch reports it, with both shapes
                continue
            if assign:
                state_dict[prefix + name] = _once(held, "_dtensor_assigned", value)
            elif held.is_meta and not value.is_meta:
                table[name] = _once(held, "_dtensor_filled", value)


def _once(held: DTensor, mark: str, value: Tensor) -> Tensor:
    """The successor of ``held``; tied places get the same one."""
    found: Tensor | None = held.__dict__.get(mark)
    if found is not None:
        return found
    with torch.no_grad():
        if mark == "_dtensor_filled":
            new: Tensor = torch.empty_like(held, device=value.device)
        elif isinstance(value, DTensor):
            new = value.redistribute(held.device_mesh, held.placements).detach()
        else:
            new = distribute_tensor(
                value.detach(), held.device_mesh, held.placements, src_data_rank=None
            )
    if isinstance(held, nn.Parameter):
        new = nn.Parameter(new, requires_grad=held.requires_grad)
    held.__dict__[mark] = new
    return new


def full_state_dict(module: nn.Module, rank0_only: bool = True) -> dict[str, Any]:
    """The state of a laid-out module as whole plain tensors, as if on one rank.

    Every rank of the mesh must call. ``load_state_dict`` takes it back, in a module
    laid out in any way on any mesh as well as in a plain one.

    Args:
        module: The module.
        rank0_only: Only the first rank of the mesh gets it; the others get an empty
            dict, and hold one whole tensor at a time.

    Returns:
        Copies by name; tied tensors stay one tensor.

    Bytes sent per rank: those of the sharded tensors that it holds, to each other
    rank.

    Example:
        >>> from dtensor.collectives.simulate import simulate
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> from dtensor.styles.parallelize import parallelize_module
        >>> from dtensor.styles.tensor_parallel import Colwise
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     linear = parallelize_module(nn.Linear(4, 6), mesh, Colwise)
        ...     state = full_state_dict(linear)
        ...     return {name: tuple(x.shape) for name, x in state.items()}
        >>> simulate(program, ranks=2)
        [{'weight': (6, 4), 'bias': (6,)}, {}]
    """
    state = module.state_dict(keep_vars=True)
    typed = [x for x in state.values() if isinstance(x, DTensor)]
    ranks = typed[0].device_mesh.ranks if typed else (current_world().rank,)
    rank = current_world().rank
    kept = rank == ranks[0] if rank0_only else rank in ranks
    whole: dict[str, Any] = {}
    done: dict[int, Any] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            done[id(value)] = value
        elif id(value) not in done:
            done[id(value)] = _whole(value, kept)
        if kept:
            whole[name] = done[id(value)]
    return whole


@torch.no_grad()
def _whole(value: Tensor, kept: bool) -> Tensor | None:
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        pairs = zip(value.placements, mesh.shape, strict=True)
        if any(n > 1 and not p.is_replicate() for p, n in pairs):
            value = value.full_tensor()  # a tensor of its own
            return value.detach() if kept else None
        value = value.to_local()
    return value.detach().clone() if kept else None
