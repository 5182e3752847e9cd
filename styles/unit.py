"""A fully sharded unit: parameters that are gathered and let go of together.

``Unit`` is a pair of module hooks. Before the forward it gathers all parameters of the
unit in one all-gather and puts them in the place of the sharded ones; afterwards, also
after a failure, the sharded ones are back. Autograd does not keep what was gathered:
while the forward runs, a tensor that is saved for backward and lies in the gathered
buffer is noted by its place there (``saved.py``), and backward gathers anew, once. The
reduce-scatter of the gradients ends that.

==================  ====================================================================
when                what is held beside the shards
==================  ====================================================================
forward             the unit's parameters, from its hook to its hook
between             nothing (``reshard_after_forward=False``: the parameters)
backward            the parameters, from the first cotangent to the reduce-scatter, which
                    takes the place of them: gradients, and a flat copy of these
==================  ====================================================================

While backward is in the unit its parameters are in place as they are in forward, so that
a forward that is computed again there (``torch.utils.checkpoint``) finds them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.errors import ShardingError
from dtensor.mesh.world import World
from dtensor.moves import comm_over, pieces_of, plain
from dtensor.placement import Partial, Replicate, Shard, axes_of, placed, show
from dtensor.spec import Spec
from dtensor.styles.crossing import around_of
from dtensor.styles.gathering import Gathered, Packing
from dtensor.styles.lent import Slot, Visit, converted, needs_grad, tensors_in
from dtensor.styles.precision import MixedPrecision
from dtensor.styles.saved import Marks, Saved, drop_early, saving, state_of
from dtensor.tensor import DTensor, typed

T = torch.Tensor
RAW: Any = torch.Tensor
UNIT = "_dtensor_unit"
_ENGINE: Any = torch.autograd.Variable._execution_engine


class _Group(NamedTuple):
    """Slots that travel together: those of one dtype."""

    slots: tuple[int, ...]
    packing: Packing
    dtype: torch.dtype
    specs: tuple[Spec, ...]


class _AtEnd:
    """Closes a unit at the end of a backward; the engine alone holds it.

    It drops its callbacks when a backward fails, so the tables are put back then, too.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit: Unit | None = unit

    def run(self) -> None:
        """The engine's callback."""
        unit, self.unit = self.unit, None
        if unit is not None:
            unit.end_backward()

    def __del__(self) -> None:
        self.run()


class Unit:
    """The hooks of one fully sharded module.

    Args:
        name: What errors call the module.
        axes: Mesh axes its parameters are cut along, the outermost first.
        slots: Its tensors.
        reshard: Whether the parameters are let go of after the forward.
        precision: Dtypes, or None.
    """

    def __init__(
        self,
        name: str,
        axes: tuple[int, ...],
        slots: list[Slot],
        reshard: bool,
        precision: MixedPrecision | None,
    ) -> None:
        self.name, self.axes, self.slots = name, axes, slots
        self.reshard, self.precision = reshard, precision
        self._reset()

    def _reset(self) -> None:
        self.plain = False  # whether its parameters were plain in the last forward
        self.visits: list[Visit] = []
        self.backward: Visit | None = None
        self.ends = False  # whether the running backward will close it
        self.live: tuple[Marks, list[T]] | None = None
        self.left: set[int] = set()  # groups that the running backward has to reduce
        self.after: Any = None  # the unit that is opened next in forward, weakly
        self.before: Any = None
        self._groups: tuple[Any, list[_Group]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        names = ("name", "axes", "slots", "reshard", "precision")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def install(self, module: nn.Module) -> None:
        """Put the hooks on: first of all before the forward, last of all after it."""
        module.__dict__[UNIT] = self
        module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.leave, always_call=True)

    # ---- what it holds ---------------------------------------------------------
    def tensors(self) -> list[Any]:
        """The tensors of all slots as the optimizer knows them."""
        if self.visits:
            return self.visits[0].tensors
        if self.backward is not None:
            return self.backward.tensors
        return [slot.tensor() for slot in self.slots]

    def _spec(self, tensors: list[Any]) -> Spec | None:
        """The spec of any of them; None where this rank is not of the mesh."""
        for x in tensors:
            if isinstance(x, DTensor):
                return None if x._spec.coordinate is None else x._spec
        return None

    def groups(self, tensors: list[Any]) -> list[_Group]:
        """The sharded slots by dtype, with how they lie in a buffer."""
        wanted = [
            i
            for i, slot in enumerate(self.slots)
            if slot.sharded and isinstance(tensors[i], DTensor)
        ]
        key = tuple((i, tensors[i]._spec, tensors[i].dtype) for i in wanted)
        if self._groups is not None and self._groups[0] == key:
            return self._groups[1]
        rows: dict[torch.dtype, list[int]] = {}
        for i in wanted:
            self._check_cut(self.slots[i], tensors[i]._spec)
            rows.setdefault(self._dtype(tensors[i].dtype), []).append(i)
        found = []
        for dtype, members in rows.items():
            specs = [self._whole(tensors[i]._spec) for i in members]
            parts = [specs[0].mesh.shape[a] for a in self.axes]
            shapes = [s.local_shape for s in specs]
            dims = [self.slots[i].dim or 0 for i in members]
            sizes = [
                pieces_of(shape[dim], parts)
                for shape, dim in zip(shapes, dims, strict=True)
            ]
            comm = comm_over(specs[0].world, specs[0].mesh, self.axes)
            packing = Packing(shapes, sizes, dims, comm)
            found.append(_Group(tuple(members), packing, dtype, tuple(specs)))
        self._groups = key, found
        return found

    def _whole(self, spec: Spec) -> Spec:
        return spec.replace(placed(spec.placements, self.axes, Replicate()))

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        wanted = self.precision.param_dtype if self.precision is not None else None
        return wanted if wanted is not None and dtype.is_floating_point else dtype

    def _check_cut(self, slot: Slot, spec: Spec) -> None:
        """Pieces of the unit's axes lie inside of those of all other axes."""
        if axes_of(spec.placements, slot.dim or 0)[-len(self.axes) :] != self.axes:
            names = [spec.mesh.axis_name(a) for a in self.axes]
            raise ShardingError(
                f"fully_shard: {slot.full!r} is no longer cut along {names} last, got "
                f"{show(spec.placements)} on {spec.mesh!r}. Call parallelize_module "
                "first, fully_shard after it."
            )

    # ---- buffers -----------------------------------------------------------------
    def marks(self, tensors: list[Any]) -> Marks:
        """What changes when a shard is written or replaced."""
        with NoTF():
            return tuple(
                (RAW._version.__get__(x), RAW.data_ptr(x))
                for x, slot in zip(tensors, self.slots, strict=True)
                if slot.sharded and isinstance(x, DTensor)
            )

    @torch.no_grad()
    def gathered(self, tensors: list[Any], marks: Marks) -> list[T]:
        """One buffer per group; those that are there already, if nothing changed."""
        if self.live is not None and self.live[0] == marks:
            return self.live[1]
        self.live = None
        with NoTF():
            return [
                group.packing.gather(
                    [plain(tensors[i]).detach() for i in group.slots], group.dtype
                )
                for group in self.groups(tensors)
            ]

    def fetch_early(self) -> None:
        """Gather before it is asked for, where that overlaps with computation."""
        tensors = self.tensors()
        spec = self._spec(tensors)
        if spec is None or self.live is not None or self.visits:
            return
        marks = self.marks(tensors)
        self.live = marks, self.gathered(tensors, marks)
        if torch._C._current_graph_task_id() != -1:
            self._close_at_end(tensors)
        else:
            state_of(spec.world).early.append(weakref.ref(self))

    def _fetch_neighbour(self, tensors: list[Any], link: Any) -> None:
        unit = link() if link is not None else None
        groups = self.groups(tensors)
        if unit is not None and groups and overlaps(groups[0].packing.comm):
            unit.fetch_early()

    # ---- opening and closing -------------------------------------------------------
    def _open(self, tensors: list[Any]) -> Visit:
        """Put the gathered parameters in place."""
        marks = self.marks(tensors)
        visit = Visit(tensors)
        buffers = self.gathered(tensors, marks)
        running = torch._C._current_graph_task_id() != -1
        records = torch.is_grad_enabled()
        if running or records and not self.reshard:
            self.live = marks, buffers
        elif self.live is not None:
            self.live = None
        # A forward without grad may have parts with it.
        with torch.set_grad_enabled(not torch.is_inference_mode_enabled()):
            self._put_all(visit, marks, buffers)
        return visit

    def _put_all(self, visit: Visit, marks: Marks, buffers: list[T]) -> None:
        tensors = visit.tensors
        spec = self._spec(tensors)
        assert spec is not None, "asked before"
        state = state_of(spec.world)
        reduce = self.precision.reduce_dtype if self.precision is not None else None
        for number, group in enumerate(self.groups(tensors)):
            shards, buffer = [plain(tensors[i]) for i in group.slots], buffers[number]
            done = _Done(self, number)
            found = Gathered.apply(group.packing, buffer, reduce, done, *shards)  # type: ignore[no-untyped-call]
            for i, x, whole in zip(group.slots, found, group.specs, strict=True):
                self._put(visit, self.slots[i], typed(x, whole))
            key = buffer.untyped_storage()._cdata
            if self.reshard and buffer.numel() and key not in state.buffers:
                state.buffers[key] = self, marks, number
                visit.storages.append(key)
        for slot, x in zip(self.slots, tensors, strict=True):
            if not slot.sharded and isinstance(x, DTensor):
                self._put(visit, slot, x)

    def _put(self, visit: Visit, slot: Slot, x: DTensor) -> None:
        if self.plain and slot.dynamic:
            around = around_of(slot.places[0][0])
            grads = [
                Partial() if isinstance(around.get(axis), Shard) else Replicate()
                for axis in range(x.device_mesh.ndim)
            ]
            visit.put(slot, x.to_local(grad_placements=grads))
        elif slot.sharded:
            visit.put(slot, x)

    def _close(self, visit: Visit, world: World) -> None:
        visit.take_back()
        state = state_of(world)
        for key in visit.storages:
            state.buffers.pop(key, None)

    # ---- forward -------------------------------------------------------------------
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Pre-hook: the whole parameters, in the place of the sharded ones."""
        tensors = self.tensors()
        spec = self._spec(tensors)
        if spec is None:
            return None
        state = state_of(spec.world)
        given = list(tensors_in((args, kwargs)))
        forward = torch._C._current_graph_task_id() == -1
        if forward:
            if state.depth == 0:
                state.plain = not any(isinstance(x, DTensor) for x in given)
                state.last = None
            self.plain = state.plain
            last = state.last() if state.last is not None else None
            if last is not None and last is not self:
                last.after, self.before = weakref.ref(self), weakref.ref(last)
            state.last = weakref.ref(self)
        visit = self._open(tensors)
        if not forward:
            self._close_at_end(tensors)
        self.visits.append(visit)
        state.depth += 1
        visit.hooks = saving(state)
        visit.hooks.__enter__()
        if torch.is_grad_enabled():
            if not any(needs_grad(x) for x in tensors):
                self._end_with_inputs(given)
        if forward:
            self._fetch_neighbour(tensors, self.after)
        cast = self.precision.param_dtype if self.precision is not None else None
        if cast is None or not self.precision.cast_forward_inputs:  # type: ignore[union-attr]
            return None
        return converted(args, cast), converted(kwargs, cast)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Hook: the sharded parameters again; runs after a failure too."""
        if not self.visits:  # an earlier pre-hook failed before ours ran
            return None
        visit = self.visits.pop()
        spec = self._spec(visit.tensors)
        assert spec is not None, "asked in enter"
        state = state_of(spec.world)
        state.depth -= 1
        if visit.hooks is not None:
            visit.hooks.__exit__(None, None, None)
        self._close(visit, spec.world)
        if state.depth == 0:
            drop_early(state)
        wanted = self.precision.output_dtype if self.precision is not None else None
        if wanted is not None:
            output = converted(output, wanted)
        if torch.is_grad_enabled():
            self._watch(output)
        return output if wanted is not None else None

    def _watch(self, output: Any) -> None:
        """Open again when the first cotangent of an output comes.

        That is before the node runs, but after the hooks of the tensor: by then the
        unit that follows may be over (``_end_with_inputs``).
        """

        def before(grads: Any) -> None:
            self.begin_backward()

        for x in tensors_in(output):
            with NoTF():
                node = RAW.grad_fn.__get__(x)
            if node is not None:
                node.register_prehook(before)

    def _end_with_inputs(self, given: Sequence[T]) -> None:
        """Where nothing is reduced, the cotangents of the inputs say that it is over."""

        def over(grad: T) -> None:
            self.end_backward()

        for x in given:
            with NoTF():
                if RAW.requires_grad.__get__(x):
                    RAW.register_hook(x, over)

    # ---- backward --------------------------------------------------------------------
    def begin_backward(self) -> None:
        """Backward has come to the unit: put its parameters in place."""
        if self.backward is not None or torch._C._current_graph_task_id() == -1:
            return
        tensors = self.tensors()
        self.backward = self._open(tensors)
        self._close_at_end(tensors)
        self._fetch_neighbour(tensors, self.before)

    def _close_at_end(self, tensors: list[Any]) -> None:
        """Have the running backward close it, and say what it has to reduce first."""
        if not self.left:
            self.left = {
                number
                for number, group in enumerate(self.groups(tensors))
                if any(needs_grad(tensors[i]) for i in group.slots)
            }
        if not self.ends:
            self.ends = True
            _ENGINE.queue_callback(_AtEnd(self).run)

    def reduced(self, number: int) -> None:
        """The gradients of a group are complete: with the last one it is over."""
        self.left.discard(number)
        if not self.left:
            self._drop()

    def end_backward(self) -> None:
        """Backward is over, or has failed."""
        self.ends = False
        self.left = set()
        self._drop()

    def _drop(self) -> None:
        self.live = None
        visit, self.backward = self.backward, None
        if visit is not None:
            spec = self._spec(visit.tensors)
            assert spec is not None, "asked in enter"
            self._close(visit, spec.world)

    def again(self, saved: Saved) -> T:
        """What autograd saved, in a buffer gathered anew (once per backward)."""
        tensors = self.tensors()
        marks = self.marks(tensors)
        if marks != saved.marks:
            raise RuntimeError(
                f"{self.name}: a parameter was changed after the forward that this "
                "backward belongs to, expected the values of that forward. Call "
                "backward before optimizer.step(), and forward again after it."
            )
        buffers = self.gathered(tensors, marks)
        if torch._C._current_graph_task_id() != -1:
            self.live = marks, buffers
            self._close_at_end(tensors)
        buffer = buffers[saved.group]
        out = buffer.new_empty(0, dtype=saved.dtype)
        out.set_(buffer.untyped_storage(), saved.offset, saved.size, saved.stride)
        return out


class _Done:
    """Called when the gradients of a group are complete."""

    def __init__(self, unit: Unit, number: int) -> None:
        self.unit, self.number = unit, number

    def __call__(self) -> None:
        self.unit.reduced(self.number)


def overlaps(comm: Any) -> bool:
    """Whether a collective of this backend runs beside computation."""
    return bool(getattr(comm, "overlaps", False))
