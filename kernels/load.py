"""Samples on a GPU: ``philox.cu`` through CuPy, or the CPU's values carried over.

CuPy is imported when the first sample on a GPU is asked for. Where it is missing, or a
region has more levels than the kernels take, the CPU makes the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dtensor.kernels import cuda, samples
from dtensor.kernels.philox import Key, Region
from dtensor.kernels.samples import KINDS

T = torch.Tensor

SOURCE = cuda.FOLDER / "philox.cu"
THREADS = 256
PER_THREAD = 8
LEVELS = 4


def arguments(key: Key, where: Region) -> list[int] | None:
    """What the kernels take after the output: count, key, base, sizes and strides.

    None where the region has too many levels.
    """
    more = LEVELS - len(where.sizes)
    if more < 0:
        return None
    sizes = (1,) * more + where.sizes
    strides = (0,) * more + where.strides
    return [where.numel, *key, where.base, *sizes[1:], *strides[:-1]]


def blocks(count: int) -> int:
    """Thread blocks for so many elements."""
    return max(1, min(1 << 16, -(-count // (THREADS * PER_THREAD))))


def sample(
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    kind: str,
    key: Key,
    where: Region,
    then: Callable[[T], T] | None = None,
) -> T:
    """A new tensor with the sample of a region.

    Args:
        shape: Its shape, with as many elements as the region.
        dtype: Its type; the values are converted.
        device: Where it lies.
        kind: A name of ``samples.KINDS``.
        key: Seed and call.
        where: Which elements of the global sample.
        then: What to do with the values, element by element; may change them.
    """
    given = arguments(key, where)
    kernels = (
        cuda.module("philox") if device.type == "cuda" and given is not None else None
    )
    if kernels is None or given is None:
        out = torch.empty(shape, dtype=dtype)
        return samples.fill(out, kind, key, where, then).to(device)
    made = torch.empty(shape, dtype=KINDS[kind].dtype, device=device)
    if where.numel:
        _launch(kernels, kind, made, given)
    return (made if then is None else then(made)).to(dtype)


def _launch(kernels: Any, kind: str, out: T, given: list[int]) -> None:
    kernel = kernels.get_function(f"philox_{kind}")
    args = (out, *map(np.uint64, given))
    cuda.launch(kernel, blocks(out.numel()), THREADS, args, out.device)


__all__ = ["arguments", "blocks", "sample"]
