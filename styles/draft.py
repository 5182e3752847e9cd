"""What ``parallelize_module`` is going to do to a module, before it does it.

In three steps, so that a failure leaves the module as it was: ask the styles and check
what they say; make all new tensors; put them and the hooks in place.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dtensor.errors import ShardingError
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Placement, Replicate, Shard, placements_of, show
from dtensor.styles.bridge import Bridge
from dtensor.styles.crossing import AROUND, BRIDGE, CROSSING, Crossing, takes_name
from dtensor.styles.family import FAMILY, Family
from dtensor.styles.heads import check_projection
from dtensor.styles.held import (
    Held,
    check_weights,
    held_in,
    laid_out,
    moved,
    parametrizations_of,
)
from dtensor.styles.lending import bind_lendings, check_lendings
from dtensor.styles.loading import watch_loading
from dtensor.styles.style import Layout, ParallelStyle
from dtensor.tensor import DTensor

WHAT = "parallelize_module"
Rows = dict[int, tuple[str, ParallelStyle, Layout]]


class Draft:
    """The layouts of a call by module and axis, and what they want of each tensor."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        check_weights(WHAT, module)
        self.module, self.mesh = module, mesh
        self.paths = {id(m): path for path, m in module.named_modules()}
        self.held = held_in(module)
        self.layouts: dict[int, Rows] = {}
        self.modules: dict[int, nn.Module] = {}
        # Whose call uses what a module holds: the originals of a parametrized weight
        # belong to the module that has the weight.
        self.users: dict[int, nn.Module] = {id(m): m for m in module.modules()}
        for inner in module.modules():
            self.users.update((id(m), inner) for m in parametrizations_of(inner))
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
                f"{WHAT}: {shown!r} is laid out already on another mesh, "
                f"got {self.mesh!r}, expected {before.mesh!r}. Lay a module out once."
            )
        if before is not None and axis in before.layouts:
            raise ValueError(
                f"{WHAT}: {shown!r} is laid out already along axis "
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
                f"{WHAT}: two styles for {shown!r} along axis {label!r}, "
                f"got {other!r} by {other_key!r} and {style!r} by {key!r}, expected "
                f"one. Make the names in the plan more exact."
            )
        layout = style.layout_over(module, self.mesh.shape[axis])
        if not isinstance(layout, Layout):
            raise TypeError(
                f"{WHAT}: {style!r}.layout must give a Layout, got "
                f"{layout!r} for {shown!r}. Return Layout({{'weight': Shard(0)}}, ...)."
            )
        for keyword in layout.keywords:
            if not takes_name(module, keyword):
                raise ValueError(
                    f"{WHAT}: {style!r} describes an input that {shown!r} does not "
                    f"take, got {keyword!r}, expected a parameter of its forward. Mend "
                    f"the name in input_kwarg_layouts."
                )
        check_lendings(WHAT, shown, module, layout.lent)
        parent = self.module.get_submodule(name.rpartition(".")[0])
        check_projection(shown, parent, module, layout, self.mesh.shape[axis])
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
        if parametrize.is_parametrized(owner, name):
            for original, its in _originals(owner, name, placement):
                self._want(owner, shown, original, its, style, axis)
            return
        table = owner._parameters if name in owner._parameters else owner._buffers
        if name not in table:
            has = [n for n, _ in module.named_parameters(remove_duplicate=False)]
            raise ValueError(
                f"{WHAT}: {style!r} names a parameter that {shown!r} does "
                f"not have, got {parameter!r}, expected one of {has}. Mend its layout."
            )
        tensor = table[name]
        if tensor is None:
            return
        full = ".".join(p for p in (self.paths[id(module)], parameter) if p)
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"{WHAT}: {full!r} has no shape yet. Run the module once "
                f"on an example before laying it out."
            )
        if isinstance(placement, Shard):
            try:
                (placement,) = placements_of(repr(style), placement, 1, tensor.ndim)
            except ShardingError as error:
                raise ShardingError(f"{WHAT}: {full!r}: {error}") from None
        asked = f"{placement} for {full!r} by {style!r}"
        wants = self.wanted.setdefault(id(tensor), {})
        if axis in wants and wants[axis][0] != placement:
            raise ValueError(
                f"{WHAT}: tied parameters must lie alike, got "
                f"{wants[axis][1]} and {asked} on axis {self.mesh.axis_name(axis)!r}. "
                f"Choose styles with one placement, or untie the parameters first."
            )
        wants[axis] = placement, asked

    def _layouts_of(self, module: nn.Module) -> list[Layout]:
        """Layouts of a module from this call and from earlier ones."""
        before: Crossing | None = module.__dict__.get(CROSSING)
        rows = [layout for *_, layout in self.layouts.get(id(module), {}).values()]
        return rows if before is None else [*rows, *before.layouts.values()]

    def bridged(self) -> list[nn.Module]:
        """Modules that get their parameters lent as plain tensors."""
        plain, typed = False, set()
        for module in self.module.modules():
            for layout in self._layouts_of(module):
                plain = plain or layout.plain or layout.around is not None
                if layout.typed_inside:
                    typed.add(id(module))
                for parameter in layout.parameters:
                    typed.add(id(module.get_submodule(parameter.rpartition(".")[0])))
        if not plain:
            return []
        users = {id(m): m for m in (self.users[id(held.owner)] for held in self.held)}
        return [user for key, user in users.items() if key not in typed]

    def check_ties(self) -> None:
        """A module that runs on plain copies cannot hold a sharded tensor."""
        bridged = {id(m) for m in self.bridged()}
        for held in self.held:
            user = self.users[id(held.owner)]
            if id(user) not in bridged:
                continue
            if isinstance(user, nn.MultiheadAttention) and user is not held.owner:
                continue  # its output projection is gathered for the call
            cut = [
                text
                for place, text in self.wanted.get(id(held.tensor), {}).values()
                if not isinstance(place, Replicate)
            ]
            if isinstance(held.tensor, DTensor):
                if not all(p.is_replicate() for p in held.tensor.placements):
                    cut.append(f"it lies {show(held.tensor.placements)} already")
            if cut:
                raise ValueError(
                    f"{WHAT}: {held.full!r} is tied to a parameter that "
                    f"is cut ({' and '.join(cut)}), but its module has no style and "
                    f"would run on a piece. Give that module a style with that placement."
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
                new[id(old)] = self._moved(held, old, wants)
                continue
            places = [
                wants[axis][0] if axis in wants else Replicate()
                for axis in range(self.mesh.ndim)
            ]
            new[id(old)] = laid_out(WHAT, held.full, old, self.mesh, places, src)
        return new

    def _moved(
        self, held: Held, old: DTensor, wants: dict[int, tuple[Placement, str]]
    ) -> Tensor:
        """A tensor that is laid out already, cut along more axes."""
        if old.device_mesh is not self.mesh:
            raise ValueError(
                f"{WHAT}: {held.full!r} lies on another mesh, got "
                f"{self.mesh!r}, expected {old.device_mesh!r}. Lay a module out once, "
                f"on the mesh that has all its axes."
            )
        places = list(old.placements)
        for axis, (placement, asked) in wants.items():
            if places[axis] != placement and not places[axis].is_replicate():
                raise ValueError(
                    f"{WHAT}: {held.full!r} is laid out already, as "
                    f"{show(old.placements)} on {self.mesh!r}, got {asked}. Apply one "
                    f"plan, once."
                )
            places[axis] = placement
        return moved(WHAT, held.full, old, places)

    # ---- third step: put everything in place -------------------------------------
    def commit(self, new: dict[int, Tensor]) -> None:
        """Replace the tensors and set the hooks; nothing here can fail."""
        bridges = self.bridged()
        for held in self.held:
            if id(held.tensor) in new:
                held.put(new[id(held.tensor)])
                watch_loading(held.owner)
        for key, rows in self.layouts.items():
            module = self.modules[key]
            crossing: Crossing | None = module.__dict__.get(CROSSING)
            if crossing is None:
                name = self.paths[key] or type(module).__name__
                crossing = Crossing(name, self.mesh)
                crossing.install(module)
            for axis, (_, style, layout) in rows.items():
                crossing.bind(axis, repr(style), layout)
                bind_lendings(module, axis, layout.lent)
                if layout.around is not None:
                    for inner in module.modules():
                        around = dict(inner.__dict__.get(AROUND, {}))
                        inner.__dict__[AROUND] = around | {axis: layout.around}
            # A bridge comes after the crossing, if the module still needs one.
            bridge: Bridge | None = module.__dict__.get(BRIDGE)
            if bridge is not None:
                bridge.remove(module)
        for module in bridges:
            if BRIDGE not in module.__dict__:
                name = self.paths[id(module)] or type(module).__name__
                Bridge(name, self.mesh).install(module)
        self._make_families()

    def _make_families(self) -> None:
        for parent in self.module.modules():
            crossings = [m.__dict__.get(CROSSING) for m in parent.children()]
            found = [x for x in crossings if x is not None and x.takes_inputs]
            if len(found) < 2:
                continue
            family: Family | None = parent.__dict__.get(FAMILY)
            if family is None:
                family = Family()
                family.install(parent)
            for crossing in found:
                crossing.family = family


def _originals(
    module: nn.Module, name: str, placement: Placement
) -> Iterator[tuple[str, Placement]]:
    """The tensors that a parametrized one is computed from, with their placements.

    They lie as it does, as far as they are shaped as it is. (Whatever their layout,
    what is computed from them is a DTensor of the right value.)
    """
    held = module.parametrizations[name]  # type: ignore[index]
    assert isinstance(held, nn.Module)
    tensors = {
        n: t
        for table in (held._parameters, held._buffers)
        for n, t in table.items()
        if t is not None
    }
    ndim = max((t.ndim for t in tensors.values()), default=0)
    for original, tensor in tensors.items():
        path = f"parametrizations.{name}.{original}"
        place = placement
        if isinstance(place, Shard):
            dim = place.dim + ndim if place.dim < 0 else place.dim
            fits = tensor.ndim == ndim and 0 <= dim < ndim and tensor.shape[dim] > 1
            place = Shard(dim) if fits else Replicate()
        yield path, place
