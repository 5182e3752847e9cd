"""What happens to tensors when a laid-out module is called.

``Crossing`` sits on a styled module: it gives plain inputs their type, brings them
where the module wants them, and types or frees what comes out. It is a pair of module
hooks, so the module's class, forward and signature stay as they are.

Plain tensors follow the convention of local values: what is alike on the ranks of an
axis is used alike by all of them, and each rank calls backward (``boundary.py``).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dtensor.boundary import ReplicateToLocal, ShardToLocal
from dtensor.collectives.conjugate import all_reduce_identity
from dtensor.errors import ShardingError
from dtensor.mesh.chunks import chunk_sizes
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Partial, Placement, Placements, Replicate, Shard
from dtensor.styles.family import Family
from dtensor.styles.style import Layout, Port
from dtensor.tensor import DTensor, local_of

# Names under which a module keeps what was said of it.
CROSSING, BRIDGE, AROUND = "_dtensor_crossing", "_dtensor_bridge", "_dtensor_around"
# Name under which a plain tensor says of which dims it is a piece.
PIECE = "_dtensor_piece"


def around_of(module: nn.Module) -> dict[int, Placement]:
    """What plain tensors in a module are, by axis, where that is not Replicate."""
    found: dict[int, Placement] = module.__dict__.get(AROUND, {})
    return found


class Crossing:
    """The hooks of one styled module.

    Args:
        name: What errors call the module.
        mesh: The mesh its parameters lie on.
    """

    def __init__(self, name: str, mesh: DeviceMesh) -> None:
        self.name = name
        self.mesh = mesh
        self.layouts: dict[int, Layout] = {}
        self.styles: dict[int, str] = {}
        self.family: Family | None = None
        self._positional: tuple[str, ...] = ()
        self._resolved: dict[Any, Any] = {}

    @property
    def takes_inputs(self) -> bool:
        """Whether a style says what comes in."""
        return any(layout.entries() for layout in self.layouts.values())

    def bind(self, axis: int, style: str, layout: Layout) -> None:
        """Add the layout along one more axis."""
        self.styles[axis], self.layouts[axis] = style, layout
        self._resolved.clear()

    def install(self, module: nn.Module) -> None:
        """Put the hooks on, last among the pre-hooks and first among the hooks."""
        module.__dict__[CROSSING] = self
        self._positional = positional_names(module)
        module.register_forward_pre_hook(self.enter, with_kwargs=True)
        module.register_forward_hook(self.leave, prepend=True)

    # ---- inputs ----------------------------------------------------------------
    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pre-hook: inputs in the wanted placements, plain where a style says so."""
        around = around_of(module)
        key = (len(args), *kwargs)
        found = self._resolved.get(key)
        if found is None:
            found = self._resolved[key] = self._resolve(len(args), kwargs)
        places, named = found

        def brought(x: Any, where: int | str) -> Any:
            ports = places.get(where)
            if ports is None:
                return x
            if isinstance(x, Tensor):
                return self._enter(x, ports, around)
            if where in named and _holds_tensors(x):
                return _in_each(x, lambda t: self._enter(t, ports, around))
            if where in named and x is not None:
                raise TypeError(
                    f"{self.name}: the style gives input {where!r} a placement, got "
                    f"{type(x).__name__}, expected a tensor. Give it None in the style."
                )
            return x

        new = tuple(brought(x, i) for i, x in enumerate(args))
        return new, {k: brought(x, k) for k, x in kwargs.items()}

    def _resolve(
        self, count: int, kwargs: dict[str, Any]
    ) -> tuple[dict[int | str, dict[int, Port]], set[int | str]]:
        """For calls of this form: ports by input and axis; inputs that have their own."""
        places: dict[int | str, dict[int, Port]] = {}
        named: set[int | str] = set()
        for axis, layout in self.layouts.items():
            ports: dict[int | str, Port | None] = {}
            if isinstance(layout.inputs, tuple):
                what = "positional inputs"
                self._check_count(what, axis, layout.inputs, count, kwargs)
                ports.update(enumerate(layout.inputs))
                named.update(i for i, port in ports.items() if port is not None)
            else:
                for where in (*range(count), *kwargs):
                    ports[where] = layout.inputs
            for name, port in layout.keywords.items():
                found = self._find(name, count, kwargs)
                if found is not None:
                    ports[found] = port
                    named.add(found)
            for where, one in ports.items():
                if one is not None:
                    places.setdefault(where, {})[axis] = one
        return places, named

    def _find(self, name: str, count: int, kwargs: dict[str, Any]) -> int | str | None:
        """Where an argument of this name is in a call, or None where it is left out."""
        if name in kwargs:
            return name
        if name in self._positional:
            index = self._positional.index(name)
            return index if index < count else None
        return None

    def _check_count(
        self,
        what: str,
        axis: int,
        ports: tuple[Any, ...],
        count: int,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        if len(ports) == count:
            return
        named = f" and the keyword inputs {sorted(kwargs)}" if kwargs else ""
        mend = (
            "Give the style one placement (or None) per tensor, and those of keyword "
            "inputs by name in input_kwarg_layouts."
        )
        raise ValueError(
            f"{self.name}: the style describes {len(ports)} {what} on axis "
            f"{self.mesh.axis_name(axis)!r}, got {count}{named}. {mend}"
        )

    def _enter(
        self, x: Tensor, ports: dict[int, Port], around: dict[int, Placement]
    ) -> Tensor:
        wanted = {axis: port.wanted for axis, port in ports.items()}
        local = any(port.local for port in ports.values())

        def make() -> Tensor:
            y = x if isinstance(x, DTensor) else self._typed(x, ports, around)
            return self._freed(y, wanted, around) if local else self._bring(y, wanted)

        if isinstance(x, DTensor):
            if x.device_mesh is not self.mesh:
                raise ShardingError(
                    f"{self.name}: the input lies on another mesh than the parameters, "
                    f"got {x!r}, expected {self.mesh!r}. Make the input on the mesh "
                    f"that the module was laid out on."
                )
            if not local and self._places(x, wanted) == x.placements:
                return x
        if self.family is None:
            return make()
        return self.family.once(x, (self.mesh, *ports.items(), *around.items()), make)

    def _typed(
        self, x: Tensor, ports: dict[int, Port], around: dict[int, Placement]
    ) -> DTensor:
        """A DTensor on this rank's plain tensor; the adjoint is Megatron's f."""
        places: list[Placement] = []
        shape, check = list(x.shape), False
        for axis in range(self.mesh.ndim):
            port = ports.get(axis)
            place = port.given if port is not None else around.get(axis)
            if place is None:
                place = Replicate()
            if isinstance(place, Shard):
                place = self._shard(place, x.ndim)
                parts = self.mesh.shape[axis]
                if port is not None and port.size is not None:
                    shape[place.dim] = port.size
                else:
                    shape[place.dim] *= parts
                    check = check or (port is not None and parts > 1)
            places.append(place)
        if self.mesh.coordinate is None:
            check = False
        return DTensor.from_local(
            x, self.mesh, places, run_check=check, shape=None if check else shape
        )

    def _shard(self, place: Shard, ndim: int) -> Shard:
        dim = place.dim + ndim if place.dim < 0 else place.dim
        if not 0 <= dim < ndim:
            raise ShardingError(
                f"{self.name}: {place} shards a dim that is not there, got a tensor of "
                f"{ndim} dims. Give the style a placement that fits the activations."
            )
        return Shard(dim)

    def _places(self, x: DTensor, wanted: dict[int, Placement | None]) -> Placements:
        """The placements of ``x`` with the wanted ones put in."""
        places = list(x.placements)
        for axis, place in wanted.items():
            if isinstance(place, Shard):
                place = self._shard(place, len(x.shape))
            if place is not None:
                places[axis] = place
        return tuple(places)

    def _bring(self, x: DTensor, wanted: dict[int, Placement | None]) -> DTensor:
        places = self._places(x, wanted)
        return x if places == x.placements else x.redistribute(places)

    # ---- outputs ---------------------------------------------------------------
    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Hook: outputs in the wanted placements, plain where a style says so."""
        output = self._left(module, output)
        parts = 1
        for axis, layout in self.layouts.items():
            parts *= self.mesh.shape[axis] if layout.average else 1
        return output if parts == 1 else averaged(output, parts)

    def _left(self, module: nn.Module, output: Any) -> Any:
        if isinstance(output, Mapping):
            return self._leave_mapping(output, module)
        many = isinstance(output, (tuple, list))
        given = list(output) if many else [output]
        for axis, layout in self.layouts.items():
            if isinstance(layout.outputs, tuple):
                self._check_count("outputs", axis, layout.outputs, len(given))
        new = [self._leave(x, i, module) for i, x in enumerate(given)]
        if not many:
            return new[0]
        if isinstance(output, list):
            return new
        if hasattr(output, "_fields"):
            return type(output)(*new)
        return tuple(new)

    def _leave_mapping(self, output: Mapping[str, Any], module: nn.Module) -> Any:
        """A dict of outputs, under one port for all."""
        if all(layout.outputs is None for layout in self.layouts.values()):
            return output
        for axis, layout in self.layouts.items():
            if isinstance(layout.outputs, tuple):
                self._check_count("outputs", axis, layout.outputs, len(output))
        new = copy.copy(output)
        for index, (key, x) in enumerate(output.items()):
            new[key] = self._leave(x, index, module)  # type: ignore[index]
        return new

    def _leave(self, x: Any, index: int, module: nn.Module) -> Any:
        ports: dict[int, Port] = {}
        for axis, layout in self.layouts.items():
            one = layout.outputs
            port = one[index] if isinstance(one, tuple) else one
            if port is not None:
                ports[axis] = port
        if not isinstance(x, Tensor) or not ports:
            return x
        around = around_of(module)
        if not isinstance(x, DTensor):
            if not any(port.given is not None for port in ports.values()):
                return x
            x = self._typed(x, ports, around)
        wanted = {axis: port.wanted for axis, port in ports.items()}
        if any(port.local for port in ports.values()):
            return self._freed(x, wanted, around)
        return self._bring(x, wanted)

    def _freed(
        self,
        x: DTensor,
        wanted: dict[int, Placement | None],
        around: dict[int, Placement],
    ) -> Tensor:
        """This rank's plain tensor; what all ranks shall hold alike is fused.

        On an axis where the result is wanted whole, a Partial passes Megatron's g and
        a Shard is gathered; the adjoints of both communicate nothing.
        """
        goal = self._places(x, wanted)
        # What is not fused is moved first, as a DTensor.
        first = tuple(
            p if isinstance(q, Replicate) and _fuses(x.placements, axis) else q
            for axis, (p, q) in enumerate(zip(x.placements, goal, strict=True))
        )
        if first != x.placements:
            x = x.redistribute(first)
        spec, y = x._spec, local_of(x)
        if spec.coordinate is None:
            return y
        lead, masked = True, False
        for axis, (p, q) in enumerate(zip(first, goal, strict=True)):
            parts = self.mesh.shape[axis]
            if not isinstance(q, Replicate) or parts == 1:
                continue
            if isinstance(p, Partial):
                y = all_reduce_identity(y, spec.comm(axis))
            elif isinstance(p, Shard):
                sizes = chunk_sizes(spec.block(p.dim, axis)[1], parts)
                y = ShardToLocal.apply(y, spec.comm(axis), p.dim, sizes)  # type: ignore[no-untyped-call]
            else:
                masked, lead = True, lead and spec.coordinate[axis] == 0
        if masked and torch.is_grad_enabled() and y.requires_grad:
            y = ReplicateToLocal.apply(y, lead)  # type: ignore[no-untyped-call]
        pieces = [
            f"{q} on axis {self.mesh.axis_name(axis)!r}"
            for axis, q in enumerate(goal)
            if isinstance(q, Shard) and self.mesh.shape[axis] > 1 and axis not in around
        ]
        if pieces:
            y.__dict__[PIECE] = ", ".join(pieces)
        return y


class Averaged(torch.autograd.Function):
    """The identity; the cotangent is divided by a number of ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int) -> Tensor:
        """A view of ``x``."""
        ctx.parts = parts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """One share of it."""
        return grads[0] / ctx.parts, None


def averaged(value: Any, parts: int) -> Any:
    """The same value; cotangents of plain tensors in it are divided by ``parts``."""
    if isinstance(value, Tensor):
        if isinstance(value, DTensor) or not value.requires_grad:
            return value
        return Averaged.apply(value, parts)  # type: ignore[no-untyped-call]
    if isinstance(value, Mapping):
        new = copy.copy(value)
        for key, x in value.items():
            new[key] = averaged(x, parts)  # type: ignore[index]
        return new
    if isinstance(value, (list, tuple)):
        items = [averaged(x, parts) for x in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the positional parameters of a module's forward."""
    parameters = inspect.signature(module.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)


def takes_name(module: nn.Module, name: str) -> bool:
    """Whether a module's forward can be called with an argument of this name."""
    parameters = inspect.signature(module.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return True
    found = parameters.get(name)
    return found is not None and found.kind is not inspect.Parameter.POSITIONAL_ONLY


def _holds_tensors(x: Any) -> bool:
    """Whether an argument is a tensor, or has some in its tuples, lists and dicts."""
    if isinstance(x, Mapping):
        x = list(x.values())
    if isinstance(x, (tuple, list)):
        return any(_holds_tensors(item) for item in x)
    return isinstance(x, Tensor)


def _in_each(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """An argument with every tensor inside changed, in containers of the same kinds."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, Mapping):
        new = copy.copy(x)
        for key, item in x.items():
            new[key] = _in_each(item, change)  # type: ignore[index]
        return new
    if isinstance(x, (tuple, list)):
        items = [_in_each(item, change) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    return x


def _fuses(places: Placements, axis: int) -> bool:
    """Whether leaving an axis for a value alike on all ranks is one local crossing."""
    place = places[axis]
    if isinstance(place, Shard):
        return sum(p.is_shard(place.dim) for p in places) == 1
    return place in (Partial(), Replicate())
