"""Reading by index: cut dims stay cut, and only what changes owner moves.

An index is parsed as torch reads it: numbers and slices first, then all arrays at once.
Along a sharded dim a slice is taken by ``taking.Take``, a number is broadcast by the
rank that has it, and an array picks on each rank what it has, zeros for the rest, which
makes addends; or the dim is gathered where that costs less.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dtensor.calls import Call, NoRule, Operand
from dtensor.collectives import functional
from dtensor.custom_placement import lies_along
from dtensor.moves import comm_over
from dtensor.notation import Layout, Letters, Notation
from dtensor.placement import axes_of
from dtensor.redistribute import local_elements, plain
from dtensor.rules.entries import (
    Item,
    indexed_letters,
    is_mask,
    ndim,
    others,
    parsed,
    part_of,
    picked_dims,
)
from dtensor.rules.reductions import dims_of
from dtensor.rules.runs import run_slices, runs_of
from dtensor.spec import Spec
from dtensor.taking import Take, blocks_of, take_plan


def passed(args: Any, kwargs: Any, at: int, *names: str) -> Any:
    """An argument of a local call, by position or name."""
    if len(args) > at:
        return args[at]
    return next(kwargs[name] for name in names if name in kwargs)


# ---- reading on this rank ---------------------------------------------------------------
def cut_axes(spec: Spec, dim: int) -> tuple[int, ...]:
    """The axes of more than one rank that cut a dim."""
    axes = axes_of(spec.placements, dim)
    return axes if any(spec.mesh.shape[a] > 1 for a in axes) else ()


def average(spec: Spec) -> float:
    """Elements of an average shard: what rules go by must be alike on all ranks."""
    return local_elements(spec.mesh, spec.placements, tuple(spec.shape))


def with_row(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The shard, or one row of zeros where it is empty: there is something to pick."""
    if x.shape[dim]:
        return x
    shape = list(x.shape)
    shape[dim] = 1
    return torch.cat([x, x.new_zeros(shape)], dim)


def checked(
    index: torch.Tensor, length: int, what: str, wraps: bool = True
) -> torch.Tensor:
    """Indices counted from the start; one that is out of range is an error."""
    low = -length if wraps else 0
    if index.numel() and not index.is_meta:
        bad = (index < low) | (index >= length)
        if index.is_cuda:
            torch._assert_async(~bad.any())
        elif bool(bad.any()):
            raise IndexError(
                f"{what}: index out of range, got {int(index[bad][0])}, expected "
                f"{low} to {length - 1} (the length of the whole dim)."
            )
    return torch.where(index < 0, index + length, index)


@dataclass(slots=True)
class Reader:
    """One rank's part in reading by index.

    Attributes:
        spec: Of the operand, as it lies when it is read.
        items: The entries of the index.
        letters: Letters of the result.
        takes: By dim, how a slice moves.
        owners: By dim, the position that has a number; -1: it is known only then.
        arrays: Dims that arrays index and that are cut.
        wraps: Whether negative indices of arrays count from the end.
    """

    spec: Spec
    items: Sequence[Item]
    letters: Letters
    takes: dict[int, Take]
    owners: dict[int, int]
    arrays: list[int]
    wraps: bool

    @classmethod
    def of(
        cls, spec: Spec, items: Sequence[Item], letters: Letters, wraps: bool
    ) -> Reader:
        """Plan the reading; communicates nothing."""
        takes, owners, arrays = {}, {}, []
        for i in items:
            if i.kind in ("new", "all") or not cut_axes(spec, i.dim):
                continue
            if i.kind == "slice":
                assert i.run is not None, "slices have one"
                takes[i.dim] = take_plan(spec, i.dim, [(i.run.count, [i.run])])
            elif i.kind == "number":
                owners[i.dim] = owner_of(spec, i.dim, i.value)
            else:
                arrays.append(i.dim)
        return cls(spec, items, letters, takes, owners, arrays, wraps)

    @property
    def sent(self) -> float:
        """Share of the result that each rank sends, on average and at most one."""
        share = sum(t.moved for t in self.takes.values())
        for dim in self.owners:
            n = self.spec.shards(dim)
            share += (n - 1) / n
        return min(share, 1.0)

    def read(self, x: torch.Tensor, index: Any) -> torch.Tensor:
        """The result on this rank."""
        place = entries_of(index)
        local: list[Any] = []
        missing: list[torch.Tensor] = []
        roots: list[tuple[int, int]] = []
        for i in self.items:
            value = i.value if i.place < 0 else place[i.place]
            if i.dim in self.takes and i.kind == "slice":
                value = self.takes[i.dim].mine()
            elif i.dim in self.owners and i.kind == "number":
                x = with_row(x, i.dim)
                value, root = self._number(i, value)
                roots.append((i.dim, root))
            elif i.dim in self.arrays and i.kind == "array":
                x = with_row(x, i.dim)
                low, rows = self.spec.block(i.dim)
                value = tensor_of(value, x.device)
                length = self.spec.shape[i.dim]
                value = checked(value, length, "index", self.wraps) - low
                gone = (value < 0) | (value >= rows)
                missing.append(gone)
                value = value.masked_fill(gone, 0)
            local.append(value)
        out = x[tuple(local)]
        if missing:
            gone = missing[0]
            for other in missing[1:]:
                gone = gone | other
            picked = [
                k
                for k, n in enumerate(self.letters)
                if isinstance(n, tuple) and n[0] == "picked"
            ]
            tail = out.ndim - picked[-1] - 1 if picked else 0
            gone = gone.view(*gone.shape, *[1] * tail)
            out = out.masked_fill(gone, 0)
        for dim, take in self.takes.items():
            out = take.move(out, self.letters.index(dim))
        for dim, root in roots:
            out = functional.broadcast(out, comm_of(self.spec, dim), root)
        return out

    def _number(self, i: Item, value: Any) -> tuple[int, int]:
        """The local number to read, and which position has the right one."""
        low, rows = self.spec.block(i.dim)
        root = self.owners[i.dim]
        at = int(value)
        length = self.spec.shape[i.dim]
        if root < 0:  # the value of a tensor
            if not -length <= at < length:
                raise IndexError(
                    f"index {at} is out of bounds for dimension {i.dim} with size "
                    f"{length}"
                )
            root = owner_of(self.spec, i.dim, at)
        at = at % length - low
        return (at if 0 <= at < rows else 0), root


def comm_of(spec: Spec, dim: int) -> Any:
    """The communicator over all axes that cut a dim."""
    return comm_over(spec.world, spec.mesh, axes_of(spec.placements, dim))


def owner_of(spec: Spec, dim: int, value: Any) -> int:
    """Position of the rank that has one index of a dim; -1: not known yet."""
    if isinstance(value, Operand):
        return -1
    length = spec.shape[dim]
    at = int(value) % length
    parts = [spec.mesh.shape[a] for a in axes_of(spec.placements, dim)]
    blocks = blocks_of(length, parts)
    return next(r for r, (low, high) in enumerate(blocks) if low <= at < high)


def entries_of(index: Any) -> list[Any]:
    """The entries of the index of a local call, tensors plain."""
    given = index if isinstance(index, tuple) else (index,)
    return [plain(e) if isinstance(e, torch.Tensor) else e for e in given]


def tensor_of(value: Any, device: torch.device) -> torch.Tensor:
    """An array as a tensor of indices."""
    if isinstance(value, torch.Tensor):
        return value.to(device) if value.device != device else value
    if isinstance(value, range):
        value = list(value)
    return torch.as_tensor(value, dtype=torch.int64, device=device)


def gathers(x: Operand, dims: Sequence[int], elements: int) -> bool:
    """Whether to gather the dims that arrays index costs less than to add up what each
    rank picks: the result travels twice, in an all-reduce to come."""
    if not any(axes_of(x.placements, d) for d in dims):
        return False
    return x.dtype == torch.bool or x.shape.numel() < 2 * elements


# ---- rules -------------------------------------------------------------------------------
def array_letters(call: Call, items: Sequence[Item], picked: int) -> list[Letters]:
    """Letters of the arrays of an index: a picked dim may stay cut, where it has the
    full length in every array that is not stretched, and none of them is a list."""
    arrays = [i.value for i in items if i.kind == "array"]
    fixed = any(not isinstance(a, Operand) and ndim(a) for a in arrays)
    shapes = [a.shape if isinstance(a, Operand) else np.shape(a) for a in arrays]
    sizes = torch.broadcast_shapes(*shapes) if arrays else ()  # type: ignore[no-untyped-call]
    found: list[Letters] = []
    for k, o in enumerate(call.operands[1:]):
        sub: list[Hashable] = []
        for d, n in enumerate(o.shape):
            at = d + picked - o.ndim
            free = not fixed and any(a is o for a in arrays) and n == sizes[at]
            sub.append(("picked", at) if free else ("index", k, d))
        found.append(tuple(sub))
    return found


def read_by(
    call: Call,
    items: Sequence[Item],
    shape: Sequence[int],
    index_of: Callable[[Any, Any], Any] = lambda args, kwargs: args[1],
    wraps: bool = True,
) -> Notation | Layout:
    """The notation of reading by an index that is parsed.

    Args:
        call: The call.
        items: The entries of the index.
        shape: Global shape of the result.
        index_of: Gives the index from the arguments of the local call.
        wraps: Whether negative indices count from the end.
    """
    x = call.operands[0]
    others = [i for i in items if i.kind != "all"]
    if len(others) == 1 and others[0].run is not None and others[0].run.step == 1:
        cut_at, taken = others[0].dim, others[0].run
        kept = runs_of(x, cut_at, [(taken.start, taken.count)])
        if kept is not None:
            return run_slices(call, cut_at, kept, [shape], many=False)
    arrays = [i.dim for i in items if i.kind == "array"]
    picked = picked_dims(items)
    out = indexed_letters(items, picked)
    assert len(out) == len(shape), "the entries tell the dims of the result"
    whole = gathers(x, arrays, torch.Size(shape).numel())
    extra = array_letters(call, items, picked)
    cut = lies_along(
        x.placements, {*range(x.ndim)} - {i.dim for i in items if i.kind == "all"}
    )

    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        plan = Reader.of(ins[0], items, out, wraps)

        def read(func: Any, args: Any, kwargs: Any) -> Any:
            return plan.read(plain(args[0]), index_of(args, kwargs))

        return read

    def sends(ins: list[Spec], outs: list[Spec]) -> float:
        share = Reader.of(ins[0], items, out, wraps).sent
        return share * average(outs[0])

    fixed = {n for s in extra for n in s if isinstance(n, tuple) and n[0] == "index"}
    return Notation(
        [tuple(range(x.ndim)), *extra],
        [out],
        whole=fixed | (set(arrays) if whole else set()),
        contracted=set() if whole else set(arrays),
        linear=[{0}],
        shapes=[shape],
        run=run if cut else None,
        sends=sends if cut else None,
        view=not arrays,
        copies=True,
        reads=lambda args, kwargs: [index_of(args, kwargs)],
    )


def getitem(call: Call) -> Notation | Layout:
    """``x[index]``."""
    x, index = call.operands[0], call.args[1]
    entries = index if isinstance(index, tuple) else (index,)
    for e in entries:
        if is_mask(e) and isinstance(e, (Operand, bool, np.bool_)):
            raise NoRule("the shape of the result depends on data")
    shape = part_of(x, index).shape
    items = parsed(x.shape, index)
    if items is None or len(indexed_letters(items, picked_dims(items))) != len(shape):
        return left_to_torch(call, shape)
    return read_by(call, items, shape)


def left_to_torch(call: Call, shape: Sequence[int]) -> Notation:
    """The notation of an index that is not understood: all dims whole."""
    letters: Letters = tuple(range(call.operands[0].ndim))
    extra = others(call.operands)
    return Notation(
        [letters, *extra],
        [tuple(("any", d) for d in range(len(shape)))],
        whole={*letters, *(n for s in extra for n in s)},
        linear=[{0}],
        shapes=[shape],
    )


def index_select(call: Call) -> Notation | Layout:
    """``index_select(x, dim, index)``."""
    x, index = call.operands[:2]
    dim = dims_of(call.arg(1, "dim"), x.ndim)[0] if x.ndim else 0
    if index.ndim != 1 or not x.ndim:
        raise NoRule("numbers in place of dims")
    items = parsed(x.shape, (slice(None),) * dim + (index,))
    assert items is not None, "one array"

    def index_of(args: Any, kwargs: Any) -> Any:
        return (slice(None),) * dim + (passed(args, kwargs, 2, "index"),)

    return read_by(call, items, call.shapes()[0], index_of, wraps=False)


def take(call: Call) -> Notation | Layout:
    """``take(x, index)``: by the number of an element in row-major order."""
    x, index = call.operands[:2]
    shape = tuple(x.shape)
    total = x.shape.numel()
    items = [Item("array", d, index, d) for d in range(x.ndim)]
    if not x.ndim or not total:
        raise NoRule("nothing to tell apart")

    def index_of(args: Any, kwargs: Any) -> Any:
        flat = checked(plain(passed(args, kwargs, 1, "index")), total, "take")
        return torch.unravel_index(flat, shape)

    return read_by(call, items, index.shape, index_of)


def gather(call: Call) -> Notation:
    """``gather(x, dim, index)``: free are the dims where both have one length.

    Along ``dim`` each rank picks what it has, zeros for the rest: addends. Cut along
    the indices of ``dim``, every rank reads its part of the whole dim.
    """
    x, index = call.operands[:2]
    if index.ndim != x.ndim or not x.ndim:
        raise NoRule("operands of unlike numbers of dims")
    dim = dims_of(call.arg(1, "dim"), x.ndim)[0]
    letters: Letters = tuple(range(x.ndim))
    sub: Letters = tuple(
        d if d != dim and index.shape[d] == x.shape[d] else ("index", d)
        for d in range(x.ndim)
    )
    return picking(call, dim, letters, sub, sub, index.shape)


def take_along_dim(call: Call) -> Notation:
    """``take_along_dim(x, index, dim)``: as ``gather``, the other dims broadcast."""
    x, index = call.operands[:2]
    given = call.arg(2, "dim")
    if given is None or index.ndim != x.ndim or not x.ndim:
        raise NoRule("of the flattened tensor")
    dim = dims_of(given, x.ndim)[0]
    shape = call.shapes()[0]
    ins = [
        tuple(
            d if d != dim and o.shape[d] == shape[d] else (name, d)
            for d in range(x.ndim)
        )
        for name, o in (("x", x), ("index", index))
    ]
    letters: Letters = tuple(dim if d == dim else n for d, n in enumerate(ins[0]))
    out: Letters = tuple(("index", d) if d == dim else d for d in range(x.ndim))
    return picking(call, dim, letters, ins[1], out, shape)


def picking(
    call: Call,
    dim: int,
    letters: Letters,
    sub: Letters,
    out: Letters,
    shape: Sequence[int],
) -> Notation:
    """The notation of ops that pick by one index per element along ``dim``."""
    x, index = call.operands[:2]
    whole: set[Hashable] = {n for n in letters if n not in sub and n != dim}
    whole |= {n for n in sub if isinstance(n, tuple) and n != ("index", dim)}
    if gathers(x, [dim], torch.Size(shape).numel()):
        whole.add(dim)

    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        spec = ins[0]
        if not cut_axes(spec, dim):
            return lambda func, args, kwargs: func(*args, **kwargs)
        low, rows = spec.block(dim)
        wraps = call.name == "take_along_dim"

        def pick(func: Any, args: Any, kwargs: Any) -> Any:
            source = with_row(plain(args[0]), dim)
            index = plain(passed(args, kwargs, 1 if wraps else 2, "index", "indices"))
            index = checked(index, spec.shape[dim], call.name, wraps) - low
            gone = (index < 0) | (index >= rows)
            index = index.masked_fill(gone, 0)
            if wraps:
                found = torch.take_along_dim(source, index, dim)
            else:
                found = torch.gather(source, dim, index)
            return found.masked_fill(gone, 0)

        return pick

    cut = lies_along(x.placements, (dim,))
    return Notation(
        [letters, sub],
        [out],
        whole=whole,
        contracted={dim} - whole,
        linear=[{0}],
        shapes=[shape],
        run=run if cut else None,
        copies=True,
    )
