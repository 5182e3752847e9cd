"""``parallelize_module``: lay a module out over a mesh by a plan."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from dtensor.mesh.ambient import mesh_or_ambient
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.styles.crossing import CROSSING
from dtensor.styles.draft import Draft
from dtensor.styles.held import held_in
from dtensor.styles.plan import Plan, bound, flatten_plan, is_plan, match_plan


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | Plan | None = None,
    parallelize_plan: Plan | None = None,
    *,
    mesh_dim: str | int | None = None,
    strict: bool = True,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Lay out a module: the planned parts as their styles say, the rest replicated.

    Every parameter and buffer becomes a DTensor on the whole mesh; along axes that no
    style binds to it is replicated. Frozen parameters stay frozen, tied ones stay one
    parameter. Every rank of the mesh must call, with the same plan.

    Args:
        module: The module; it is changed in place.
        device_mesh: The mesh; the ambient one by default. The plan may stand here. On a
            mesh of several axes a style binds to the axis that it names, else to
            ``mesh_dim``, else to the axis "tp".
        parallelize_plan: A style for the module itself, or a dict from names of
            submodules to styles; see ``styles/plan.py``.
        mesh_dim: Axis of the styles that name none.
        strict: A name that matches no module is an error, otherwise a warning.
        src_data_rank: Position in the mesh of the rank whose values are laid out.
            None: the ranks hold the same values already and nothing is sent.

    Returns:
        ``module``.

    Raises:
        ValueError: No mesh, no axis to bind to, a name that matches nothing, a module
            that is laid out already, tied parameters with different layouts.
        TypeError: A style that has no layout for the module it is given.

    Bytes sent per rank: at most those of the parameters and buffers (broadcasts).

    Example:
        >>> from dtensor.collectives.simulate import simulate
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> from dtensor.styles.tensor_parallel import Colwise, Rowwise
        >>> def program():
        ...     net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        ...     with init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)):
        ...         parallelize_module(net, {"0": Colwise, "2": Rowwise})
        ...     return net[0].weight.placements, net[2].weight.placements
        >>> simulate(program, ranks=2)[0]
        ((Shard(dim=0),), (Shard(dim=1),))
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"parallelize_module: not a module, got {type(module).__name__}, expected "
            f"an nn.Module. Call parallelize_module(module, mesh, plan)."
        )
    if is_plan(device_mesh):
        if parallelize_plan is not None:
            raise TypeError(
                f"parallelize_module: two plans, got {device_mesh!r} and "
                f"{parallelize_plan!r}, expected one. Call parallelize_module(module, "
                f"mesh, plan)."
            )
        device_mesh, parallelize_plan = None, device_mesh
    if parallelize_plan is None:
        crossing = module.__dict__.get(CROSSING)
        named = f" {crossing.name!r}" if crossing is not None else ""
        warnings.warn(
            f"parallelize_module: no plan was given, {type(module).__name__}{named} is "
            f"left as it is. Pass a style or a dict of names to styles.",
            stacklevel=2,
        )
        return module
    mesh = mesh_or_ambient("parallelize_module", device_mesh)  # type: ignore[arg-type]
    entries = flatten_plan(parallelize_plan)
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    draft = Draft(module, mesh)
    for name, given in match_plan(entries, names, strict).items():
        for key, style, axis in bound(given, name, mesh, mesh_dim):
            draft.bind(name, key, style, axis)
        if all(style is None for _, style in given):
            kind = type(module.get_submodule(name)).__name__
            warnings.warn(
                f"parallelize_module: no plan was given for {name!r} ({kind}), it is "
                f"replicated as all that has no style. Name a style, or leave the name "
                f"out of the plan.",
                stacklevel=2,
            )
    draft.check_ties()
    draft.commit(draft.made(src_data_rank))
    return module


def layout_of(module: nn.Module) -> dict[str, Any]:
    """Placements of all parameters and buffers by name; None for plain ones."""
    return {
        held.full: getattr(held.tensor, "placements", None) for held in held_in(module)
    }
