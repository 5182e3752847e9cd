"""Pieces of a tensor laid one after another, and put back: what collectives send.

``cut`` and ``join`` take pieces along one dim, uneven and empty ones too; ``pack`` and
``unpack`` take any boxes. On the CPU these are torch's copies, piece by piece. On a GPU
``pack.cu`` moves all pieces in one launch, of any dtype, in words of up to 16 bytes: the
widest to which the addresses, lengths and strides of a piece are aligned.

Bytes: both paths read every byte once and write it once, 2 B for B bytes of pieces
(``torch.cat`` of contiguous copies of the pieces, the plain way to write ``cut``, reads
and writes twice, 4 B). What the kernel saves is launches, one instead of one per piece,
and torch's copies of single elements where a piece is not contiguous.

The table of the boxes lies on the GPU, 96 bytes for each, and is made once per layout;
making it waits for the stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from dtensor.kernels import cuda

Slices = tuple[slice, ...]
Box = tuple[tuple[int, int], ...]
Row = list[int]

SOURCE = Path(__file__).with_name("pack.cu")
THREADS = 256
TILE = 16384  # bytes that a block moves; as in pack.cu
LEVELS = 4


def cut(x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """The pieces of a tensor along a dim, one after another.

    Args:
        x: A tensor with any strides.
        dim: Dim to cut along.
        sizes: Length of each piece; zeros are fine. They add up to the dim's length.

    Returns:
        A new 1-D tensor. Reads and writes the bytes of ``x`` once; on a GPU in one
        launch, on torch's path in one per piece.

    Raises:
        ValueError: The lengths do not add up (CUDA; on the CPU torch raises its own).

    Example:
        >>> cut(torch.arange(6).view(2, 3), 1, (2, 1)).tolist()
        [0, 1, 3, 4, 2, 5]
    """
    if _on_gpu(x):
        table = _along(x.shape, x.stride(), x.element_size(), dim, tuple(sizes))
        if table is not None:
            flat = x.new_empty(x.numel())
            _launch("pack", x, flat, table)
            return flat
    flat, start = x.new_empty(x.numel()), 0
    for piece in x.split_with_sizes(list(sizes), dim):
        stop = start + piece.numel()
        flat[start:stop].view(piece.shape).copy_(piece)  # no second copy in between
        start = stop
    return flat


def join(
    flat: torch.Tensor, shape: Sequence[int], dim: int, sizes: Sequence[int]
) -> torch.Tensor:
    """The pieces that ``cut`` laid one after another, as one tensor.

    Args:
        flat: The pieces, contiguous, each of ``shape`` but for ``dim``.
        shape: Lengths of the dims; that of ``dim`` does not matter.
        dim: Dim to join along.
        sizes: Length of each piece along ``dim``; zeros are fine.

    Returns:
        A new contiguous tensor. Reads and writes the bytes of ``flat`` once.

    Raises:
        ValueError: ``flat`` has not as many elements as the pieces (CUDA; on the CPU
            torch raises its own).

    Example:
        >>> join(torch.tensor([0, 1, 3, 4, 2, 5]), (2, 1), 1, (2, 1)).tolist()
        [[0, 1, 2], [3, 4, 5]]
    """
    before, after = list(shape[:dim]), list(shape[dim + 1 :])
    if _on_gpu(flat) and flat.is_contiguous():
        out = flat.new_empty([*before, sum(sizes), *after])
        _check_elements("join", flat, out.numel())
        size = out.element_size()
        table = _along(out.shape, out.stride(), size, dim, tuple(sizes))
        if table is not None:
            _launch("unpack", out, flat, table)
            return out
    inner = math.prod(before) * math.prod(after)
    pieces = flat.split_with_sizes([n * inner for n in sizes])
    blocks = [
        piece.view([*before, n, *after]) for piece, n in zip(pieces, sizes, strict=True)
    ]
    return torch.cat(blocks, dim)


def pack(x: torch.Tensor, boxes: Sequence[Slices | None]) -> torch.Tensor:
    """Boxes of a tensor, one after another.

    Args:
        x: A tensor with any strides.
        boxes: For each piece a slice of every dim, with start and stop inside of it
            and no step; None for no piece. They may overlap.

    Returns:
        A new 1-D tensor. Reads and writes the bytes of the boxes once.

    Raises:
        ValueError: A box does not lie in the tensor (CUDA).

    Example:
        >>> x = torch.arange(6).view(2, 3)
        >>> pack(x, [(slice(0, 2), slice(2, 3)), None, (slice(1, 2), slice(0, 2))])
        tensor([2, 5, 3, 4])
    """
    table = None
    if _on_gpu(x):
        table = _boxes(x.shape, x.stride(), x.element_size(), _ends(boxes))
    counts = [_elements(box) for box in boxes]
    flat = x.new_empty(sum(counts))
    if table is not None:
        _launch("pack", x, flat, table)
        return flat
    for box, piece in zip(boxes, flat.split_with_sizes(counts), strict=True):
        if box is not None:
            part = x[box]
            piece.view(part.shape).copy_(part)
    return flat


def unpack(
    flat: torch.Tensor, out: torch.Tensor, boxes: Sequence[Slices | None]
) -> torch.Tensor:
    """Write what ``pack`` laid one after another into the boxes of a tensor.

    Args:
        flat: The pieces, contiguous.
        out: The tensor to write into; what is in no box stays as it is.
        boxes: As ``pack`` takes them; here no two may overlap.

    Returns:
        ``out``. Reads and writes the bytes of the boxes once.

    Raises:
        ValueError: A box does not lie in the tensor, or ``flat`` has not as many
            elements as the boxes (CUDA; on the CPU torch raises its own).
    """
    counts = [_elements(box) for box in boxes]
    if _on_gpu(out) and _on_gpu(flat) and flat.is_contiguous():
        _check_elements("unpack", flat, sum(counts))
        table = _boxes(out.shape, out.stride(), out.element_size(), _ends(boxes))
        if table is not None and flat.device == out.device and flat.dtype == out.dtype:
            _launch("unpack", out, flat, table)
            return out
    for box, piece in zip(boxes, flat.split_with_sizes(counts), strict=True):
        if box is not None:
            place = out[box]
            place.copy_(piece.view(place.shape))
    return out


# ------------------------------------------------------------------------- the tables
def rows_of(
    stride: Sequence[int], itemsize: int, boxes: Sequence[Box | None]
) -> list[Row] | None:
    """What ``pack.cu`` must know of boxes, a row for each that is not empty.

    Dims that lie together in memory are merged, for each box by itself.

    Args:
        stride: Strides of the tensor, in elements.
        itemsize: Bytes of an element.
        boxes: (start, stop) on every dim.

    Returns:
        Rows of twelve numbers, in bytes and as the kernel's ``Box`` has them; None where
        a box has more levels than the kernel takes.

    Example:
        >>> rows_of((3, 1), 4, [((0, 2), (0, 2)), ((0, 2), (2, 3))])
        [[0, 0, 0, 16, 8, 1, 1, 2, 0, 0, 0, 12], [1, 8, 16, 8, 4, 1, 1, 2, 0, 0, 0, 12]]
    """
    rows: list[Row] = []
    first = start = 0
    for box in boxes:
        if box is None:
            continue
        base, run = 0, itemsize
        levels: list[tuple[int, int]] = []  # (length, bytes between), innermost first
        for (low, high), step in zip(reversed(box), reversed(stride), strict=True):
            n, between = high - low, step * itemsize
            base += low * between
            if n == 1:
                continue
            if not levels and between == run:
                run *= n
            elif levels and between == levels[-1][0] * levels[-1][1]:
                levels[-1] = (levels[-1][0] * n, levels[-1][1])
            else:
                levels.append((n, between))
        size = run * math.prod(n for n, _ in levels)
        if size == 0:
            continue
        if len(levels) > LEVELS:
            return None
        levels += [(1, 0)] * (LEVELS - len(levels))
        (n3, s3), (n2, s2), (n1, s1), (_, s0) = levels
        rows.append([first, base, start, size, run, n1, n2, n3, s0, s1, s2, s3])
        first += -(-size // TILE)
        start += size
    return rows


class Table:
    """Boxes as the kernels take them, and a copy on each GPU that has asked.

    Attributes:
        rows: Of ``rows_of``.
        tiles: How many blocks move them.
    """

    __slots__ = ("_copies", "rows", "tiles")

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.tiles = rows[-1][0] - (-rows[-1][3] // TILE) if rows else 0
        self._copies: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """The rows on a device; the first call for one waits for its stream."""
        found = self._copies.get(device)
        if found is None:
            found = torch.tensor(self.rows, dtype=torch.int64, device=device)
            self._copies[device] = found
        if device.type == "cuda":
            # A table that leaves the cache must outlive the launches that read it.
            found.record_stream(torch.cuda.current_stream(device))
        return found


@lru_cache(maxsize=4096)
def _along(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    itemsize: int,
    dim: int,
    sizes: tuple[int, ...],
) -> Table | None:
    if sum(sizes) != shape[dim] or min(sizes, default=0) < 0:
        raise ValueError(
            f"cut: the lengths do not make up dim {dim}, got {sizes}, expected numbers "
            f"of zero or more that add up to {shape[dim]}. Give one for each piece."
        )
    return _table(stride, itemsize, list(_pieces(shape, dim, sizes)))


def _pieces(shape: tuple[int, ...], dim: int, sizes: tuple[int, ...]) -> Iterator[Box]:
    start = 0
    whole = [(0, n) for n in shape]
    for n in sizes:
        yield (*whole[:dim], (start, start + n), *whole[dim + 1 :])
        start += n


@lru_cache(maxsize=4096)
def _boxes(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    itemsize: int,
    boxes: tuple[Box | None, ...],
) -> Table | None:
    for box in boxes:
        if box is not None and (
            len(box) != len(shape)
            or any(not 0 <= a <= b <= n for (a, b), n in zip(box, shape))
        ):
            raise ValueError(
                f"pack: a box does not lie in the tensor, got {box}, expected a start "
                f"and a stop inside of each dim of shape {tuple(shape)}. Cut the box."
            )
    return _table(stride, itemsize, boxes)


def _table(
    stride: tuple[int, ...], itemsize: int, boxes: Sequence[Box | None]
) -> Table | None:
    rows = rows_of(stride, itemsize, boxes)
    return None if rows is None else Table(rows)


# ---------------------------------------------------------------------- small helpers
def _elements(box: Slices | None) -> int:
    return 0 if box is None else math.prod(s.stop - s.start for s in box)


def _ends(boxes: Sequence[Slices | None]) -> tuple[Box | None, ...]:
    return tuple(
        None if box is None else tuple((s.start, s.stop) for s in box) for box in boxes
    )


def _on_gpu(x: torch.Tensor) -> bool:
    """Whether the kernels take it: bytes on a GPU that are the values as they lie."""
    return (
        x.is_cuda
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.layout is torch.strided
        and not (x.is_conj() or x.is_neg() or x.is_quantized or x._is_zerotensor())
        and cuda.module("pack") is not None
    )


def _check_elements(verb: str, flat: torch.Tensor, expected: int) -> None:
    if flat.numel() != expected:
        raise ValueError(
            f"{verb}: flat does not hold the pieces, got {flat.numel()} elements, "
            f"expected {expected}. Give the pieces one after another."
        )


def _launch(name: str, tensor: torch.Tensor, flat: torch.Tensor, table: Table) -> None:
    if not table.rows:
        return
    device = tensor.device
    kernel = cuda.module("pack").get_function(name)
    args = (tensor, flat, table.on(device), np.uint64(len(table.rows)))
    cuda.launch(kernel, table.tiles, THREADS, args, device)


__all__ = ["cut", "join", "pack", "unpack"]
