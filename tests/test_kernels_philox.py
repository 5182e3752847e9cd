"""The counter-based generator: known answers, addressing, values, CUDA kernels."""

from __future__ import annotations

import math
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_shim import build

from dtensor.kernels import cuda, load, philox, samples
from dtensor.kernels.philox import Region, region

KEY = (2**63 + 12345, 77)
N = 1 << 18
FLOATS = [k for k, kind in samples.KINDS.items() if kind.dtype.is_floating_point]


def made(kind: str, where: Region, key: philox.Key = KEY) -> torch.Tensor:
    out = torch.empty(where.numel, dtype=samples.KINDS[kind].dtype)
    return samples.fill(out, kind, key, where)


def line(n: int, start: int = 0) -> Region:
    return Region(start, (n,), (1,))


# ---- the generator -------------------------------------------------------------------
# Counter, key and answer: what Random123 ships for philox4x64-10.
FULL = 2**64 - 1
ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b",
    ),
    (
        (FULL,) * 4,
        (FULL, FULL),
        "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0",
    ),
    (
        (
            0x243F6A8885A308D3,
            0x13198A2E03707344,
            0xA4093822299F31D0,
            0x082EFA98EC4E6C89,
        ),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
    ),
]


@pytest.mark.parametrize("counter, key, answer", ANSWERS)
def test_numpy_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], answer: str
) -> None:
    at = sum(word << 64 * i for i, word in enumerate(counter))
    source = np.random.Philox(key=np.array(key, np.uint64), counter=(at - 1) % 2**256)
    assert [f"{w:016x}" for w in source.random_raw(4)] == answer.split()


def test_the_known_answer_by_arrays() -> None:
    words = philox.blocks_by_arrays((0, 0), np.array([-1]))  # the counter is one more
    assert [f"{w:016x}" for w in words[0]] == ANSWERS[0][2].split()


def test_streams_are_numpys_from_any_block_on() -> None:
    words = np.random.Philox(key=np.array(KEY, np.uint64)).random_raw(4 * 100)
    stream = philox.Stream(KEY)
    for block, count in ((0, 3), (3, 1), (90, 10), (2, 5), (2, 5), (0, 100)):
        wanted = words[4 * block : 4 * (block + count)]
        assert np.array_equal(stream.words(block, count), wanted)
    arrays = philox.blocks_by_arrays(KEY, np.arange(100))
    assert np.array_equal(arrays.reshape(-1), words)


def test_an_element_owns_the_bits_of_its_index() -> None:
    words = np.random.Philox(key=np.array(KEY, np.uint64)).random_raw(8)
    thirty_two = made("word32", line(16)).numpy().view(np.uint32)
    for g in range(16):
        assert thirty_two[g] == int(words[g // 2]) >> 32 * (g % 2) & 0xFFFFFFFF
    assert np.array_equal(made("word64", line(8)).numpy().view(np.uint64), words)


# ---- regions -------------------------------------------------------------------------
def block_of(rng: random.Random) -> tuple[tuple[int, ...], ...]:
    shape, offsets, sizes = [], [], []
    for _ in range(rng.randint(0, 5)):
        n = rng.choice([1, 2, 3, 5, 8, 33])
        shape.append(n)
        offset = 0 if rng.random() < 0.4 else rng.randint(0, n)
        offsets.append(offset)
        sizes.append(
            n if rng.random() < 0.4 and not offset else rng.randint(0, n - offset)
        )
    return tuple(shape), tuple(offsets), tuple(sizes)


def cut(whole: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]):
    for d, (o, n) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(d, o, n)
    return whole.reshape(-1)


@pytest.mark.parametrize("kind", ["word32", "word64", "normal32"])
@pytest.mark.parametrize("seed", range(4))
def test_a_block_is_the_same_however_it_is_made(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{kind} {seed}")
    seen = set()
    for _ in range(60):
        shape, offsets, sizes = block_of(rng)
        monkeypatch.setattr(philox, "CHUNK", 1 << 15)
        whole = made(kind, line(math.prod(shape))).reshape(shape)
        monkeypatch.setattr(philox, "CHUNK", rng.choice([16, 64, 1 << 15]))
        monkeypatch.setattr(philox, "SEEK", rng.choice([0, 1, 250]))
        monkeypatch.setattr(philox, "PIECE", rng.choice([0, 800]))
        monkeypatch.setattr(philox, "BLOCK_BY_ARRAYS", rng.choice([0.01, 8]))
        monkeypatch.setattr(philox, "ARRAYS", rng.choice([0, 10_000]))
        where = region(shape, offsets, sizes)
        seen.add(type(philox._cheapest(where, 8)))
        assert torch.equal(made(kind, where), cut(whole, offsets, sizes)), where
    assert seen == {int, str}  # merged runs and single ones


def test_a_region_has_no_more_levels_than_it_must() -> None:
    assert region((4, 6, 5), (1, 0, 0), (2, 6, 5)) == Region(30, (60,), (1,))
    assert region((4, 6, 5), (0, 0, 2), (4, 6, 1)) == Region(2, (24, 1), (5, 1))
    assert region((), (), ()) == Region(0, (1,), (1,))
    assert region((3, 4), (3, 0), (0, 4)).numel == 0


def test_pairs_of_normals_are_cut_before_they_are_made_where_they_can_be() -> None:
    assert region((6, 8), (0, 2), (6, 4)).keeps_pairs
    for block in (
        ((6, 8), (0, 1), (6, 4)),
        ((6, 9), (0, 2), (6, 4)),
        ((9,), (2,), (3,)),
    ):
        where = region(*block)
        assert not where.keeps_pairs
    rng = random.Random(0)
    for _ in range(40):
        shape = tuple(2 * rng.randint(1, 20) for _ in range(3))
        offsets = tuple(2 * rng.randint(0, n // 2) for n in shape)
        sizes = tuple(n - o for n, o in zip(shape, offsets, strict=True))
        whole = made("normal32", line(math.prod(shape))).reshape(shape)
        where = region(shape, offsets, sizes)
        assert torch.equal(made("normal32", where), cut(whole, offsets, sizes))


def test_short_runs_far_apart_are_not_made_with_all_between() -> None:
    where = region((5000, 1 << 16), (0, 7), (5000, 8))
    assert philox._cheapest(where, 8) == "arrays"
    where = region((64, 1 << 16), (0, 0), (64, 1 << 14))
    assert philox._cheapest(where, 8) == "seek"
    where = region((1 << 14, 64), (0, 16), (1 << 14, 16))
    assert philox._cheapest(where, 8) == 0
    assert philox._cheapest(line(40), 8) == 0


# ---- values --------------------------------------------------------------------------
@pytest.mark.parametrize("digits, kind", [(8, "uniform8"), (11, "uniform11")])
def test_few_digits_are_the_first_of_many(digits: int, kind: str) -> None:
    many = made("uniform24", line(N))
    assert torch.equal(made(kind, line(N)), (many * 2**digits).floor() / 2**digits)


@pytest.mark.parametrize("kind", ["uniform8", "uniform11", "uniform24", "uniform53"])
def test_uniform(kind: str) -> None:
    u = made(kind, line(N)).double()
    assert 0 <= u.min() and u.max() < 1
    if kind == "uniform24":
        numpys = np.random.Generator(np.random.Philox(key=np.array(KEY, np.uint64)))
        wanted = numpys.random(N, dtype=np.float32)
        assert np.array_equal(u.float().numpy(), wanted)
    counts = torch.histc(u, 256, 0, 1)
    chi = ((counts - N / 256) ** 2 / (N / 256)).sum()
    assert 255 - 5 * math.sqrt(510) < chi < 255 + 5 * math.sqrt(510)


@pytest.mark.parametrize("bits", [32, 64])
def test_logarithm_and_circle_are_accurate(bits: int) -> None:
    lanes = np.random.Philox(key=np.array(KEY, np.uint64)).random_raw(N)
    if bits == 32:
        lanes = lanes.view(np.uint32)
        u = ((lanes & 0x7FFFFFFF) | 1).astype(np.float64) / 2**31
    else:
        u = ((lanes >> np.uint64(11)) | np.uint64(1)).astype(np.float64) / 2**53
    ulp = 2.0**-23 if bits == 32 else 2.0**-52
    wanted = -np.log(u)
    got = samples.minus_log(lanes).astype(np.float64)
    # Near one a float32 rounds the number itself.
    assert np.abs(got - wanted).max() / ulp < 24 and got.min() >= 0
    assert (np.abs(got - wanted) / np.maximum(wanted, 1)).max() < 3 * ulp
    y = np.linspace(-math.pi / 2, math.pi / 2, 10001).astype(
        samples._floats(lanes).float
    )
    sine, cosine = samples._sine_cosine(y)
    assert np.abs(sine - np.sin(y.astype(np.float64))).max() < 2 * ulp
    assert np.abs(cosine - np.cos(y.astype(np.float64))).max() < 2 * ulp


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_e(dtype: torch.dtype) -> None:
    top, ulp = (88, 2.0**-23) if dtype == torch.float32 else (700, 2.0**-52)
    x = torch.linspace(-top + 2, top, 100001, dtype=dtype)
    got, wanted = samples.exponential_of(x.clone()).double(), x.double().exp()
    assert ((got - wanted) / wanted).abs().max() < 4 * ulp
    ends = torch.tensor([-math.inf, -2000.0, 2000.0, math.inf, math.nan], dtype=dtype)
    found = samples.exponential_of(ends).tolist()
    assert found[:4] == [0, 0, math.inf, math.inf] and math.isnan(found[4])


@pytest.mark.parametrize("bits", [32, 64])
def test_normals(bits: int) -> None:
    z = made(f"normal{bits}", line(N)).double()
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        error = (z**power).mean() - moment
        assert abs(error) < 4 * math.sqrt(spread / N), power
    steps = torch.arange(1, N + 1) / N
    distance = ((1 + torch.erf(z.sort().values / math.sqrt(2))) / 2 - steps).abs().max()
    assert distance < 1.95 / math.sqrt(N)  # Kolmogorov and Smirnov, one in a thousand
    pair = (z[0::2] * z[1::2]).mean(), (z[0::2] ** 2 * z[1::2] ** 2).mean() - 1
    assert abs(pair[0]) < 4 / math.sqrt(N / 2) and abs(pair[1]) < 12 / math.sqrt(N / 2)


@pytest.mark.parametrize("bits", [32, 64])
def test_cauchy_and_exponential(bits: int) -> None:
    steps = torch.arange(1, N + 1) / N
    c = made(f"cauchy{bits}", line(N)).double().sort().values
    assert c.isfinite().all()
    assert (0.5 + c.atan() / math.pi - steps).abs().max() < 1.95 / math.sqrt(N)
    e = made(f"exponential{bits}", line(N)).double().sort().values
    assert (1 - (-e).exp() - steps).abs().max() < 1.95 / math.sqrt(N)


def test_streams_of_like_keys_are_unlike() -> None:
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (2**63, 0)]
    found = [made("uniform24", line(N), k).double() - 0.5 for k in keys]
    for i, a in enumerate(found):
        for b in found[:i]:
            assert abs((a * b).mean() * 12) < 4 / math.sqrt(N)


def test_a_transformation_gets_the_values_piece_by_piece() -> None:
    sizes = []

    def then(u: torch.Tensor) -> torch.Tensor:
        sizes.append(u.numel())
        return u.mul_(2)

    out = samples.fill(torch.empty(N), "uniform24", KEY, line(N, 3), then)
    assert torch.equal(out, made("uniform24", line(N, 3)) * 2)
    assert len(sizes) > 1 and sum(sizes) == N


# ---- the CUDA kernels, on the CPU ----------------------------------------------------
BLOCKS = [
    ((1000,), (0,), (1000,)),
    ((7, 9, 5), (2, 0, 1), (3, 9, 3)),
    ((5, 4, 3, 2, 3), (1, 1, 1, 0, 1), (3, 2, 1, 1, 2)),
    ((6, 5, 6, 5, 6, 5), (0, 1, 0, 1, 0, 1), (6, 2, 6, 2, 6, 2)),
    ((4, 5), (1, 2), (1, 1)),
    ((30, 50), (3, 7), (20, 31)),
]


@pytest.mark.parametrize("kind", samples.KINDS)
def test_kernels_make_what_the_cpu_makes(kind: str) -> None:
    kernels = build(load.SOURCE)
    rng = random.Random(kind)
    for at, block in enumerate(BLOCKS):
        where = region(*block)
        key = (rng.getrandbits(64), rng.getrandbits(64))
        given = load.arguments(key, where)
        assert given is not None
        wanted = made(kind, where, key)
        out = torch.full_like(wanted, -1)
        kernel = getattr(kernels, f"philox_{kind}")
        kernel((rng.randint(1, 3),), (32,), out, *given, seed=at)
        assert torch.equal(out, wanted), (kind, block)
        # All the bits, which equality leaves open only for the sign of zero.
        if kind in FLOATS:
            assert torch.equal(out.signbit(), wanted.signbit())


def test_kernels_far_into_the_stream() -> None:
    where = region((1 << 33, 3), ((1 << 33) - 2, 1), (2, 2))
    out = torch.empty(4, dtype=torch.int64)
    given = load.arguments(KEY, where)
    build(load.SOURCE).philox_word64((1,), (32,), out, *(given or []))
    assert torch.equal(out, made("word64", where))


def test_too_many_levels_are_left_to_the_cpu() -> None:
    shape, sizes = (3,) * 9, (2, 3) * 4 + (2,)
    where = region(shape, (0,) * 9, sizes)
    assert len(where.sizes) == 5
    assert load.arguments(KEY, where) is None


def test_the_cpu_makes_a_sample_of_its_own() -> None:
    device = torch.device("cpu")
    got = load.sample(
        torch.Size((4, 5)), torch.bfloat16, device, "normal32", KEY, line(20)
    )
    assert torch.equal(got, made("normal32", line(20)).bfloat16().view(4, 5))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvcc_compiles_the_kernels(architecture: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    out = tmp_path / "philox.cubin"
    flags = ["-std=c++17", f"-arch={architecture}", "-cubin", "-o", str(out)]
    done = subprocess.run(
        [nvcc, *flags, str(load.SOURCE)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert out.read_bytes()[:4] == b"\x7fELF"


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvrtc_compiles_the_kernels(architecture: str) -> None:
    nvrtc = pytest.importorskip(
        "cupy_backends.cuda.libs.nvrtc", reason="needs CuPy's NVRTC"
    )
    program = nvrtc.createProgram(load.SOURCE.read_text(), "philox.cu", (), ())
    try:
        nvrtc.compileProgram(
            program, (f"-arch={architecture}", *cuda.options("philox"))
        )
        assert nvrtc.getCUBIN(program)[:4] == b"\x7fELF"
    finally:
        nvrtc.destroyProgram(program)


def test_a_launch_gives_the_kernels_what_they_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = build(load.SOURCE)

    class RawModule:
        def get_function(self, name: str) -> Any:
            return getattr(kernels, name)

    def launch(
        kernel: Any, blocks: int, threads: int, args: Any, device: torch.device
    ) -> None:
        assert args[0] is out and device == out.device
        assert all(type(a) is np.uint64 for a in args[1:])
        kernel((blocks,), (threads,), out, *map(int, args[1:]))

    monkeypatch.setattr(cuda, "launch", launch)
    where = region((40, 60), (5, 7), (30, 50))
    out = torch.zeros(where.numel)
    load._launch(RawModule(), "normal32", out, load.arguments(KEY, where) or [])
    assert torch.equal(out, made("normal32", where))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", samples.KINDS)
def test_kernels_on_a_gpu(kind: str) -> None:
    assert cuda.module("philox") is not None
    for block in BLOCKS:
        where = region(*block)
        dtype = samples.KINDS[kind].dtype
        shape, device = torch.Size((where.numel,)), torch.device("cuda")
        got = load.sample(shape, dtype, device, kind, KEY, where)
        assert torch.equal(got.cpu(), made(kind, where))
