"""What an index says: its entries, as torch reads them, and where each dim goes.

Numbers and slices are read first, then all arrays at once, broadcast against each other.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dtensor.calls import Operand
from dtensor.notation import Letters
from dtensor.taking import Progression


@dataclass(slots=True)
class Item:
    """One entry of an index.

    Attributes:
        kind: ``all``, ``slice``, ``number``, ``new``, ``array``, ``mask``.
        dim: The (first) dim of the operand it takes; -1: none.
        value: The entry; a 0-d tensor is a number not known yet.
        place: Its place in the index, for the tensors of the local call.
        dims: Number of dims it takes.
        run: Of a slice.
    """

    kind: str
    dim: int
    value: Any
    place: int
    dims: int = 1
    run: Progression | None = None


def is_mask(x: Any) -> bool:
    """Whether an entry is a boolean tensor or array."""
    kinds = ("torch.bool", "torch.uint8", "bool", "uint8")
    if isinstance(x, (Operand, torch.Tensor, np.ndarray)):
        return str(x.dtype) in kinds
    if isinstance(x, (list, tuple)):
        return any(is_mask(v) for v in x)
    return isinstance(x, (bool, np.bool_))


def is_array(x: Any) -> bool:
    """Whether an entry is a tensor, an array or a nested sequence."""
    return isinstance(x, (Operand, list, tuple, range, np.ndarray))


def of_numbers(x: Any) -> bool:
    """Whether a (nested) sequence holds whole numbers alone."""
    if isinstance(x, (list, tuple, range)):
        return all(of_numbers(v) for v in x)
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def of_booleans(x: Any) -> bool:
    """Whether a (nested) sequence holds booleans alone."""
    if isinstance(x, (list, tuple)):
        return bool(x) and all(of_booleans(v) for v in x)
    return isinstance(x, (bool, np.bool_))


def check_mask(shape: Sequence[int], dim: int, mask: Any) -> None:
    """Refuse a mask that does not fit the dims that it takes, from ``dim`` on."""
    if tuple(mask.shape) != tuple(shape[dim : dim + mask.ndim]):
        raise IndexError(
            f"the shape of a mask does not match that of the indexed tensor, got "
            f"{tuple(mask.shape)} for dim {dim} and on of {tuple(shape)}."
        )


def parsed(shape: Sequence[int], index: Any) -> list[Item] | None:
    """The entries of an index, one for every dim and every new one.

    None where it is of a kind that is left to torch: then all dims must be whole.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    spans = []
    for k, e in enumerate(entries):
        if isinstance(e, (list, tuple)) and of_booleans(e):
            e = entries[k] = np.asarray(e)
        if (
            isinstance(e, (bool, np.bool_))
            or is_mask(e)
            and not (isinstance(e, (Operand, np.ndarray)) and e.ndim > 0)
        ):
            return None
        if isinstance(e, (list, tuple, range)) and not of_numbers(e):
            return None
        spans.append(0 if e is None or e is Ellipsis else e.ndim if is_mask(e) else 1)
    left = len(shape) - sum(spans)
    if left < 0:
        return None  # torch says what is wrong
    if not any(e is Ellipsis for e in entries):
        entries, spans = [*entries, Ellipsis], [*spans, 0]
    items: list[Item] = []
    dim = 0
    for place, (e, span) in enumerate(zip(entries, spans, strict=True)):
        if e is Ellipsis:
            items += [Item("all", dim + k, slice(None), -1) for k in range(left)]
            span, left = left, 0
        elif e is None:
            items.append(Item("new", -1, None, place))
        elif isinstance(e, slice):
            if any(isinstance(v, Operand) for v in (e.start, e.stop, e.step)):
                return None
            start, stop, step = e.indices(shape[dim])
            count = len(range(start, stop, step))
            whole = count == shape[dim] and step == 1
            kind = "all" if whole else "slice"
            run = Progression(0, start, count, step)
            items.append(Item(kind, dim, e, place, run=run))
        elif isinstance(e, np.ndarray) and is_mask(e):
            check_mask(shape, dim, e)
            for k, found in enumerate(e.nonzero()):
                items.append(Item("array", dim + k, found, -1))
        elif is_mask(e):
            check_mask(shape, dim, e)
            items.append(Item("mask", dim, e, place, span))
        elif is_array(e) and not (isinstance(e, Operand) and e.ndim == 0):
            items.append(Item("array", dim, e, place))
        else:
            if not isinstance(e, Operand) and not hasattr(e, "__index__"):
                return None
            items.append(Item("number", dim, e, place))
        dim += span
    return items


def indexed_letters(items: Sequence[Item], picked: int) -> Letters:
    """Letters of the result: where each dim goes, and where the picked ones are.

    Args:
        items: The entries.
        picked: Number of dims that all arrays together make.
    """
    out: list[Hashable] = []
    at: list[int] = []
    for i in items:
        if i.kind in ("all", "slice"):
            out.append(i.dim)
        elif i.kind == "new":
            out.append(("new", len(out)))
        elif i.kind in ("array", "mask"):
            at.append(len(out))
            out.append(("array", i.dim))
    if not at:
        return tuple(out)
    kept = [x for k, x in enumerate(out) if k not in at]
    adjacent = at[-1] - at[0] + 1 == len(at)
    first = at[0] if adjacent else 0
    kept[first:first] = [("picked", n) for n in range(picked)]
    return tuple(kept)


def picked_dims(items: Sequence[Item]) -> int:
    """Number of dims that the arrays of an index make, broadcast."""
    dims = 0
    for i in items:
        if i.kind == "array":
            value = i.value
            dims = max(dims, value.ndim if isinstance(value, Operand) else ndim(value))
        elif i.kind == "mask":
            dims = max(dims, 1)
    return dims


def ndim(value: Any) -> int:
    """Number of dims of a list or array."""
    return int(np.ndim(value))


def meta_index(index: Any) -> tuple[Any, ...]:
    """An index on the meta device; a 0-d tensor is a number, whose value is free."""
    found: list[Any] = []
    for e in index if isinstance(index, tuple) else (index,):
        if isinstance(e, Operand):
            if e.ndim == 0 and not is_mask(e):
                found.append(0)
            else:
                found.append(torch.empty(e.shape, dtype=e.dtype, device="meta"))
        elif isinstance(e, (list, np.ndarray)) and is_mask(e):
            found += [torch.as_tensor(n) for n in np.asarray(e).nonzero()]
        else:
            found.append(e)
    return tuple(found)


def part_of(x: Operand, index: Any) -> torch.Tensor:
    """``x[index]`` on the meta device."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")[meta_index(index)]


def others(operands: Sequence[Operand]) -> list[Letters]:
    """Letters of operands that must be whole: indices."""
    return [
        tuple(("index", i, d) for d in range(o.ndim))
        for i, o in enumerate(operands[1:])
    ]
