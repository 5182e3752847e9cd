"""What happens to tensors when a laid-out module is called.

``Crossing`` sits on a styled module: it gives plain inputs their type, brings them
where the module wants them, and types or frees what comes out. ``Bridge`` sits on a
module without a style in a model whose activations are plain: there the parameters,
which are DTensors all the same, are lent to the module as plain tensors. Both are
module hooks, so the module's class, forward and signature stay as they are.

Plain tensors follow the convention of local values: what is alike on the ranks of an
axis is used alike by all of them, and each rank calls backward (``boundary.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dtensor.boundary import ReplicateToLocal, ShardToLocal
from dtensor.collectives.functional import all_reduce_identity
from dtensor.errors import ShardingError
from dtensor.mesh.chunks import chunk_sizes
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Partial, Placement, Placements, Replicate, Shard
from dtensor.styles.style import Layout, Port
from dtensor.tensor import DTensor, local_of

# Names under which a module keeps what was said of it.
CROSSING, BRIDGE, AROUND = "_dtensor_crossing", "_dtensor_bridge", "_dtensor_around"


def around_of(module: nn.Module) -> dict[int, Placement]:
    """What plain tensors in a module are, by axis, where that is not Replicate."""
    found: dict[int, Placement] = module.__dict__.get(AROUND, {})
    return found


class Family:
    """Typed inputs that sibling modules share while their parent runs.

    Queries, keys and values come from three modules that get one tensor. Typed once,
    it needs one all-reduce in backward instead of three.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.typed: dict[Any, tuple[Tensor, int, DTensor]] = {}

    def open(self, module: nn.Module, args: Any) -> None:
        """Pre-hook of the parent."""
        self.depth += 1

    def close(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook of the parent; runs after a failure too."""
        self.depth -= 1
        if self.depth == 0:
            self.typed.clear()

    def once(self, x: Tensor, key: Any, make: Callable[[], DTensor]) -> DTensor:
        """The typed ``x``: the one made before, or a new one."""
        if self.depth == 0:
            return make()
        full = (id(x), torch.is_grad_enabled(), key)
        held = self.typed.get(full)
        if held is None or held[0] is not x or held[1] != x._version:
            held = self.typed[full] = (x, x._version, make())
        return held[2]


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

    @property
    def local(self) -> bool:
        """Whether the module gives plain tensors."""
        return any(layout.local for layout in self.layouts.values())

    @property
    def typed_inputs(self) -> bool:
        """Whether a style says what comes in."""
        return any(x.inputs is not None or x.keywords for x in self.layouts.values())

    def bind(self, axis: int, style: str, layout: Layout) -> None:
        """Add the layout along one more axis."""
        self.styles[axis], self.layouts[axis] = style, layout

    def install(self, module: nn.Module) -> None:
        """Put the hooks on, last among the pre-hooks and first among the hooks."""
        module.__dict__[CROSSING] = self
        module.register_forward_pre_hook(self.enter, with_kwargs=True)
        module.register_forward_hook(self.leave, prepend=True)

    # ---- inputs ----------------------------------------------------------------
    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pre-hook: inputs as DTensors in the wanted placements."""
        for axis, layout in self.layouts.items():
            if isinstance(layout.inputs, tuple) and len(layout.inputs) != len(args):
                raise ValueError(
                    f"{self.name}: the style describes {len(layout.inputs)} positional "
                    f"inputs on axis {self.mesh.axis_name(axis)!r}, got {len(args)}. "
                    f"Give the style one placement (or None) per positional input."
                )
            for missing in layout.keywords.keys() - kwargs.keys():
                raise ValueError(
                    f"{self.name}: the style describes a keyword input {missing!r}, "
                    f"got {sorted(kwargs)}. Call the module with {missing}=, or take "
                    f"it out of the style."
                )
        around = around_of(module)
        new = tuple(self._enter(x, self._ports(i), around) for i, x in enumerate(args))
        more = {k: self._enter(x, self._ports(k), around) for k, x in kwargs.items()}
        return new, more

    def _ports(self, key: int | str) -> dict[int, Port]:
        found: dict[int, Port] = {}
        for axis, layout in self.layouts.items():
            port = layout.keywords.get(key) if isinstance(key, str) else None
            if port is None and isinstance(layout.inputs, Port):
                port = layout.inputs
            elif port is None and isinstance(layout.inputs, tuple):
                port = layout.inputs[key] if isinstance(key, int) else None
            if port is not None:
                found[axis] = port
        return found

    def _enter(
        self, x: Any, ports: dict[int, Port], around: dict[int, Placement]
    ) -> Any:
        if not ports or not isinstance(x, Tensor):
            return x
        if isinstance(x, DTensor):
            if x.device_mesh is not self.mesh:
                raise ShardingError(
                    f"{self.name}: the input lies on another mesh than the parameters, "
                    f"got {x!r}, expected {self.mesh!r}. Make the input on the mesh "
                    f"that the module was laid out on."
                )
            return self._bring(x, {a: p.wanted for a, p in ports.items()})
        wanted = {axis: port.wanted for axis, port in ports.items()}
        if self.family is None:
            return self._bring(self._typed(x, ports, around), wanted)
        key = (self.mesh, tuple(ports.items()), tuple(around.items()))
        typed = self.family.once(x, key, lambda: self._typed(x, ports, around))
        return self._bring(typed, wanted)

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

    def _bring(self, x: DTensor, wanted: dict[int, Placement | None]) -> DTensor:
        places = list(x.placements)
        for axis, place in wanted.items():
            if place is not None:
                if isinstance(place, Shard):
                    place = self._shard(place, len(x.shape))
                places[axis] = place
        return x if tuple(places) == x.placements else x.redistribute(places)

    # ---- outputs ---------------------------------------------------------------
    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Hook: outputs in the wanted placements, plain where a style says so."""
        if isinstance(output, (tuple, list)):
            for axis, layout in self.layouts.items():
                ports = layout.outputs
                if isinstance(ports, tuple) and len(ports) != len(output):
                    raise ValueError(
                        f"{self.name}: the style describes {len(ports)} outputs on axis "
                        f"{self.mesh.axis_name(axis)!r}, got {len(output)}. Give the "
                        f"style one placement (or None) per output."
                    )
            new = [self._leave(x, i, module) for i, x in enumerate(output)]
            if isinstance(output, list):
                return new
            if hasattr(output, "_fields"):
                return type(output)(*new)
            return tuple(new)
        return self._leave(output, 0, module)

    def _leave(self, x: Any, index: int, module: nn.Module) -> Any:
        wanted: dict[int, Placement | None] = {}
        ports: dict[int, Port] = {}
        for axis, layout in self.layouts.items():
            port = layout.outputs
            if isinstance(port, tuple):
                port = port[index]
            if port is not None:
                ports[axis] = port
                wanted[axis] = port.wanted
        if not isinstance(x, Tensor):
            return x
        if not isinstance(x, DTensor):
            if not any(port.given is not None for port in ports.values()):
                return x
            x = self._typed(x, ports, around_of(module))
        if not self.local:
            return self._bring(x, wanted)
        return self._freed(x, wanted)

    def _freed(self, x: DTensor, wanted: dict[int, Placement | None]) -> Tensor:
        """This rank's plain tensor; what all ranks shall hold alike is fused.

        On an axis where the result is wanted whole, a Partial passes Megatron's g and
        a Shard is gathered; the adjoints of both communicate nothing.
        """
        goal = list(x.placements)
        for axis, place in wanted.items():
            if isinstance(place, Shard):
                place = self._shard(place, len(x.shape))
            if place is not None:
                goal[axis] = place
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
        return y


def _fuses(places: Placements, axis: int) -> bool:
    """Whether leaving an axis for a value alike on all ranks is one local crossing."""
    place = places[axis]
    if isinstance(place, Shard):
        return sum(p == place for p in places) == 1
    return place in (Partial(), Replicate())


class Bridge:
    """Lends a module its replicated parameters as plain tensors.

    While the module runs on plain tensors only, its parameters and buffers are this
    rank's copies; their gradients go the way of ``to_local``. A call that gets a
    DTensor is left alone.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.active = True
        self._lent: list[list[tuple[dict[str, Any], str, Any, Any]]] = []

    def install(self, module: nn.Module) -> None:
        """Put the hooks on."""
        module.__dict__[BRIDGE] = self
        module.register_forward_pre_hook(self.lend, with_kwargs=True)
        module.register_forward_hook(self.take_back, prepend=True, always_call=True)

    def lend(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Pre-hook: plain tensors in the place of DTensors."""
        lent: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._lent.append(lent)
        typed = any(isinstance(x, DTensor) for x in _tensors((args, kwargs)))
        if typed or not self.active:
            return
        around = around_of(module)
        grads = [
            Partial() if isinstance(around.get(axis), Shard) else Replicate()
            for axis in range(self.mesh.ndim)
        ]
        for table in (module._parameters, module._buffers):
            for name, held in table.items():
                if isinstance(held, DTensor) and held.device_mesh is self.mesh:
                    plain = held.to_local(grad_placements=grads)
                    lent.append((table, name, held, plain))
        for table, name, _, plain in lent:
            table[name] = plain

    def take_back(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook: the DTensors again; runs after a failure too."""
        if not self._lent:  # an earlier pre-hook failed before ours ran
            return
        for table, name, held, plain in self._lent.pop():
            now = table.get(name)
            if now is plain:
                table[name] = held
            elif isinstance(now, Tensor) and not isinstance(now, DTensor):
                # The module has put another value there, as running statistics do.
                whole = [Replicate()] * self.mesh.ndim
                table[name] = DTensor.from_local(
                    now.detach(), self.mesh, whole, run_check=False
                )

    def __getstate__(self) -> dict[str, Any]:
        return {"mesh": self.mesh, "active": self.active, "_lent": []}


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in arguments, inside lists, tuples and dicts too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
