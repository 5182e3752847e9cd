"""Philox4x64-10 in bulk on the CPU, addressed by (seed, call, global element index).

A key (seed, call) names one stream of 64-bit words, four to a block. Word w of it is
word w of ``numpy.random.Philox(key=[seed, call])``; block b has the counter b + 1.
An element of a global tensor owns 32 or 64 bits of the stream, by its row-major index g
alone, whatever part of the tensor a rank holds:

    32 bits: block g // 8, word g // 2 % 4, the low half where g is even
    64 bits: block g // 4, word g % 4

A shard is a ``Region``: runs of consecutive indices. Long runs are made one by one;
runs close together at once, then cut; for those far apart the generator seeks, or,
where they are short, a Philox in array operations makes them, which takes eight times
as long per block but needs no seek. The cheapest is chosen.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011), section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

Key = tuple[int, int]
Words = npt.NDArray[np.uint64]
Array = npt.NDArray[Any]
Cut = Callable[[Array], Array]

MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS = 10
MASK = 2**64 - 1

# Elements made at once: their words, lanes and values stay in the second-level cache.
CHUNK = 1 << 15
# Costs in the time of one block made in bulk: of a piece and its transformations, of a
# seek, of a block by array operations, and of all those operations on next to nothing.
PIECE = 800
SEEK = 250
BLOCK_BY_ARRAYS = 8
ARRAYS = 10_000


@dataclass(frozen=True, slots=True)
class Region:
    """Some elements of a global tensor, in row-major order.

    Attributes:
        base: Global index of the first element.
        sizes: Elements along each level, the outermost first.
        strides: Distance in the global index along each level; the last is 1.
    """

    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def keeps_pairs(self) -> bool:
        """Whether elements 2k and 2k + 1 are always both there, one after the other."""
        return not any(n % 2 for n in (self.base, self.sizes[-1], *self.strides[:-1]))

    def span(self, level: int) -> int:
        """Global indices from the first to the last element within ``level``."""
        pairs = zip(self.sizes[level:], self.strides[level:], strict=True)
        return 1 + sum((n - 1) * s for n, s in pairs)

    def starts(self, level: int) -> npt.NDArray[np.int64]:
        """First global index of each part that the levels from ``level`` on make."""
        found = np.array([self.base], np.int64)
        for n, s in zip(self.sizes[:level], self.strides[:level], strict=True):
            found = (found[:, None] + np.arange(n, dtype=np.int64) * s).reshape(-1)
        return found


@lru_cache(maxsize=65536)
def region(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Region:
    """The region of a block of a global tensor.

    Args:
        shape: Global shape.
        offsets: Where the block begins, per dim.
        sizes: Shape of the block.

    Returns:
        Levels that are no longer than they must be: dims that the block has whole are
        one with the dim before.

    Example:
        >>> region((4, 6, 5), (0, 3, 0), (4, 3, 5))
        Region(base=15, sizes=(4, 15), strides=(30, 1))
    """
    base, stride = 0, 1
    levels: list[tuple[int, int]] = []
    for length, offset, size in reversed(list(zip(shape, offsets, sizes, strict=True))):
        base += offset * stride
        if levels and stride == levels[-1][0] * levels[-1][1]:
            levels[-1] = (levels[-1][0] * size, levels[-1][1])
        elif size != 1:
            levels.append((size, stride))
        stride *= length
    if not levels or levels[0][1] != 1:
        levels.insert(0, (1, 1))
    if 0 in sizes:
        return Region(0, (0,), (1,))
    ns, strides = zip(*reversed(levels), strict=True)
    return Region(base, ns, strides)


def blocks_by_arrays(key: Key, blocks: npt.NDArray[np.integer]) -> Words:
    """The words of some blocks, by array operations.

    Args:
        key: Seed and call.
        blocks: Block numbers, of any shape.

    Returns:
        Words of shape ``(*blocks.shape, 4)``.
    """
    c = [blocks.astype(np.uint64) + np.uint64(1)]
    c += [np.zeros_like(c[0]) for _ in range(3)]
    # A block number is no larger than 2**63, so the counter has one word.
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)

    def product(a: int, b: Words) -> tuple[Words, Words]:
        """High and low word of a product."""
        a0, a1 = np.uint64(a & 0xFFFFFFFF), np.uint64(a >> 32)
        b0, b1 = b & low, b >> half
        middle = a1 * b0 + (a0 * b0 >> half)
        other = a0 * b1 + (middle & low)
        return a1 * b1 + (middle >> half) + (other >> half), np.uint64(a) * b

    seed, call = key
    for _ in range(ROUNDS):
        high0, low0 = product(MULTIPLIERS[0], c[0])
        high1, low1 = product(MULTIPLIERS[1], c[2])
        c = [high1 ^ c[1] ^ np.uint64(seed), low1, high0 ^ c[3] ^ np.uint64(call), low0]
        seed, call = (seed + WEYL[0]) & MASK, (call + WEYL[1]) & MASK
    return np.stack(c, -1)


class Stream:
    """The stream of one key, read in bulk from any block on."""

    def __init__(self, key: Key) -> None:
        self._source = np.random.Philox(key=np.array(key, np.uint64))
        self._state: Any = self._source.state
        self._next = 0

    def words(self, block: int, count: int) -> Words:
        """The words of ``count`` blocks."""
        if block != self._next:
            # Setting the state, with nothing buffered, is the fastest way to seek.
            self._state["state"]["counter"][0] = block
            self._source.state = self._state
        self._next = block + count
        return self._source.random_raw(4 * count)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive elements of a region.

    Attributes:
        at: Number of the first in the region.
        count: How many.
        words: The words of whole blocks.
        cut: Takes the elements out of one value per lane of the blocks.
    """

    at: int
    count: int
    words: Words
    cut: Cut


def pieces(key: Key, where: Region, lanes: int) -> Iterator[Piece]:
    """The random words of a region, piece by piece, in the order of its elements.

    Args:
        key: Seed and call.
        where: The region.
        lanes: Elements per block: 8 (of 32 bits) or 4 (of 64 bits).
    """
    if where.numel == 0:
        return
    level = _cheapest(where, lanes)
    if isinstance(level, str):
        yield from _scattered(key, where, lanes, level == "seek")
        return
    stream = Stream(key)
    inner = where.span(level + 1)
    rows = where.sizes[level]
    stride = where.strides[level]
    # Whole blocks, so that a run is read without a seek.
    step = max(1, (CHUNK - inner) // stride // lanes * lanes)
    shape, strides = where.sizes[level + 1 :], where.strides[level + 1 :]
    each = math.prod(shape)
    at = 0
    for start in where.starts(level).tolist():
        row = 0
        while row < rows:
            begin = start + row * stride
            skip = begin % lanes
            n = min(rows - row, step if skip == 0 or stride > 1 else step - skip)
            count = skip + (n - 1) * stride + inner
            words = stream.words(begin // lanes, -(-count // lanes))
            cut = _strided((n, *shape), (stride, *strides), skip)
            yield Piece(at, n * each, words, cut)
            at += n * each
            row += n


def _strided(shape: Sequence[int], strides: Sequence[int], skip: int) -> Cut:
    if len(shape) == 1:
        return lambda made: made[skip : skip + shape[0]]

    def cut(made: Array) -> Array:
        steps = [s * made.itemsize for s in strides]
        return as_strided(made[skip:], shape, steps).reshape(-1)

    return cut


def _cheapest(where: Region, lanes: int) -> int | str:
    """At which level to make runs in bulk and cut them, or how to make each alone."""
    deepest = len(where.sizes) - 1
    runs = [math.prod(where.sizes[:k]) for k in range(deepest + 1)]
    costs: dict[int | str, float] = {}
    for k in range(deepest + 1):
        if k == deepest or where.span(k + 1) <= CHUNK:
            pieces = runs[k] * -(-where.span(k) // CHUNK)
            costs[k] = runs[k] * (SEEK + where.span(k) / lanes) + PIECE * pieces
    if where.sizes[-1] <= CHUNK:
        blocks = runs[deepest] * _blocks(where.sizes[-1], lanes)
        pieces = -(-blocks * lanes // CHUNK)
        costs["seek"] = runs[deepest] * SEEK + blocks + PIECE * pieces
        costs["arrays"] = BLOCK_BY_ARRAYS * blocks + (PIECE + ARRAYS) * pieces
    return min(costs, key=lambda k: costs[k])


def _blocks(length: int, lanes: int) -> int:
    """Blocks that hold a run of so many elements, wherever it begins."""
    return (length + 2 * (lanes - 1)) // lanes


def _scattered(key: Key, where: Region, lanes: int, seek: bool) -> Iterator[Piece]:
    """Runs far from each other: each by a seek, or all by array operations."""
    length = where.sizes[-1]
    each = _blocks(length, lanes)
    starts = where.starts(len(where.sizes) - 1)
    step = max(1, CHUNK // (each * lanes))
    stream = Stream(key)
    for row in range(0, len(starts), step):
        begin = starts[row : row + step]
        n = len(begin)
        first = begin // lanes
        if seek:
            words = np.concatenate([stream.words(b, each) for b in first.tolist()])
        else:
            blocks = first[:, None] + np.arange(each)
            words = blocks_by_arrays(key, blocks).reshape(-1)
        skips = begin % lanes
        if (skips == skips[0]).all():
            cut = _strided((n, length), (each * lanes, 1), int(skips[0]))
        else:
            at = skips + np.arange(n) * each * lanes
            cut = _taken((at[:, None] + np.arange(length)).reshape(-1))
        yield Piece(row * length, n * length, words, cut)


def _taken(index: npt.NDArray[np.int64]) -> Cut:
    return lambda made: made[index]


__all__ = ["Key", "Piece", "Region", "Stream", "blocks_by_arrays", "pieces", "region"]
