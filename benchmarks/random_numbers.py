"""Time of random DTensors on the CPU against torch's own, per layout of four ranks.

Each rank's part is made alone, as its process would; torch makes the whole tensor, as
one process would. Run ``python benchmarks/random_numbers.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from dtensor.kernels.load import sample
from dtensor.kernels.philox import region
from dtensor.mesh.chunks import chunk_offset, chunk_sizes
from dtensor.rules import distributions

RANKS = 4
SHAPES = [(1024, 1024), (4096, 4096), (1 << 16, 64), (64, 1 << 16)]
CPU = torch.device("cpu")
DRAWS: dict[str, tuple[distributions.Draw, Callable[[torch.Tensor], object]]] = {
    "uniform": (distributions.uniform(torch.float32), lambda x: x.uniform_()),
    "normal": (distributions.normal(torch.float32), lambda x: x.normal_()),
    "bernoulli": (distributions.bernoulli(0.5), lambda x: x.bernoulli_(0.5)),
    "exponential": (
        distributions.exponential(torch.float32),
        lambda x: x.exponential_(),
    ),
}


def seconds(run: Callable[[], object]) -> float:
    """The least of several tries, of this thread alone."""
    best = float("inf")
    for _ in range(11):
        start = time.thread_time()
        run()
        best = min(best, time.thread_time() - start)
    return best


Sizes = tuple[int, ...]


def block(shape: Sizes, dim: int | None, rank: int) -> tuple[Sizes, Sizes]:
    """Offsets and sizes of a rank's part, cut along ``dim``."""
    offsets, sizes = [0] * len(shape), list(shape)
    if dim is not None:
        offsets[dim] = chunk_offset(shape[dim], RANKS, rank)
        sizes[dim] = chunk_sizes(shape[dim], RANKS)[rank]
    return tuple(offsets), tuple(sizes)


def fill_whole(fill: Callable[[torch.Tensor], object], shape: Sizes) -> object:
    """What torch does."""
    return fill(torch.empty(shape))


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("milliseconds; in brackets the part of torch's time for the whole tensor")
    for name, (draw, fill) in DRAWS.items():
        for shape in SHAPES:
            whole = seconds(partial(fill_whole, fill, shape))
            row = [f"{name:12} {shape!s:14} torch {whole * 1e3:7.2f}"]
            for label, dim in (("R", None), ("S(0)", 0), ("S(1)", 1)):
                offsets, sizes = block(shape, dim, 1)
                where = region(shape, offsets, sizes)
                size = torch.Size(sizes)
                took = seconds(
                    partial(
                        sample,
                        size,
                        torch.float32,
                        CPU,
                        draw.kind,
                        (1, 2),
                        where,
                        draw.then,
                    )
                )
                row.append(f"{label} {took * 1e3:7.2f} ({took / whole:4.2f})")
            print("  ".join(row), flush=True)


if __name__ == "__main__":
    main()
