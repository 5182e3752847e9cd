"""Writing by index: the target stays where it is, and every rank writes what it has.

Where a slice along a sharded dim is written from a value that is cut alike, the value's
elements move to where the target has theirs; a replicated value is cut on each rank.
Addends are overwritten by addends. Every rank writes, if only an empty part, so that
autograd sees the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtensor.calls import Call, NoRule, Operand
from dtensor.collectives.reductions import REDUCTIONS
from dtensor.custom_placement import CustomPlacement
from dtensor.errors import ShardingError
from dtensor.notation import Layout, Letters, Notation
from dtensor.placement import Partial, Placement, Replicate, Shard, axes_of, normal
from dtensor.redistribute import plain
from dtensor.rules.entries import (
    Item,
    indexed_letters,
    parsed,
    part_of,
    picked_dims,
)
from dtensor.rules.indexing import (
    average,
    checked,
    cut_axes,
    entries_of,
    passed,
    tensor_of,
)
from dtensor.spec import Spec
from dtensor.taking import Take, take_plan

R = Replicate()


def lengths_of(spec: Spec, items: Sequence[Item], letters: Letters) -> dict[int, int]:
    """By dim, the global length of what is written there."""
    found = {}
    for i in items:
        if i.kind in ("all", "slice") and i.run is not None:
            found[i.dim] = i.run.count
        elif i.kind == "all":
            found[i.dim] = spec.shape[i.dim]
    return found


def value_placements(
    x: Operand, value: Operand, items: Sequence[Item], letters: Letters
) -> list[Placement]:
    """Where the value has to be on each axis, for the target to be written there."""
    lengths = lengths_of(x.spec, items, letters)
    wanted: list[Placement] = []
    for p in x.placements:
        if not isinstance(p, Shard):
            wanted.append(p)
            continue
        item = next(i for i in items if i.dim <= p.dim < i.dim + i.dims)
        k = -1
        if item.kind in ("all", "slice"):
            k = letters.index(p.dim) + value.ndim - len(letters)
        fits = k >= 0 and value.shape[k] == lengths[p.dim]
        sliced = item.kind == "slice"
        if fits and sliced:  # moved only if it is cut already
            axes = axes_of(x.placements, p.dim)
            fits = any(value.placements[a].is_shard(k) for a in axes)
        wanted.append(p.at_dim(k) if fits else R)
    return wanted


class Writer:
    """One rank's part in writing by index.

    Attributes:
        spec: Of the target.
        items: The entries of the index.
        letters: Letters of the part that is written.
        value: Spec of the value as it comes, or None for a number.
        takes: By dim, which elements of the part this rank's target has.
        mine: Whether every number along a cut dim is one of this rank's.
    """

    def __init__(
        self, spec: Spec, items: Sequence[Item], letters: Letters, value: Spec | None
    ) -> None:
        self.spec, self.items, self.letters, self.value = spec, items, letters, value
        self.takes: dict[int, Take] = {}
        for i in items:
            if i.kind == "slice" and cut_axes(spec, i.dim):
                assert i.run is not None, "slices have one"
                self.takes[i.dim] = take_plan(spec, i.dim, [(i.run.count, [i.run])])

    def _aligned(self, dim: int) -> int:
        """The dim of the value that goes along a dim of the target, or -1."""
        if self.value is None:
            return -1
        return self.letters.index(dim) + self.value.ndim - len(self.letters)

    @property
    def sent(self) -> float:
        """Elements of the value that this rank sends, on average."""
        if self.value is None:
            return 0.0
        share = 0.0
        for dim, take in self.takes.items():
            k = self._aligned(dim)
            if k >= 0 and axes_of(self.value.placements, k):
                share += take.moved
        return share * average(self.value)

    def write(
        self, x: torch.Tensor, index: Any, value: Any, accumulate: bool = False
    ) -> None:
        """Write into the shard."""
        place = entries_of(index)
        tensor = isinstance(value, torch.Tensor)
        for dim, take in self.takes.items():
            k = self._aligned(dim)
            if not tensor or k < 0 or self.value is None:
                continue
            if axes_of(self.value.placements, k):
                value = take.move_back(value, k)
            elif value.shape[k] != 1 or take.span() != (0, 1):
                if value.shape[k] == _count(self.items, dim):
                    low, high = take.span()
                    value = value.narrow(k, low, high - low)
        local: list[Any] = []
        arrays: list[tuple[int, int, torch.Tensor]] = []  # place in `local`, dim, index
        absent = False
        for i in self.items:
            entry = i.value if i.place < 0 else place[i.place]
            if i.dim in self.takes:
                entry = self.takes[i.dim].mine()
            elif i.kind == "number":  # looked at by all, also where it is whole
                entry = in_range(int(entry), self.spec.shape[i.dim], i.dim)
                if cut_axes(self.spec, i.dim):
                    low, rows = self.spec.block(i.dim)
                    entry -= low
                    absent = absent or not 0 <= entry < rows
            elif i.kind == "array":
                entry = tensor_of(entry, x.device)
                arrays.append((len(local), i.dim, entry))
            elif i.kind == "mask":
                for d, found in enumerate(tensor_mask(entry, x.device)):
                    arrays.append((len(local), i.dim + d, found))
                    local.append(found)
                continue
            local.append(entry)
        if absent:  # nothing here: an empty part, so that autograd sees a write
            local = [
                slice(0, 0) if i.kind == "number" else slice(None)
                for i in self.items
                if i.kind != "new"
                for _ in range(i.dims)
            ]
            value = nothing_of(value)
        elif any(cut_axes(self.spec, dim) for _, dim, _ in arrays):
            value = self._present(x, local, arrays, value)
        if not accumulate:
            x[tuple(local)] = value
            return
        if not tensor:
            value = torch.tensor(value, dtype=x.dtype, device=x.device)
        if absent or not arrays:
            part = x[tuple(local)]
            part.add_(value)
            return
        torch.ops.aten.index_put_(
            x, [e if isinstance(e, torch.Tensor) else None for e in local], value, True
        )

    def _present(
        self,
        x: torch.Tensor,
        local: list[Any],
        arrays: list[tuple[int, int, torch.Tensor]],
        value: Any,
    ) -> Any:
        """Keep of the picked elements those that this rank has; the value likewise."""
        given = torch.broadcast_tensors(*[a for _, _, a in arrays])  # type: ignore[no-untyped-call]
        shape = given[0].shape
        here = torch.ones(shape, dtype=torch.bool, device=x.device)
        moved = []
        for (_, dim, _), index in zip(arrays, given, strict=True):
            low, rows = self.spec.block(dim)
            index = checked(index, self.spec.shape[dim], "index") - low
            here &= (index >= 0) & (index < rows)
            moved.append(index)
        keep = here.reshape(-1).nonzero().view(-1)
        for (k, _, _), index in zip(arrays, moved, strict=True):
            local[k] = index.reshape(-1)[keep]
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            return value
        picked = [
            k
            for k, n in enumerate(self.letters)
            if isinstance(n, tuple) and n[0] == "picked"
        ]
        first = picked[0] - (len(self.letters) - value.ndim) if picked else 0
        last = first + len(shape)
        if last <= 0:  # the value has no picked dim
            return value
        if first < 0:
            value = value.view(*[1] * -first, *value.shape)
            first, last = 0, last - first
        wide = (*value.shape[:first], *shape, *value.shape[last:])
        flat = value.expand(wide).reshape(*wide[:first], -1, *wide[last:])
        return flat.index_select(first, keep)


def _count(items: Sequence[Item], dim: int) -> int:
    run = next(i.run for i in items if i.dim == dim and i.kind == "slice")
    assert run is not None, "slices have one"
    return run.count


def in_range(at: int, length: int, dim: int) -> int:
    """A number counted from the start."""
    if not -length <= at < length:
        raise IndexError(
            f"index {at} is out of bounds for dimension {dim} with size {length}"
        )
    return at % length


def tensor_mask(mask: Any, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Where a mask is true, one index per dim."""
    found: tuple[torch.Tensor, ...] = torch.as_tensor(mask, device=device).nonzero(
        as_tuple=True
    )
    return found


def nothing_of(value: Any) -> Any:
    """A zero that hangs on the value in autograd, for a write that changes nothing."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.reshape(-1)[:0].sum().to(value.dtype)


def addend_of(value: Any, spec: Spec, dtype: torch.dtype) -> Any:
    """A number as this rank's addend."""
    assert spec.coordinate is not None, "only members write"
    for axis, p in enumerate(spec.placements):
        if not isinstance(p, Partial) or spec.coordinate[axis] == 0:
            continue
        if p.reduce_op != "avg" and not REDUCTIONS[p.reduce_op].idempotent:
            value = REDUCTIONS[p.reduce_op].identity(dtype)
    return value


def check_fits(
    name: str, x: Operand, index: Any, items: Sequence[Item], value: Operand | None
) -> None:
    """Refuse an index out of range and a value of another shape, on every rank alike.

    What a mask picks is not known here; there the shards find out.
    """
    if any(i.kind == "mask" for i in items):
        return
    part = part_of(x, index).shape
    if value is None:
        return
    given = list(value.shape)
    while len(given) > len(part) and given[0] == 1:
        del given[0]
    ends = zip(reversed(given), reversed(part), strict=False)
    if len(given) > len(part) or any(n not in (1, m) for n, m in ends):
        raise ShardingError(
            f"{name}: the value does not fit what is written, got shape "
            f"{tuple(value.shape)}, expected one that broadcasts to {tuple(part)}. "
            "Expand or reshape the value."
        )


def written(
    call: Call,
    index: Any,
    value: Any,
    index_of: Callable[[Any, Any], Any],
    value_of: Callable[[Any, Any], Any],
    inplace: bool,
    accumulate: bool = False,
) -> Layout | None:
    """The layout of a write by index.

    Args:
        call: The call; its first operand is the target.
        index: The index, tensors as operands.
        value: The value: an operand or a number.
        index_of: Gives the index from the arguments of the local call.
        value_of: Gives the value from the arguments of the local call.
        inplace: Whether the target is written, or a copy of it.
        accumulate: Whether values are added to what is there.
    """
    x = call.operands[0]
    items = parsed(x.shape, index)
    if items is None:
        raise NoRule("an index of a kind of its own")
    letters = indexed_letters(items, picked_dims(items))
    tensor = value if isinstance(value, Operand) else None
    if call.name != "put":  # its source takes the shape of the index
        check_fits(call.name, x, index, items, tensor)
    places = list(x.placements)
    for axis, p in enumerate(places):
        if isinstance(p, CustomPlacement):
            if inplace:
                return None
            places[axis] = R
    target = x.spec.replace(normal(tuple(places)))
    x = Operand(target, x.dtype, x.path, x.distributed)
    ins = []
    for o in call.operands:
        if o.path == x.path:
            ins.append(target.placements)
        elif o is tensor:
            ins.append(normal(tuple(value_placements(x, o, items, letters))))
        else:
            ins.append(o.spec.replicated().placements)
    at = next((k for k, o in enumerate(call.operands) if o is tensor), None)

    def writer(specs: Sequence[Spec]) -> Writer:
        return Writer(specs[0], items, letters, None if at is None else specs[at])

    def run(specs: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        plan = writer(specs)
        partial = any(isinstance(p, Partial) for p in specs[0].placements)

        def write(func: Any, args: Any, kwargs: Any) -> Any:
            target = args[0] if inplace else args[0].clone()
            given = value_of(args, kwargs)
            if isinstance(given, torch.Tensor):
                given = plain(given)
            elif partial:
                given = addend_of(given, specs[0], target.dtype)
            plan.write(target, index_of(args, kwargs), given, accumulate)
            if call.name == "setitem":
                return None
            return target

        return write

    def sends(specs: list[Spec], outs: list[Spec]) -> float:
        return writer(specs).sent

    return Layout(ins, [target.placements], [x.shape], run=run, sends=sends)


def by_mask(call: Call) -> Notation | None:
    """``x[mask] = number``: pointwise, if that is what the call is."""
    x, index, value = call.operands[0], call.args[1], call.args[2]
    if not isinstance(index, Operand) or index.dtype != torch.bool or not index.ndim:
        return None
    if isinstance(value, Operand) and value.ndim:
        return None
    if index.shape != x.shape[: index.ndim]:
        return None
    if any(p.is_partial() for p in x.placements):
        return None
    letters: Letters = tuple(range(x.ndim))
    rest: list[Letters] = [() for _ in call.operands[2:]]
    ins = [letters, letters[: index.ndim], *rest]
    return Notation(ins, [letters], shapes=[x.shape])


def setitem(call: Call) -> Layout | Notation | None:
    """``x[index] = value``."""
    index, value = call.args[1], call.args[2]
    pointwise = by_mask(call)
    if pointwise is not None:
        return pointwise
    if index is True:  # all of it
        index = Ellipsis
    return written(
        call,
        index,
        value,
        lambda args, kwargs: args[1],
        lambda args, kwargs: args[2],
        inplace=True,
    )


def index_put(call: Call) -> Layout | None:
    """``index_put(x, indices, values, accumulate)``."""
    value = call.arg(2, "values")
    index = tuple(slice(None) if i is None else i for i in call.arg(1, "indices"))
    accumulate = bool(call.arg(3, "accumulate", False))
    if not all(isinstance(i, (Operand, slice)) for i in index):
        raise NoRule("arrays that are no tensors")

    def index_of(args: Any, kwargs: Any) -> Any:
        given = passed(args, kwargs, 1, "indices")
        return tuple(slice(None) if i is None else i for i in given)

    return written(
        call,
        index,
        value,
        index_of,
        lambda args, kwargs: passed(args, kwargs, 2, "values"),
        call.inplace,
        accumulate,
    )


def select_scatter(call: Call) -> Layout | None:
    """``select_scatter(x, src, dim, index)``: a copy with one row overwritten."""
    x = call.operands[0]
    dim = call.arg(2, "dim") % max(1, x.ndim)
    index = (slice(None),) * dim + (int(call.arg(3, "index")),)
    call.shapes()
    if call.operands[1].shape != part_of(x, index).shape:
        raise ShardingError(
            f"select_scatter: one row along dim {dim} is written, got shape "
            f"{tuple(call.operands[1].shape)}, expected "
            f"{tuple(part_of(x, index).shape)}. Expand or reshape the row."
        )
    return written(
        call,
        index,
        call.operands[1],
        lambda args, kwargs: index,
        lambda args, kwargs: passed(args, kwargs, 1, "src"),
        inplace=False,
    )


def slice_scatter(call: Call) -> Layout | None:
    """``slice_scatter(x, src, dim, start, end, step)``: with a slice overwritten."""
    x = call.operands[0]
    dim = call.arg(2, "dim", 0) % max(1, x.ndim)
    part = slice(call.arg(3, "start"), call.arg(4, "end"), int(call.arg(5, "step", 1)))
    index = (slice(None),) * dim + (part,)
    call.shapes()
    return written(
        call,
        index,
        call.operands[1],
        lambda args, kwargs: index,
        lambda args, kwargs: passed(args, kwargs, 1, "src"),
        inplace=False,
    )


__all__ = ["index_put", "select_scatter", "setitem", "slice_scatter", "written"]
