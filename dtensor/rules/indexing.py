"""Indexing: dims taken by a full slice keep their cut, all others must be whole."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch

from dtensor.calls import Call, NoRule, Operand
from dtensor.notation import Letters, Notation
from dtensor.rules.reductions import dims_of


def _is_array(x: Any) -> bool:
    return isinstance(x, (Operand, list, tuple, range, np.ndarray))


def _by_mask(index: Any) -> bool:
    """Whether some index is boolean, alone or inside a list or array."""
    if isinstance(index, (tuple, list)):
        return any(_by_mask(i) for i in index)
    if isinstance(index, (Operand, np.ndarray)):
        return str(index.dtype) in ("torch.bool", "torch.uint8", "bool", "uint8")
    return isinstance(index, (bool, np.bool_))


def index_letters(
    x: Operand, index: Any, result_ndim: int
) -> tuple[Letters, Letters, set[Hashable]]:
    """Letters of ``x``, of ``x[index]``, and those that must stay whole."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(i is Ellipsis for i in items):
        at = next(k for k, i in enumerate(items) if i is Ellipsis)
    else:
        at = len(items)
        items.append(Ellipsis)
    taken = sum(i is not None and i is not Ellipsis for i in items)
    items[at : at + 1] = [slice(None)] * (x.ndim - taken)
    letters: Letters = tuple(range(x.ndim))
    whole: set[Hashable] = set()
    out: list[Hashable] = []
    arrays: list[int] = []  # positions in `items` of array indices
    first_array = 0
    d = 0
    for k, i in enumerate(items):
        if i is None:
            out.append(("new", k))
        elif isinstance(i, slice):
            length = x.shape[d]
            if i.indices(length) == (0, length, 1):
                out.append(d)
            else:
                whole.add(d)
                out.append(("cut", d))
            d += 1
        elif _is_array(i) and not (isinstance(i, Operand) and i.ndim == 0):
            if not arrays:
                first_array = len(out)
            arrays.append(k)
            whole.add(d)
            d += 1
        else:  # an integer
            whole.add(d)
            d += 1
    if arrays:
        picked = result_ndim - len(out)
        # An integer between two arrays separates them as a slice does.
        apart = arrays[-1] - arrays[0] + 1 != len(arrays)
        integers = any(
            not isinstance(i, slice) and i is not None and k not in arrays
            for k, i in enumerate(items)
        )
        if apart or integers:
            return letters, tuple(("any", d) for d in range(result_ndim)), set(letters)
        out[first_array:first_array] = [("picked", n) for n in range(picked)]
    return letters, tuple(out), whole


def getitem(call: Call) -> Notation:
    """``x[index]``."""
    x = call.operands[0]
    if _by_mask(call.args[1]):
        raise NoRule("the shape of the result depends on data")
    shapes = [_picked(x, call.args[1]).shape]
    found = index_letters(x, call.args[1], len(shapes[0]))
    letters, out, whole = found
    extra: list[Letters] = [
        tuple(("index", i, d) for d in range(o.ndim))
        for i, o in enumerate(call.operands[1:])
    ]
    return Notation(
        [letters, *extra],
        [out],
        whole=whole | {x for s in extra for x in s},
        linear=[{0}],
        shapes=shapes,
        view=not _copies(call.args[1]),
    )


def setitem(call: Call) -> Notation:
    """``x[index] = value``: the target stays where it is, the value goes there."""
    x, index, value = call.args[0], call.args[1], call.args[2]
    if _by_mask(index):
        return masked(call)
    part = _picked(x, index)
    letters, out, whole = index_letters(x, index, part.ndim)
    ins = [letters]
    for i, o in enumerate(call.operands[1:]):
        if o is value:
            sub: list[Hashable] = []
            for d, n in enumerate(o.shape):
                k = d + part.ndim - o.ndim
                same = k >= 0 and n == part.shape[k]
                sub.append(out[k] if same else ("one", i, d))
            ins.append(tuple(sub))
        else:
            ins.append(tuple(("index", i, d) for d in range(o.ndim)))
    whole = whole | {x for s in ins[1:] for x in s if isinstance(x, tuple)}
    value_at = next((i for i, o in enumerate(call.operands) if o is value), None)
    # With numbers as values, or indices, addends cannot be overwritten one by one.
    linear = [{0, value_at}] if value_at is not None else []
    return Notation(
        ins,
        [letters],
        whole=whole,
        linear=linear,
        affine={value_at} if value_at is not None else set(),
        shapes=[x.shape],
    )


def masked(call: Call) -> Notation:
    """``x[mask] = value``: with one number as value it is pointwise, else all whole."""
    x, index, value = call.args[0], call.args[1], call.args[2]
    letters: Letters = tuple(range(x.ndim))
    number = not isinstance(value, Operand) or value.ndim == 0
    if number and isinstance(index, Operand) and 0 < index.ndim <= x.ndim:
        fits = index.shape == x.shape[: index.ndim] and index.dtype == torch.bool
        if fits:
            rest: list[Letters] = [() for _ in call.operands[2:]]
            ins = [letters, letters[: index.ndim], *rest]
            return Notation(ins, [letters], shapes=[x.shape])
    ins = [letters]
    for i, o in enumerate(call.operands[1:]):
        ins.append(tuple(("any", i, d) for d in range(o.ndim)))
    whole = {x for s in ins for x in s}
    return Notation(ins, [letters], whole=whole, shapes=[x.shape])


def index_select(call: Call) -> Notation:
    """``index_select(x, dim, index)``: ``dim`` whole."""
    x = call.operands[0]
    dim = dims_of(call.arg(1, "dim"), x.ndim)[0]
    index: Letters = tuple(("index", d) for d in range(call.operands[1].ndim))
    letters: Letters = tuple(range(x.ndim))
    return Notation(
        [letters, index],
        [(*letters[:dim], "picked", *letters[dim + 1 :])],
        whole={dim, *index},
        linear=[{0}],
    )


def gather(call: Call) -> Notation:
    """``gather(x, dim, index)``: free are the dims where both have one length."""
    x, index = call.operands[:2]
    dim = dims_of(call.arg(1, "dim"), x.ndim)[0]
    letters: Letters = tuple(range(x.ndim))
    if index.ndim != x.ndim:
        raise NoRule("operands of unlike numbers of dims")
    sub: Letters = tuple(
        d if d != dim and index.shape[d] == x.shape[d] else ("index", d)
        for d in range(x.ndim)
    )
    # Cut along the indices of ``dim``, every rank reads its part of the whole dim.
    whole = {d for d in letters if d not in sub}
    whole |= {s for s in sub if isinstance(s, tuple) and s != ("index", dim)}
    return Notation([letters, sub], [sub], whole=whole, linear=[{0}])


def _copies(index: Any) -> bool:
    """Whether reading by this index copies (arrays) or gives a view."""
    if isinstance(index, tuple):
        return any(_copies(i) for i in index)
    return _is_array(index) or isinstance(index, bool)


def _picked(x: Operand, index: Any) -> torch.Tensor:
    """``x[index]`` on the meta device."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")[_meta_index(index)]


def _meta_index(index: Any) -> Any:
    if isinstance(index, Operand):
        if index.ndim == 0:  # a number, whose value does not matter for the shape
            return 0
        return torch.empty(index.shape, dtype=index.dtype, device="meta")
    if isinstance(index, tuple):
        return tuple(_meta_index(i) for i in index)
    return index
