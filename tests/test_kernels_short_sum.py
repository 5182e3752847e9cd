"""Sums in 16 bits: torch's path against every bit, and the kernels on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_shim import Module, build

from dtensor.kernels import short_sum
from dtensor.kernels.short_sum import sum_short

DTYPES = (torch.bfloat16, torch.float16)
ALL = torch.arange(1 << 16).to(torch.uint16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits, but for which NaN a NaN is."""
    bits = [torch.where(x.isnan(), 0x7FFF, x.view(torch.int16)) for x in (a, b)]
    return a.shape == b.shape and torch.equal(*bits)


def plain(pieces: torch.Tensor) -> torch.Tensor:
    """The sum in float32, addend by addend, and rounded by the law."""
    total = pieces[0].float()
    for piece in pieces[1:]:
        total = total + piece.float()
    return rounded(total, pieces.dtype)


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To nearest, ties to even, from first principles: the nearest of all numbers."""
    values = ALL.view(dtype).double()
    kept = values[values.isfinite() & ~values.signbit()].sort().values
    # Beyond the middle between the largest and the next power of two is infinity.
    top = kept[-1] + (kept[-1] - kept[-2])
    grid = torch.cat([kept, top[None]])
    size = x.double().abs()
    size = torch.where(size.isnan(), 0, size).clamp(max=float(top))
    above = torch.searchsorted(grid, size).clamp(max=len(grid) - 1)
    below = (above - 1).clamp(min=0)
    up, down = grid[above] - size, size - grid[below]
    nearest = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    bits = torch.where(x.isnan(), 0x7FFF, nearest)  # the number on the grid is its bits
    bits = torch.where(x.signbit(), bits + (1 << 15), bits)
    return bits.to(torch.uint16).view(dtype)


def random_bits(n: int, m: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 1 << 16, (n, m), generator=source)
    return found.to(torch.uint16).view(dtype)


@st.composite
def addends(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    n, m = draw(st.integers(1, 5)), draw(st.integers(0, 40))
    seed = draw(st.integers(0, 2**31))
    offset = draw(st.sampled_from([0, 1, 8]))
    space = draw(st.sampled_from([0, 1, 3, 8]))
    kind = draw(st.sampled_from(["bits", "near", "small"]))
    if kind == "bits":
        x = random_bits(n, m + space, dtype, seed)
    else:
        x = torch.randn(n, m + space, generator=torch.Generator().manual_seed(seed))
        x = (x * (1 if kind == "near" else 1e-7)).to(dtype)
    whole = torch.zeros(x.numel() + offset, dtype=dtype)
    whole[offset:] = x.view(-1)
    return whole[offset:].view(n, m + space)[:, :m]


# ---- torch's path --------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_addend_is_itself(dtype: torch.dtype) -> None:
    x = ALL.view(dtype)
    assert same(sum_short([x]), x)
    assert same(rounded(x.float(), dtype), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_pairs_of_some_numbers(dtype: torch.dtype) -> None:
    x = ALL.view(dtype)
    some = ALL[::997].view(dtype)
    pieces = torch.stack([x.repeat(len(some)), some.repeat_interleave(len(x))])
    assert same(sum_short(pieces), plain(pieces))


@settings(deadline=None)
@given(addends())
def test_sums(x: torch.Tensor) -> None:
    before = x.clone()
    assert same(sum_short(x), plain(x))
    assert same(sum_short(list(x)), plain(x))
    assert same(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_blocks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 1000).to(dtype)
    wanted = sum_short(x)
    for block in (1, 7, 999, 1000):
        monkeypatch.setattr(short_sum, "BLOCK", block)
        assert same(sum_short(x), wanted)


def test_rounded_once_and_in_order() -> None:
    x = torch.tensor([256.0] + [1.0] * 4, dtype=torch.bfloat16)[:, None]
    assert sum_short(x).item() == 260  # in bfloat16, 256 + 1 is 256
    y = torch.tensor([1.0, 2.0**30, -(2.0**30)], dtype=torch.bfloat16)[:, None]
    assert sum_short(y).item() == 0 and sum_short(y.flip(0)).item() == 1
    half = torch.tensor([60000.0, 60000.0, -60000.0], dtype=torch.float16)[:, None]
    assert sum_short(half).item() == 60000  # in between it is beyond the largest
    assert sum_short(half[:2]).item() == float("inf")


def test_shapes_and_out() -> None:
    x = torch.randn(3, 4, 5).bfloat16()
    out = torch.empty(4, 5, dtype=torch.bfloat16)
    assert sum_short(x, out) is out
    assert same(out.view(-1), sum_short(x.view(3, 20)))
    turned = [p.t() for p in torch.randn(3, 5, 4).bfloat16()]
    assert same(sum_short(turned), sum_short(torch.stack(turned)))
    assert sum_short(turned).is_contiguous()
    wanted = sum_short(x)
    assert sum_short(list(x), x[1]).data_ptr() == x[1].data_ptr()
    assert same(x[1], wanted)
    assert sum_short(torch.zeros(2, 0, dtype=torch.float16)).shape == (0,)
    w = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    assert not sum_short(w).requires_grad


def test_what_does_not_fit() -> None:
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="sum_short: there is nothing to add, got no"):
        sum_short([])
    with pytest.raises(TypeError, match="sum_short: the addends are no short floats"):
        sum_short([torch.zeros(3)])
    for other in (x[0, :2], x[0].half(), x[0].to("meta")):
        with pytest.raises(ValueError, match="sum_short: the addends differ, got"):
            sum_short([x[0], other])
    for out in (x[0, :2], x[0].half(), x.repeat(2, 2)[:3, 0]):
        with pytest.raises(ValueError, match="sum_short: the sum does not fit into"):
            sum_short(x, out)


# ---- the kernels, on the CPU ---------------------------------------------------------
class Gpu:
    """Stands for CuPy: launches go to the kernels built for the CPU."""

    def __init__(self, kernels: Module) -> None:
        self.kernels = kernels
        self.seed = 0
        self.module = lambda name: SimpleNamespace(get_function=str)

    def launch(
        self, name: str, blocks: int, threads: int, args: Any, device: torch.device
    ) -> None:
        kinds = [torch.Tensor, np.int64, np.uint64, torch.Tensor, np.uint64]
        assert [type(a) for a in args] == kinds
        assert blocks > 0 and device.type == "cpu"
        self.seed += 1
        rows, step, n, out, count = args
        given = (rows, int(step), int(n), out, int(count))
        getattr(self.kernels, name)((blocks,), (threads,), *given, seed=self.seed)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu(build(short_sum.SOURCE))
    monkeypatch.setattr(short_sum, "cuda", gpu)
    monkeypatch.setattr(short_sum, "_on_gpu", lambda x: True)
    return gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_keeps_one_addend(dtype: torch.dtype, gpu: Gpu) -> None:
    x = ALL.view(dtype)
    assert same(sum_short([x]), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_rounds_as_torch(dtype: torch.dtype, gpu: Gpu) -> None:
    x = random_bits(2, 1 << 17, dtype, 1)
    y = (torch.randn(2, 1 << 16) * torch.logspace(-9, 5, 1 << 16)).to(dtype)
    for pieces in (x, y):
        assert same(sum_short(pieces), plain(pieces))


def test_the_kernel_sums(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_sum, "THREADS", 32)
    monkeypatch.setattr(short_sum, "MOST_BLOCKS", 2)

    @settings(max_examples=200, deadline=None)
    @given(addends())
    @example(torch.randn(3, 2000).half())
    @example(torch.randn(3, 2003).bfloat16())
    def check(x: torch.Tensor) -> None:
        before = x.clone()
        wanted = plain(x)
        assert same(sum_short(x), wanted)
        assert same(sum_short(list(x)), wanted)
        assert same(sum_short(list(x.flip(0))[::-1]), wanted)  # a negative distance
        assert same(x, before)

    check()
    assert gpu.seed > 300


def test_the_kernel_takes_rows_at_any_distance(gpu: Gpu) -> None:
    x = torch.randn(9, 24).bfloat16()
    for order in ([0, 1, 5], [4, 2, 0], [3, 3, 3], [7, 0]):
        pieces = [x[i] for i in order]
        assert same(sum_short(pieces), plain(torch.stack(pieces)))
    wanted = plain(x[:3])
    sum_short(list(x[:3]), x[1])
    assert same(x[1], wanted)


def test_the_kernel_does_nothing_where_there_is_nothing(gpu: Gpu) -> None:
    x = torch.ones(16, dtype=torch.bfloat16)
    out = torch.zeros(16, dtype=torch.bfloat16)
    gpu.kernels.sum_bfloat16((1,), (32,), x, 0, 0, out, 16)
    gpu.kernels.sum_bfloat16((2,), (32,), x, 0, 1, out, 0)
    assert not out.any()
    gpu.kernels.sum_bfloat16((2,), (32,), x, 0, 1, out, 11)
    assert out.tolist() == [1.0] * 11 + [0.0] * 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_on_a_gpu(dtype: torch.dtype) -> None:
    for n, m in ((1, 1 << 16), (2, 100003), (7, 100000)):
        x = random_bits(n, m, dtype, n)
        assert same(sum_short(x.cuda()).cpu(), sum_short(x))
        assert same(sum_short(list(x.cuda())).cpu(), sum_short(x))
