"""CUDA kernels through CuPy: ``module`` compiles a file, ``launch`` starts a kernel.

Every kernel of this package is a ``.cu`` file of header-free CUDA C++, which CuPy
compiles for the device at hand when its first kernel is launched. Torch owns the memory
and the streams: tensors go in as addresses, and a kernel runs on torch's current stream,
so it is ordered among torch's own. CuPy is imported by the first call of ``module``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).parent
OPTIONS = ("--std=c++17",)
# What a file is compiled with beside them.
OPTIONS_OF = {"philox": ("--fmad=false",)}  # each operation is rounded by itself
FREE_SHARED = 48 << 10  # bytes of dynamic shared memory that need not be asked for

Size = int | tuple[int, ...]


def options(name: str) -> tuple[str, ...]:
    """What ``<name>.cu`` is compiled with, beside the architecture."""
    return OPTIONS + OPTIONS_OF.get(name, ())


@cache
def module(name: str) -> Any:
    """The kernels of ``<name>.cu`` in this folder; None where there is no CuPy.

    Args:
        name: Name of the file, without its ending.

    Returns:
        A CuPy ``RawModule``; ``get_function(kernel)`` gives what ``launch`` takes. It
        is compiled for a device when a kernel is first launched there.

    Raises:
        ValueError: There is no such file.
    """
    source = FOLDER / f"{name}.cu"
    if not source.is_file():
        known = sorted(path.stem for path in FOLDER.glob("*.cu"))
        raise ValueError(
            f"module: no such file of kernels, got {name!r}, expected one of {known}. "
            f"Give the name of a .cu file without its ending."
        )
    try:
        import cupy
    except ImportError:
        return None
    return cupy.RawModule(code=source.read_text(), options=options(name))


class _Stream:
    """A stream as CUDA's stream protocol wants it, whatever the version of torch."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


def argument(x: Any) -> Any:
    """What a kernel is given for a tensor, a numpy scalar or None.

    A Python number would go in with eight bytes whatever the kernel declares.

    Raises:
        TypeError: Something else.
    """
    if isinstance(x, torch.Tensor):
        return np.uintp(x.data_ptr())
    if x is None:
        return np.uintp(0)
    if isinstance(x, np.generic):
        return x
    raise TypeError(
        f"launch: an argument has no type of C, got {x!r} ({type(x).__name__}), "
        f"expected a tensor, None or a numpy scalar. Wrap it, as in np.int32(x)."
    )


def launch(
    kernel: Any,
    blocks: Size,
    threads: Size,
    args: Sequence[Any],
    device: torch.device,
    shared: int = 0,
) -> None:
    """Start a kernel on torch's current stream of a device; does not wait for it.

    Args:
        kernel: From ``module(name).get_function(...)``.
        blocks: Blocks of the grid, up to three sizes. CuPy starts one at least, also
            for none: kernels check their bounds.
        threads: Threads of a block, up to three sizes.
        args: What the kernel takes, in order: tensors (their addresses go in; hold on
            to one that was used on another stream), None for a null pointer, numpy
            scalars of exactly the type that the kernel declares.
        device: Where the tensors lie; a device without a number is the current one.
        shared: Bytes of dynamic shared memory.

    Raises:
        TypeError: An argument is neither.
        RuntimeError: CuPy could not compile or start it.
    """
    import cupy

    given = tuple(argument(x) for x in args)
    index = torch.cuda.current_device() if device.index is None else device.index
    grid = blocks if isinstance(blocks, tuple) else (blocks,)
    block = threads if isinstance(threads, tuple) else (threads,)
    # The current device is torch's and CuPy's in common, but each may remember its own.
    with torch.cuda.device(index), cupy.cuda.Device(index):
        handle = torch.cuda.current_stream(index).cuda_stream
        stream = cupy.cuda.Stream.from_external(_Stream(handle))
        try:
            if shared > FREE_SHARED:
                kernel.max_dynamic_shared_size_bytes = shared
            kernel(grid, block, given, shared_mem=shared, stream=stream)
        except Exception as error:
            name = getattr(kernel, "name", "a kernel")
            raise RuntimeError(
                f"launch: {name} did not start on cuda:{index}, got {error!r} for "
                f"blocks {grid}, threads {block} and {shared} bytes of shared memory, "
                f"expected a CuPy that fits the driver and torch's CUDA "
                f"{torch.version.cuda}. Install cupy-cuda12x or cupy-cuda13x, whichever "
                f"has torch's number, or none: torch then does the same in more passes."
            ) from error


__all__ = ["launch", "module", "options"]
