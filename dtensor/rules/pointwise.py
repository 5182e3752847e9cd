"""Pointwise ops: broadcast letters, and what each is linear in."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from dtensor.calls import Call, NoRule, Operand
from dtensor.custom_placement import CustomPlacement
from dtensor.notation import Layout, Letters, Notation
from dtensor.placement import Placements, Replicate, is_linear

# What an op is linear in, by operand positions among the leading arguments.
NONE: tuple[tuple[int, ...], ...] = ()
UNARY = ((0,),)
SUM = ((0, 1),)
PRODUCT = ((0,), (1,))
FIRST = ((0,),)
BRANCHES = ((1, 2),)


def broadcast_letters(
    shapes: Sequence[Sequence[int]], what: str
) -> tuple[list[Letters], Letters, torch.Size]:
    """Letters of operands that broadcast against each other, and of the result.

    A dim of size 1 that is stretched gets a letter of its own, which must stay whole.
    """
    try:
        out: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    except RuntimeError as e:
        raise RuntimeError(
            f"{what}: the global shapes do not broadcast, got "
            f"{[tuple(s) for s in shapes]}. {e}"
        ) from None
    n = len(out)
    subs = []
    for i, shape in enumerate(shapes):
        letters: list[Hashable] = []
        for d, size in enumerate(shape):
            k = d + n - len(shape)
            letters.append(k if size == out[k] else ("one", i, d))
        subs.append(tuple(letters))
    return subs, tuple(range(n)), out


def whole_ones(subs: Sequence[Letters]) -> set[Hashable]:
    """The letters of stretched dims."""
    return {x for sub in subs for x in sub if isinstance(x, tuple)}


def pointwise(
    linear: tuple[tuple[int, ...], ...] = NONE,
    condition: Callable[[Call], bool] | None = None,
    copies: bool = False,
) -> Callable[[Call], Notation]:
    """The rule of a pointwise op.

    Linear means so over finite numbers: a Partial value that is divided by zero adds up
    infinities of either sign to nan.

    Args:
        linear: Groups of argument positions in which the op is jointly linear. A
            group with a number in it is none: a number is added once, not per rank.
        condition: Must hold of a call for ``linear`` to apply.
        copies: As in ``Notation``.
    """

    def rule(call: Call) -> Notation:
        if call.name == "where" and single(call):
            raise NoRule("the shape of the result depends on data")
        subs, out, shape = broadcast_letters(
            [o.shape for o in call.operands], call.name
        )
        if call.inplace and shape != call.operands[0].shape:
            raise RuntimeError(
                f"{call.name}_: the result of shape {tuple(shape)} does not fit the "
                f"target of shape {tuple(call.operands[0].shape)}."
            )
        groups = []
        if condition is None or condition(call):
            for group in linear:
                members = [call.arg(i, _NAMES[i]) for i in group]
                if all(isinstance(m, Operand) for m in members):
                    groups.append({index_of(call, m) for m in members})
        affine = {1} if call.inplace and linear == SUM and groups else set()
        return Notation(
            subs,
            [out],
            whole=whole_ones(subs),
            linear=groups,
            affine=affine,
            shapes=[shape],
            copies=copies,
        )

    return rule


_NAMES = ("input", "other", "third")


def index_of(call: Call, operand: Operand) -> int:
    """Position of an operand in ``call.operands``."""
    for i, o in enumerate(call.operands):
        if o is operand:
            return i
    raise KeyError(operand)


def no_rounding(call: Call) -> bool:
    """Division is linear only where it does not round."""
    return call.kwargs.get("rounding_mode") is None


def keeps_kind(call: Call) -> bool:
    """A copy keeps addends only where it does not round to whole numbers."""
    target, source = call.operands[:2]
    return _exact(target.dtype) == _exact(source.dtype)


def _exact(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def single(call: Call) -> bool:
    """``where(condition)`` is another op: the shape of its result depends on data."""
    return len(call.args) + len(call.kwargs) == 1


def prelu(call: Call) -> Notation:
    """``prelu``: one slope for all, or one per channel (dim 1)."""
    x, weight = call.operands[:2]
    letters: Letters = tuple(range(x.ndim))
    if weight.shape.numel() == 1 or x.ndim < 2:
        slopes: Letters = tuple(("one", d) for d in range(weight.ndim))
    else:
        slopes = letters[1:2] if weight.ndim else ()
    return Notation(
        [letters, slopes],
        [letters],
        whole={s for s in slopes if isinstance(s, tuple)},
    )


CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "cfloat": torch.complex64,
    "cdouble": torch.complex128,
    "chalf": torch.complex32,
}


def widening(call: Call) -> bool:
    """A cast keeps addends only where it rounds none of them: they may cancel."""
    source, target = call.operands[0].dtype, CASTS.get(call.name)
    for a in (*call.args[1:], *call.kwargs.values()):
        if isinstance(a, str) and call.name == "type":
            return False
        if isinstance(a, (torch.dtype, Operand)):
            target = a if isinstance(a, torch.dtype) else a.dtype
    if target is None or target == source:
        return True
    same_kind = _exact(source) == _exact(target)
    return same_kind and torch.promote_types(source, target) == target


def without_partial(placements: Placements) -> Placements:
    """The same placements with Replicate in place of Partial."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)


def built_in(placements: Placements) -> Placements:
    """The same placements with Replicate in place of user-defined ones."""
    return tuple(
        Replicate() if isinstance(p, CustomPlacement) else p for p in placements
    )


def cast(call: Call) -> Layout:
    """``to``, ``type``, ``type_as``: another tensor only lends its dtype."""
    x = call.operands[0]
    keeps = widening(call)
    keeps = keeps and is_linear(x.placements)
    places = x.placements if keeps else without_partial(x.placements)
    ins = [places, *[o.placements for o in call.operands[1:]]]
    return Layout(ins, [places], [x.shape])


def like(call: Call) -> Layout:
    """``zeros_like`` and its kind: the model's layout, nothing of its values."""
    x = call.operands[0]
    return Layout([x.placements], [without_partial(x.placements)], [x.shape])


def several(outs: int) -> Callable[[Call], Notation]:
    """Rule of a pointwise op of one operand with several results (``frexp``)."""

    def rule(call: Call) -> Notation:
        x = call.operands[0]
        letters: Letters = tuple(range(x.ndim))
        return Notation([letters], [letters] * outs, shapes=[x.shape] * outs)

    return rule


def isin(call: Call) -> Notation:
    """``isin(elements, test_elements)``: elements free, what they are tested on whole."""
    elements = call.arg(0, "elements")
    free: Letters = ()
    ins: list[Letters] = []
    for i, o in enumerate(call.operands):
        letters: Letters = tuple((i, d) for d in range(o.ndim))
        if o is elements:
            free = letters
        ins.append(letters)
    tested = {x for sub in ins for x in sub} - set(free)
    return Notation(ins, [free], whole=tested)
