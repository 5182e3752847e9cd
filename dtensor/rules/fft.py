"""Fourier transforms: the transformed dims whole, the others free; all are linear."""

from __future__ import annotations

from collections.abc import Callable

from dtensor.calls import Call
from dtensor.notation import Letters, Notation
from dtensor.rules.reductions import dims_of

# name -> the transformed dims where none are given; None: all of them
ONE = -1
PLANE = (-2, -1)


def transform(default: int | tuple[int, ...] | None) -> Callable[[Call], Notation]:
    """Rule of ``fft.*(x, n or s, dim, norm)``.

    Args:
        default: The dims where none are given; None: those of ``s``, or all.
    """

    def rule(call: Call) -> Notation:
        x = call.operands[0]
        size, dim = call.arg(1, "n" if default == ONE else "s"), call.arg(2, "dim")
        if dim is None:
            dim = default
        if dim is None and isinstance(size, (list, tuple)):
            dim = list(range(-len(size), 0))
        dims = dims_of(dim, x.ndim)
        letters: Letters = tuple(range(x.ndim))
        out: Letters = tuple(("new", d) if d in dims else d for d in letters)
        return Notation([letters], [out], whole=set(dims), linear=[{0}])

    return rule


def shift(call: Call) -> Notation:
    """``fft.fftshift(x, dim)``: elements move along the dims."""
    x = call.operands[0]
    dims = dims_of(call.arg(1, "dim"), x.ndim)
    letters: Letters = tuple(range(x.ndim))
    return Notation([letters], [letters], whole=set(dims), linear=[{0}], copies=True)


def windows(call: Call) -> Notation:
    """``stft`` and ``istft``: the batch free, time, frequency and the window whole."""
    x = call.operands[0]
    core = 1 if call.name == "stft" else 2
    core = min(x.ndim, core)
    lead: Letters = tuple(range(x.ndim - core))
    ins: list[Letters] = [(*lead, *(("core", d) for d in range(core)))]
    ins += [
        tuple(("window", i, d) for d in range(o.ndim))
        for i, o in enumerate(call.operands[1:])
    ]
    shapes = call.shapes()
    rest = len(shapes[0]) - len(lead)
    return Notation(
        ins,
        [(*lead, *(("new", d) for d in range(rest)))],
        whole={x for sub in ins for x in sub if isinstance(x, tuple)},
        linear=[{0}],
        shapes=shapes,
    )
