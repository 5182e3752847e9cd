"""Pieces laid one after another and put back: torch's path, and the kernels on the CPU."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import kernel_shim
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_shim import Module, build

from dtensor.kernels import pack

DTYPES = (
    torch.uint8,
    torch.bool,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex128,
)
Pieces = list[tuple[slice, ...] | None]


# ---- what is packed ------------------------------------------------------------------
def numbered(dtype: torch.dtype, n: int) -> torch.Tensor:
    """A tensor whose bytes are all known, with an odd one in front of it."""
    size = dtype.itemsize
    raw = torch.arange(n * size + 64, dtype=torch.int64).mul(37).to(torch.uint8)
    raw = raw % 2 if dtype is torch.bool else raw
    return raw[: n * size].clone().view(dtype)


@st.composite
def strided(draw: st.DrawFn, lengths: int = 5) -> torch.Tensor:
    """A tensor of up to four dims: sliced, transposed, at any offset."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, lengths), min_size=1, max_size=4))
    more = [draw(st.integers(0, 2)) for _ in shape]
    offset = draw(st.integers(0, 3))
    whole = [n + k for n, k in zip(shape, more)]
    n = int(np.prod(whole))
    x = numbered(dtype, n + offset)[offset:].view(whole)
    for d, (n, k) in enumerate(zip(shape, more)):
        x = x.narrow(d, draw(st.integers(0, k)), n)
    return x.permute(draw(st.permutations(range(x.ndim))))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[torch.Tensor, int, list[int]]:
    """A tensor, a dim, and lengths that add up to that of the dim."""
    x = draw(strided())
    dim = draw(st.integers(0, x.ndim - 1))
    n = x.shape[dim]
    at = draw(st.lists(st.integers(0, n), max_size=4))
    ends = [0, *sorted(at), n]
    return x, dim, [b - a for a, b in itertools.pairwise(ends)]


@st.composite
def boxed(draw: st.DrawFn, apart: bool = False) -> tuple[torch.Tensor, Pieces]:
    """A tensor and boxes of it; ``apart``: none overlaps another."""
    x = draw(strided())
    if apart:  # the cells of a grid
        edges = []
        for n in x.shape:
            at = draw(st.lists(st.integers(0, n), max_size=2))
            edges.append([*itertools.pairwise([0, *sorted(at), n])])
        cells = [tuple(slice(a, b) for a, b in c) for c in itertools.product(*edges)]
        kept = draw(st.lists(st.sampled_from(cells), max_size=5, unique_by=str))
        return x, [*kept, None]
    pieces: Pieces = []
    for _ in range(draw(st.integers(0, 4))):
        ends = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in x.shape]
        pieces.append(tuple(slice(a, b) for a, b in ends))
    return x, [None, *pieces]


def bits(x: torch.Tensor) -> torch.Tensor:
    flat = x.clone(memory_format=torch.contiguous_format).view(-1)
    return flat.view(torch.uint8)


def laid(pieces: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat([like.new_empty(0), *[p.reshape(-1) for p in pieces]])


def check_cut(x: torch.Tensor, dim: int, sizes: Sequence[int]) -> None:
    """``cut`` and ``join`` against what torch says in other words."""
    before = x.clone()
    flat = pack.cut(x, dim, tuple(sizes))
    wanted = laid(x.split_with_sizes(list(sizes), dim), x)
    assert torch.equal(bits(flat), bits(wanted))
    assert torch.equal(bits(x), bits(before))
    joined = pack.join(flat, list(x.shape), dim, tuple(sizes))
    assert joined.shape == x.shape and joined.is_contiguous()
    assert torch.equal(bits(joined), bits(x))
    assert torch.equal(bits(flat), bits(wanted))


def check_pack(x: torch.Tensor, pieces: Pieces) -> None:
    flat = pack.pack(x, pieces)
    wanted = laid([x[p] for p in pieces if p is not None], x)
    assert torch.equal(bits(flat), bits(wanted))


def check_unpack(x: torch.Tensor, pieces: Pieces) -> None:
    flat = numbered(x.dtype, sum(x[p].numel() for p in pieces if p is not None))
    wanted, start = x.clone(), 0
    for p in pieces:
        if p is not None:
            n = x[p].numel()
            wanted[p] = flat[start : start + n].view(x[p].shape)
            start += n
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)
    assert pack.unpack(flat, out, pieces) is out
    assert torch.equal(bits(out), bits(wanted))


# ---- torch's path --------------------------------------------------------------------
@given(cuts())
def test_cut_and_join(found: tuple[torch.Tensor, int, list[int]]) -> None:
    check_cut(*found)


@given(boxed())
def test_boxes(found: tuple[torch.Tensor, Pieces]) -> None:
    check_pack(*found)


@given(boxed(apart=True))
def test_boxes_put_back(found: tuple[torch.Tensor, Pieces]) -> None:
    check_unpack(*found)


def test_copies_are_of_the_values() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64).conj()
    flat = pack.cut(x, 1, (1, 3))
    assert not flat.is_conj()
    assert torch.equal(pack.join(flat, [3, 4], 1, (1, 3)), x.resolve_conj())


def test_lengths_that_do_not_fit_are_torchs_errors_on_the_cpu() -> None:
    x = torch.zeros(3, 4)
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        pack.cut(x, 1, (1, 2))
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        pack.join(x.view(-1), [3, 4], 1, (1, 2))
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        pack.unpack(x.view(-1), x, [(slice(0, 1), slice(0, 4))])


# ---- the kernels, on the CPU ---------------------------------------------------------
class Gpu:
    """Stands for CuPy: launches go to the kernels built for the CPU."""

    def __init__(self, kernels: Module) -> None:
        self.kernels = kernels
        self.seed = 0
        self.launches: list[str] = []
        self.module = lambda name: SimpleNamespace(get_function=str)

    def launch(
        self, name: str, blocks: int, threads: int, args: Any, device: torch.device
    ) -> None:
        assert [type(a) for a in args] == [torch.Tensor] * 3 + [np.uint64]
        assert blocks > 0 and device.type == "cpu"
        self.launches.append(name)
        self.seed += 1
        pointers = [at(a) for a in args[:3]]
        kernel = getattr(self.kernels, name)
        kernel((blocks,), (threads,), *pointers, int(args[3]), seed=self.seed)


def at(x: torch.Tensor) -> torch.Tensor:
    """One byte where a tensor begins: the shim takes no strides."""
    byte = (ctypes.c_ubyte * 1).from_address(x.data_ptr())
    return torch.frombuffer(byte, dtype=torch.uint8)


def gpu_of(monkeypatch: pytest.MonkeyPatch, tile: int, threads: int) -> Gpu:
    gpu = Gpu(build(pack.SOURCE, (f"TILE={tile}",)))
    monkeypatch.setattr(pack, "cuda", gpu)
    monkeypatch.setattr(pack, "TILE", tile)
    monkeypatch.setattr(pack, "THREADS", threads)
    monkeypatch.setattr(pack, "_on_gpu", lambda x: True)
    for cache in (pack._along, pack._boxes):
        monkeypatch.setattr(pack, cache.__name__, cache.__wrapped__)
    return gpu


@pytest.fixture(params=[(16, 3), (64, 2), (16384, 32)], ids=str)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return gpu_of(monkeypatch, *request.param)


MANY = settings(max_examples=60, deadline=None)


def test_kernels_cut_and_join(gpu: Gpu) -> None:
    @MANY
    @given(cuts())
    def check(found: tuple[torch.Tensor, int, list[int]]) -> None:
        gpu.launches.clear()
        check_cut(*found)
        assert gpu.launches == (["pack", "unpack"] if found[0].numel() else [])

    check()


def test_kernels_pack_boxes(gpu: Gpu) -> None:
    @MANY
    @given(boxed())
    def check(found: tuple[torch.Tensor, Pieces]) -> None:
        check_pack(*found)

    check()
    assert {*gpu.launches} == {"pack"}


def test_kernels_unpack_boxes(gpu: Gpu) -> None:
    @MANY
    @given(boxed(apart=True))
    def check(found: tuple[torch.Tensor, Pieces]) -> None:
        check_unpack(*found)

    check()
    assert {*gpu.launches} == {"unpack"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_move_many_tiles(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = gpu_of(monkeypatch, 16384, 256)
    x = numbered(dtype, 3 * 500 * 37).view(3, 500, 37)
    check_cut(x, 1, (200, 0, 299, 1))
    check_cut(x[:, :, :32], 2, (16, 9, 7))
    assert gpu.launches == ["pack", "unpack"] * 2


# Whatever a piece is aligned to: the words that move it.
ALIGNED = [
    ((0, 64), (32, 32), 16),
    ((16, 64), (32, 16), 16),
    ((0, 40), (16, 24), 8),
    ((8, 56), (16, 32), 8),
    ((0, 36), (16, 20), 4),
    ((0, 34), (16, 18), 2),
    ((1, 33), (16, 16), 1),
    ((0, 33), (16, 17), 1),
]
COUNTS = """
static u64 widths[17];
extern "C" __global__ void take_widths(u64* out) {
  for (int i = 0; i < 17; ++i) out[i] = widths[i], widths[i] = 0;
}
"""


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Module:
    """The kernels, and how often they took which width."""
    text = pack.SOURCE.read_text()
    first = "  const u64 run = b.run / sizeof(Word)"
    assert text.count(first) == text.count("struct alignas(16) Quad") == 1
    text = text.replace(first, f"  ++widths[sizeof(Word)];\n{first}")
    text = text.replace("struct alignas", f"{COUNTS}struct alignas")
    source = tmp_path_factory.mktemp("pack") / "pack.cu"
    source.write_text(text)
    return build(source)


@pytest.mark.parametrize("columns, sizes, width", ALIGNED)
def test_words_are_as_wide_as_all_is_aligned(
    columns: tuple[int, int],
    sizes: tuple[int, int],
    width: int,
    counting: Module,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = gpu_of(monkeypatch, 16384, 1)
    gpu.kernels = counting
    x = numbered(torch.uint8, 4 * 64).view(4, 64)
    assert x.data_ptr() % 16 == 0
    x = x[:, slice(*columns)]
    flat = pack.cut(x, 1, (sizes[0], 0, sizes[1]))
    assert torch.equal(flat, laid(x.split_with_sizes(list(sizes), 1), x))
    found = torch.zeros(17, dtype=torch.int64)
    counting.take_widths((1,), (1,), found)
    assert found.sum() == 2
    assert found[width] > 0 and found[:width].sum() == 0  # the last is the narrowest


def test_words_are_no_wider(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if kernel_shim.SANITIZED:
        pytest.skip("plants a fault, at which the sanitizer would end the process")
    monkeypatch.setattr(
        kernel_shim, "FLAGS", [*kernel_shim.FLAGS, "-fsanitize=alignment"]
    )
    gpu = gpu_of(monkeypatch, 64, 2)
    gpu.kernels = build.__wrapped__(pack.SOURCE, ("TILE=64",))

    @MANY
    @given(cuts())
    def check(found: tuple[torch.Tensor, int, list[int]]) -> None:
        check_cut(*found)

    check()
    assert "misaligned" not in capfd.readouterr().err
    # That it is said if it happens: a table that begins between two numbers.
    table = torch.zeros(104, dtype=torch.uint8)
    x = torch.zeros(8, dtype=torch.uint8)
    gpu.kernels.pack((1,), (1,), x, x, table[1:], 1)
    assert "misaligned" in capfd.readouterr().err


def test_empty_work_and_more_blocks_than_tiles() -> None:
    kernels = build(pack.SOURCE)
    x = torch.arange(8, dtype=torch.uint8)
    flat = torch.zeros(8, dtype=torch.uint8)
    rows = pack.rows_of((1,), 1, [((1, 7),)])
    table = torch.tensor(rows)
    kernels.pack((3,), (32,), x, flat, table, 0, seed=1)
    assert flat.tolist() == [0] * 8
    kernels.pack((3,), (32,), x, flat, table, 1, seed=1)
    assert flat.tolist() == [1, 2, 3, 4, 5, 6, 0, 0]


def test_tensors_of_too_many_levels_go_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = gpu_of(monkeypatch, 64, 32)
    x = numbered(torch.float32, 3**6).view([3] * 6)[:, :2, :2, :2, :2, :2]
    check_cut(x, 0, (2, 1))
    assert gpu.launches == ["unpack"]  # the result of join is contiguous
    check_pack(x, [tuple(slice(0, 2) for _ in range(6))])
    check_unpack(x, [tuple(slice(0, 2) for _ in range(6))])
    assert gpu.launches == ["unpack"]


def test_rows_merge_what_lies_together() -> None:
    whole = ((0, 4), (0, 6), (0, 5))
    assert pack.rows_of((30, 5, 1), 2, [whole]) == [[0, 0, 0, 240, 240, *LINE]]
    (row,) = pack.rows_of((30, 5, 1), 2, [((1, 3), (2, 4), (0, 5))]) or []
    assert row == [0, 80, 0, 40, 20, 1, 1, 2, 0, 0, 0, 60]
    (row,) = pack.rows_of((1, 4), 2, [((0, 4), (0, 6))]) or []
    assert row == [0, 0, 0, 48, 2, 1, 4, 6, 0, 0, 2, 8]
    assert pack.rows_of((6, 1), 2, [((0, 0), (0, 6)), None]) == []


LINE = [1, 1, 1, 0, 0, 0, 0]


def test_a_layout_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    along, boxes = pack._along, pack._boxes
    gpu_of(monkeypatch, 16384, 32)
    monkeypatch.setattr(pack, "_along", along)
    monkeypatch.setattr(pack, "_boxes", boxes)
    along.cache_clear()
    boxes.cache_clear()
    x = numbered(torch.int16, 91).view(7, 13)
    whole = slice(0, 7)
    for _ in range(3):
        check_cut(x, 1, (6, 7))
        check_pack(x, [(whole, slice(0, 6)), None, (whole, slice(6, 13))])
    assert along.cache_info().misses == 1  # cut and join of a contiguous tensor
    assert boxes.cache_info().misses == 1
    table = along(x.shape, x.stride(), 2, 1, (6, 7))
    assert table is not None
    assert table.on(x.device) is table.on(x.device)


def test_lengths_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = gpu_of(monkeypatch, 16384, 32)
    x = torch.zeros(3, 4)
    for sizes in ((1, 2), (5, -1)):
        with pytest.raises(
            ValueError, match=r"cut: the lengths do not make up dim 1, got \("
        ):
            pack.cut(x, 1, sizes)
    with pytest.raises(
        ValueError, match="join: flat does not hold the pieces, got 12 elements, exp"
    ):
        pack.join(x.view(-1), [3, 4], 1, (1, 2))
    for box in ((slice(0, 3), slice(1, 5)), (slice(0, 3),), (slice(2, 1), slice(0, 4))):
        with pytest.raises(ValueError, match="pack: a box does not lie in the tensor"):
            pack.pack(x, [box])
    with pytest.raises(
        ValueError, match="unpack: flat does not hold the pieces, got 12 elements, exp"
    ):
        pack.unpack(x.view(-1), x, [(slice(0, 1), slice(0, 4))])
    assert gpu.launches == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_kernels_on_a_gpu() -> None:
    rng = random.Random(0)
    for dtype in DTYPES:
        x = numbered(dtype, 24 * 1000 * 20).view(24, 1000, 20)
        for view in (x, x.transpose(0, 1), x[:, 1:, 3:17]):
            dim = rng.randrange(3)
            n = view.shape[dim]
            sizes = (n // 3, 0, 1, n - n // 3 - 1)
            on = (
                view.cuda()
                if view is x
                else x.cuda().as_strided_(
                    view.shape, view.stride(), view.storage_offset()
                )
            )
            flat = pack.cut(on, dim, sizes)
            assert torch.equal(bits(flat.cpu()), bits(pack.cut(view, dim, sizes)))
            joined = pack.join(flat, view.shape, dim, sizes)
            assert torch.equal(bits(joined.cpu()), bits(view))
