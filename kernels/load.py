"""Samples on a GPU: ``philox.cu`` through CuPy, or the CPU's values carried over.

CuPy is imported when the first sample on a GPU is asked for. Where it is missing, or a
region has more levels than the kernels take, the CPU makes the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dtensor.kernels import samples
from dtensor.kernels.philox import Key, Region
from dtensor.kernels.samples import KINDS

T = torch.Tensor

SOURCE = Path(__file__).with_name("philox.cu")
OPTIONS = ("--std=c++17", "--fmad=false")
THREADS = 256
PER_THREAD = 8
LEVELS = 4


@lru_cache(maxsize=1)
def module() -> Any:
    """The compiled kernels, a CuPy RawModule; None where there is no CuPy."""
    try:
        import cupy
    except ImportError:
        return None
    return cupy.RawModule(code=SOURCE.read_text(), options=OPTIONS)


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
    kernels = module() if device.type == "cuda" and given is not None else None
    if kernels is None:
        out = torch.empty(shape, dtype=dtype)
        return samples.fill(out, kind, key, where, then).to(device)
    made = torch.empty(shape, dtype=KINDS[kind].dtype, device=device)
    if where.numel:
        _launch(kernels, kind, made, given)
    return (made if then is None else then(made)).to(dtype)


def _launch(kernels: Any, kind: str, out: T, given: Any) -> None:
    import cupy

    stream = torch.cuda.current_stream(out.device)
    with (
        cupy.cuda.Device(out.device.index),
        cupy.cuda.ExternalStream(stream.cuda_stream),
    ):
        kernels.get_function(f"philox_{kind}")(
            (blocks(out.numel()),),
            (THREADS,),
            (np.uintp(out.data_ptr()), *[np.uint64(x) for x in given]),
        )


__all__ = ["arguments", "blocks", "module", "sample"]
