"""``parallelize_module``: lay a module out over a mesh by a plan.

In three steps, so that a failure leaves the module as it was: ask the styles and check
what they say; make all new tensors; put them and the hooks in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dtensor.errors import ShardingError
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Placement, Replicate, Shard, placements_of, show
from dtensor.styles.crossing import AROUND, BRIDGE, CROSSING, Bridge, Crossing, Family
from dtensor.styles.plan import Plan, axis_of, flatten_plan, is_plan, match_plan
from dtensor.styles.style import Layout, ParallelStyle
from dtensor.tensor import DTensor, distribute_tensor, mesh_or_ambient

FAMILY = "_dtensor_family"


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
        device_mesh: The mesh; the ambient one by default. The plan may stand here.
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
        device_mesh, parallelize_plan = None, device_mesh  # type: ignore[assignment]
    if parallelize_plan is None:
        warnings.warn(
            f"parallelize_module: no plan was given, {type(module).__name__} is left "
            f"as it is. Pass a style or a dict of names to styles.",
            stacklevel=2,
        )
        return module
    mesh = mesh_or_ambient("parallelize_module", device_mesh)
    entries = flatten_plan(parallelize_plan)
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    draft = _Draft(module, mesh)
    for name, given in match_plan(entries, names, strict).items():
        for key, style in given:
            draft.bind(name, key, style, axis_of(style, mesh, mesh_dim))
    draft.check_ties()
    draft.commit(draft.made(src_data_rank))
    return module


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor in the place where a module holds it."""

    owner: nn.Module
    table: str
    name: str
    full: str
    tensor: Tensor


def _held(module: nn.Module) -> Iterator[_Held]:
    for path, owner in module.named_modules():
        for table in ("_parameters", "_buffers"):
            for name, tensor in getattr(owner, table).items():
                if tensor is not None:
                    full = f"{path}.{name}" if path else name
                    yield _Held(owner, table, name, full, tensor)


class _Draft:
    """What a call is going to do to a module."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.module, self.mesh = module, mesh
        self.paths = {id(m): path for path, m in module.named_modules()}
        self.held = list(_held(module))
        self.layouts: dict[int, dict[int, tuple[str, ParallelStyle, Layout]]] = {}
        self.modules: dict[int, nn.Module] = {}
        # By tensor, then axis: the placement, and who asked for it.
        self.wanted: dict[int, dict[int, tuple[Placement, str]]] = {}

    # ---- first step: ask and check ---------------------------------------------
    def bind(self, name: str, key: str, style: ParallelStyle, axis: int) -> None:
        """Note what one style says of one module."""
        module = self.module.get_submodule(name)
        shown, label = name or type(module).__name__, self.mesh.axis_name(axis)
        before: Crossing | None = module.__dict__.get(CROSSING)
        if before is not None and before.mesh is not self.mesh:
            raise ValueError(
                f"parallelize_module: {shown!r} is laid out already on another mesh, "
                f"got {self.mesh!r}, expected {before.mesh!r}. Lay a module out once."
            )
        if before is not None and axis in before.layouts:
            raise ValueError(
                f"parallelize_module: {shown!r} is laid out already along axis "
                f"{label!r}, by {before.styles[axis]}, got {style!r} as well. Apply a "
                f"plan once, or bind this style to another axis."
            )
        planned = self.layouts.setdefault(id(module), {})
        self.modules[id(module)] = module
        if axis in planned:
            other_key, other, _ = planned[axis]
            if repr(other) == repr(style):
                return
            raise ValueError(
                f"parallelize_module: two styles for {shown!r} along axis {label!r}, "
                f"got {other!r} by {other_key!r} and {style!r} by {key!r}, expected "
                f"one. Make the names in the plan more exact."
            )
        layout = style.layout(module)
        if not isinstance(layout, Layout):
            raise TypeError(
                f"parallelize_module: {style!r}.layout must give a Layout, got "
                f"{layout!r} for {shown!r}. Return Layout({{'weight': Shard(0)}}, ...)."
            )
        if layout.parameters and parametrize.is_parametrized(module):
            raise ValueError(
                f"parallelize_module: {shown!r} is parametrized, so {style!r} finds no "
                f"weight of its own to cut. Call torch.nn.utils.parametrize."
                f"remove_parametrizations first, or leave it out of the plan."
            )
        planned[axis] = key, style, layout
        for parameter, placement in layout.parameters.items():
            self._want(module, shown, parameter, placement, style, axis)

    def _want(
        self,
        module: nn.Module,
        shown: str,
        parameter: str,
        placement: Placement,
        style: ParallelStyle,
        axis: int,
    ) -> None:
        path, _, name = parameter.rpartition(".")
        owner = module.get_submodule(path)
        table = owner._parameters if name in owner._parameters else owner._buffers
        if name not in table:
            has = [n for n, _ in module.named_parameters(remove_duplicate=False)]
            raise ValueError(
                f"parallelize_module: {style!r} names a parameter that {shown!r} does "
                f"not have, got {parameter!r}, expected one of {has}. Mend its layout."
            )
        tensor = table[name]
        if tensor is None:
            return
        full = ".".join(p for p in (self.paths[id(module)], parameter) if p)
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"parallelize_module: {full!r} has no shape yet. Run the module once "
                f"on an example before laying it out."
            )
        if isinstance(placement, Shard):
            try:
                (placement,) = placements_of(repr(style), placement, 1, tensor.ndim)
            except ShardingError as error:
                raise ShardingError(f"parallelize_module: {full!r}: {error}") from None
        asked = f"{placement} for {full!r} by {style!r}"
        wants = self.wanted.setdefault(id(tensor), {})
        if axis in wants and wants[axis][0] != placement:
            raise ValueError(
                f"parallelize_module: tied parameters must lie alike, got "
                f"{wants[axis][1]} and {asked} on axis {self.mesh.axis_name(axis)!r}. "
                f"Choose styles that agree, or untie the parameters first."
            )
        wants[axis] = placement, asked

    @property
    def plain_activations(self) -> bool:
        """Whether some style, of this call or an earlier one, gives plain tensors."""
        new = (row[2].local for rows in self.layouts.values() for row in rows.values())
        old = (m.__dict__.get(CROSSING) for m in self.module.modules())
        return any(new) or any(x is not None and x.local for x in old)

    def bridged(self) -> list[nn.Module]:
        """Modules that get their parameters lent as plain tensors."""
        if not self.plain_activations:
            return []
        found = {}
        for held in self.held:
            owner = held.owner
            rows = [r[2] for r in self.layouts.get(id(owner), {}).values()]
            before: Crossing | None = owner.__dict__.get(CROSSING)
            rows += [] if before is None else before.layouts.values()
            styled = any(r.parameters or r.inputs or r.keywords for r in rows)
            if not styled and BRIDGE not in owner.__dict__:
                found[id(owner)] = owner
        return list(found.values())

    def check_ties(self) -> None:
        """A module that runs on plain copies cannot hold a sharded tensor."""
        owners = {id(m) for m in self.bridged()}
        for held in self.held:
            if id(held.owner) in owners and id(held.tensor) in self.wanted:
                cut = self.wanted[id(held.tensor)].values()
                if any(not isinstance(p, Replicate) for p, _ in cut):
                    asked = " and ".join(text for _, text in cut)
                    raise ValueError(
                        f"parallelize_module: {held.full!r} is tied to a parameter that "
                        f"is cut ({asked}), but its module has no style and would run "
                        f"on a piece. Give that module a style that cuts it alike."
                    )

    # ---- second step: make the new tensors ---------------------------------------
    @torch.no_grad()
    def made(self, src: int | None) -> dict[int, Tensor]:
        """New tensors by the old ones' ids; the module is not touched."""
        new: dict[int, Tensor] = {}
        for held in self.held:
            old = held.tensor
            if id(old) in new or nn.parameter.is_lazy(old):
                continue
            wants = self.wanted.get(id(old), {})
            if isinstance(old, DTensor):
                if wants or old.device_mesh is self.mesh:
                    new[id(old)] = self._moved(held, old, wants)
                continue
            places = [
                wants[axis][0] if axis in wants else Replicate()
                for axis in range(self.mesh.ndim)
            ]
            try:
                out = distribute_tensor(old, self.mesh, places, src_data_rank=src)
                if old.grad is not None:
                    out.grad = distribute_tensor(
                        old.grad, self.mesh, places, src_data_rank=src
                    )
            except ShardingError as error:
                raise ShardingError(
                    f"parallelize_module: {held.full!r}: {error}"
                ) from error
            _keep_attributes(old, out)
            new[id(old)] = out
        return new

    def _moved(
        self, held: _Held, old: DTensor, wants: dict[int, tuple[Placement, str]]
    ) -> Tensor:
        """A tensor that is laid out already, cut along more axes."""
        if old.device_mesh is not self.mesh:
            raise ValueError(
                f"parallelize_module: {held.full!r} lies on another mesh, got "
                f"{self.mesh!r}, expected {old.device_mesh!r}. Lay a module out once, "
                f"on the mesh that has all its axes."
            )
        places = list(old.placements)
        for axis, (placement, asked) in wants.items():
            if places[axis] != placement and not places[axis].is_replicate():
                raise ValueError(
                    f"parallelize_module: {held.full!r} is laid out already, as "
                    f"{show(old.placements)} on {self.mesh!r}, got {asked}. Apply one "
                    f"plan, once."
                )
            places[axis] = placement
        if tuple(places) == old.placements:
            return old
        out: Tensor = old.detach().redistribute(places).clone()
        if isinstance(old, nn.Parameter):
            out = nn.Parameter(out, requires_grad=old.requires_grad)
        else:
            out.requires_grad_(old.requires_grad)
        if isinstance(old.grad, DTensor):
            out.grad = old.grad.redistribute(places).clone()
        return out

    # ---- third step: put everything in place -------------------------------------
    def commit(self, new: dict[int, Tensor]) -> None:
        """Replace the tensors and set the hooks; nothing here can fail."""
        bridges = self.bridged()
        for held in self.held:
            if id(held.tensor) in new:
                getattr(held.owner, held.table)[held.name] = new[id(held.tensor)]
        for key, rows in self.layouts.items():
            module = self.modules[key]
            crossing: Crossing | None = module.__dict__.get(CROSSING)
            if crossing is None:
                name = self.paths[key] or type(module).__name__
                crossing = Crossing(name, self.mesh)
                crossing.install(module)
            for axis, (_, style, layout) in rows.items():
                crossing.bind(axis, repr(style), layout)
                if layout.around is not None:
                    for inner in module.modules():
                        around = dict(inner.__dict__.get(AROUND, {}))
                        inner.__dict__[AROUND] = around | {axis: layout.around}
            bridge: Bridge | None = module.__dict__.get(BRIDGE)
            if bridge is not None and crossing.typed_inputs:
                bridge.active = False
        for module in bridges:
            Bridge(self.mesh).install(module)
        self._make_families()

    def _make_families(self) -> None:
        for parent in self.module.modules():
            crossings = [m.__dict__.get(CROSSING) for m in parent.children()]
            found = [x for x in crossings if x is not None and x.typed_inputs]
            if len(found) < 2:
                continue
            family: Family | None = parent.__dict__.get(FAMILY)
            if family is None:
                family = parent.__dict__[FAMILY] = Family()
                parent.register_forward_pre_hook(family.open)
                parent.register_forward_hook(family.close, always_call=True)
            for crossing in found:
                crossing.family = family


def _keep_attributes(old: Tensor, new: Tensor) -> None:
    """Marks that a user has put on a parameter go over to the new one."""
    for name, value in old.__dict__.items():
        if name not in new.__dict__:
            new.__dict__[name] = value


def layout_of(module: nn.Module) -> dict[str, Any]:
    """Placements of all parameters and buffers by name; None for plain ones."""
    return {
        held.full: getattr(held.tensor, "placements", None) for held in _held(module)
    }
