"""The reductions: one table, read by every communicator and by the layers above."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

Number = int | float | bool


def _lowest(dtype: torch.dtype) -> Number:
    if dtype is torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> Number:
    if dtype is torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


@dataclass(frozen=True, slots=True)
class Reduction:
    """One way to fold the values of several ranks into one.

    Attributes:
        name: What the user writes.
        identity: dtype -> the value that changes nothing when it is folded in.
        function: Folds two tensors, elementwise.
        idempotent: Whether folding a value in twice is the same as once.
        linear: Whether it commutes with linear maps, so that an adjoint exists.
        mpi: Name of the operation in mpi4py (avg is a sum, divided afterwards).
        nccl: Name of the operation in NCCL, or None where it has none.
    """

    name: str
    identity: Callable[[torch.dtype], Number]
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    idempotent: bool
    linear: bool
    mpi: str
    nccl: str | None


def _constant(value: int) -> Callable[[torch.dtype], Number]:
    return lambda dtype: value


_ROWS = (
    # name, identity, function, idempotent, linear, MPI, NCCL
    Reduction("sum", _constant(0), torch.add, False, True, "SUM", "SUM"),
    Reduction("avg", _constant(0), torch.add, False, True, "SUM", "AVG"),
    Reduction("max", _lowest, torch.maximum, True, False, "MAX", "MAX"),
    Reduction("min", _highest, torch.minimum, True, False, "MIN", "MIN"),
    Reduction("product", _constant(1), torch.mul, False, False, "PROD", "PROD"),
    Reduction("band", _constant(-1), torch.bitwise_and, True, False, "BAND", None),
    Reduction("bor", _constant(0), torch.bitwise_or, True, False, "BOR", None),
    Reduction("bxor", _constant(0), torch.bitwise_xor, False, False, "BXOR", None),
)

REDUCTIONS: dict[str, Reduction] = {row.name: row for row in _ROWS}

_BITWISE = frozenset({"band", "bor", "bxor"})
_ORDERED = frozenset({"max", "min"})


@lru_cache(maxsize=1024)
def reduction(verb: str, op: str, dtype: torch.dtype) -> Reduction:
    """The row of ``op``, if it makes sense for ``dtype``.

    The answer depends on the arguments alone, so all ranks refuse or none does.

    Raises:
        ValueError: No reduction of this name.
        TypeError: The reduction is not defined for this dtype.
    """
    row = REDUCTIONS.get(op)
    if row is None:
        raise ValueError(
            f"{verb}: no such reduction, got {op!r}, expected one of "
            f"{', '.join(REDUCTIONS)}. Pass op='sum' for the sum."
        )
    name = row.name
    if dtype.is_floating_point:
        refused, mend = name in _BITWISE, "Use max or min"
    elif dtype.is_complex:
        refused = name in _BITWISE or name in _ORDERED
        mend = "Reduce torch.view_as_real(x)"
    elif dtype is torch.bool:
        refused = name in ("sum", "avg", "product")
        mend = "Use bor or band, or reduce x.to(torch.int64) to count"
    else:
        refused, mend = name == "avg", "Use sum and divide, or convert to a float"
    if refused:
        raise TypeError(
            f"{verb}: the reduction is not defined for this dtype, got {name!r} for "
            f"{str(dtype).removeprefix('torch.')}, expected another. {mend}."
        )
    return row
