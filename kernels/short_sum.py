"""Sums of bfloat16 and float16 as sums of float32, rounded once.

Added up in 16 bits, a sum of n addends is rounded n - 1 times. Here the addends are
widened as they are read, added in their order, each addition rounded to float32, and
the total is rounded once, to nearest, ties to even. The order is that of the ranks, so
every rank that has the addends gets the same bits.

Bytes, for n addends of m elements: each addend is read once and the sum written once,
2 n m + 2 m, on the GPU (``short_sum.cu``) and, as the memory sees it, on the CPU, where
a block's float32 total stays in the cache. Widening all addends first, as
``torch.stack(pieces).float().sum(0)`` does, moves 14 n m + 6 m.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dtensor.kernels import cuda

SOURCE = Path(__file__).with_name("short_sum.cu")
KERNELS = {torch.bfloat16: "sum_bfloat16", torch.float16: "sum_float16"}
# Elements added at once on the CPU: total, addend and result fit the L2 cache.
BLOCK = 1 << 16
THREADS = 256
PER_THREAD = 8
MOST_BLOCKS = 1 << 14


def sum_short(
    pieces: Sequence[torch.Tensor] | torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of addends in 16 bits, accumulated in float32 and rounded once.

    Args:
        pieces: The addends in the order of their ranks, bfloat16 or float16, alike in
            shape, dtype and device; or one tensor that has them along dim 0. On a GPU
            three or more that do not lie at even distances are stacked first.
        out: Where to write the sum: contiguous, of the shape, dtype and device of an
            addend. It may be one of the addends; it must not overlap them otherwise.

    Returns:
        ``out``, or a new contiguous tensor. A NaN stays one; what is beyond the
        largest number is infinity. No autograd.

    Raises:
        TypeError: The dtype is another.
        ValueError: There is no addend, addends differ, or ``out`` does not fit.

    Example:
        >>> x = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)
        >>> sum_short(x[:, None]).item(), (x[0] + x[1] + x[2]).item()
        (258.0, 256.0)
    """
    rows = [r.detach() for r in pieces]
    _check(rows)
    if out is None:
        out = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
    _check_out(out, rows[0])
    if out.numel() == 0:
        return out
    rows = [r.contiguous().view(-1) for r in rows]
    flat = out.detach().view(-1)
    if _on_gpu(flat):
        _launch(rows, flat)
    else:
        _add(rows, flat)
    return out


def _on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda and cuda.module("short_sum") is not None


def _add(rows: list[torch.Tensor], out: torch.Tensor) -> None:
    """The sum by torch, block by block."""
    count = out.numel()
    wide = torch.empty(2, min(BLOCK, count), dtype=torch.float32, device=out.device)
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        total, addend = wide[:, : stop - start]
        total.copy_(rows[0][start:stop])
        for row in rows[1:]:
            addend.copy_(row[start:stop])
            total.add_(addend)
        out[start:stop].copy_(total)


def _launch(rows: list[torch.Tensor], out: torch.Tensor) -> None:
    """The sum by ``short_sum.cu``, of rows at even distances."""
    addresses = [r.data_ptr() for r in rows]
    step = addresses[1] - addresses[0] if len(rows) > 1 else 0
    if any(b - a != step for a, b in zip(addresses, addresses[1:])):
        rows = list(torch.stack(rows))
        addresses = [r.data_ptr() for r in rows]
        step = addresses[1] - addresses[0]
    kernel = cuda.module("short_sum").get_function(KERNELS[out.dtype])
    blocks = -(-out.numel() // (THREADS * PER_THREAD))
    n, count = np.uint64(len(rows)), np.uint64(out.numel())
    args = (rows[0], np.int64(step), n, out, count)
    cuda.launch(kernel, min(blocks, MOST_BLOCKS), THREADS, args, out.device)


# ----------------------------------------------------------------------------- checks
def _check(rows: list[torch.Tensor]) -> None:
    if not rows:
        raise ValueError(
            "sum_short: there is nothing to add, got no tensors, expected one or "
            "more. Pass the addends of all ranks."
        )
    first = rows[0]
    if first.dtype not in KERNELS:
        raise TypeError(
            f"sum_short: the addends are no short floats, got {first.dtype}, expected "
            f"torch.bfloat16 or torch.float16. Use torch.sum."
        )
    for row in rows[1:]:
        if _kind(row) != _kind(first):
            raise ValueError(
                f"sum_short: the addends differ, got {_kind(row)}, expected "
                f"{_kind(first)}. Pass tensors alike in shape, dtype and device."
            )


def _check_out(out: torch.Tensor, like: torch.Tensor) -> None:
    if _kind(out) != _kind(like) or not out.is_contiguous():
        raise ValueError(
            f"sum_short: the sum does not fit into out, got {_kind(out)} with strides "
            f"{out.stride()}, expected {_kind(like)}, contiguous. Leave out= away."
        )


def _kind(x: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype, str]:
    return tuple(x.shape), x.dtype, str(x.device)


__all__ = ["sum_short"]
