"""NCCL's types and operations, and which reductions have torch's meaning there."""

from __future__ import annotations

import torch

from dtensor.collectives.reductions import Reduction

# NCCL's numbers, which are part of its interface.
_FOLDED = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_MOVED = {1: 1, 2: 6, 4: 3, 8: 5}  # by bytes of an element
_OPS = {"SUM": 0, "PROD": 1, "MAX": 2, "MIN": 3, "AVG": 4}


def folds(row: Reduction, dtype: torch.dtype) -> tuple[int, int, int] | None:
    """NCCL's operation, its type, and how many of it one element takes.

    None where NCCL does not have the reduction with torch's meaning.
    """
    if row.nccl is None:
        return None
    op = _OPS[row.nccl]
    if dtype.is_complex:
        pair = dtype.to_real()
        return (op, _FOLDED[pair], 2) if row.linear and pair in _FOLDED else None
    if dtype.is_floating_point and row.name in ("max", "min"):
        return None
    return (op, _FOLDED[dtype], 1) if dtype in _FOLDED else None


def moves(dtype: torch.dtype) -> tuple[int, int]:
    """NCCL type that moves an element, and how many of it one element takes."""
    width = dtype.itemsize
    return (_MOVED[width], 1) if width in _MOVED else (_MOVED[8], width // 8)
