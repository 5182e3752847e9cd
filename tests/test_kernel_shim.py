"""The shim that runs CUDA kernels on the CPU is right, and finds planted bugs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernel_shim import KernelFault, Module, build

SOURCE = """
#ifdef CPUSIM
#define SHARED_FLOATS(name) DYNAMIC_SHARED(float, name)
#else
#define SHARED_FLOATS(name) extern __shared__ float name[]
#endif
typedef unsigned long long u64;

extern "C" __global__ void scale(const float* __restrict__ x, float* y, float by, u64 n) {
  for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    y[i] = by * x[i];
}

extern "C" __global__ void block_sum(const float* x, float* out, int n) {
  __shared__ float part[32];
  float v = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    v += x[i];
  for (int d = 16; d; d >>= 1) v += __shfl_down_sync(~0u, v, d);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x < 32) {
    v = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0;
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    if (!threadIdx.x) atomicAdd(out, v);
  }
}

extern "C" __global__ void transpose(const float* in, float* out, int h, int w) {
  __shared__ float tile[16][17];
  int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
  if (x < w && y < h) tile[threadIdx.y][threadIdx.x] = in[y * w + x];
#ifndef NO_BARRIER
  __syncthreads();
#endif
  x = blockIdx.y * 16 + threadIdx.x, y = blockIdx.x * 16 + threadIdx.y;
  if (x < h && y < w) out[y * h + x] = tile[threadIdx.x][threadIdx.y];
}

extern "C" __global__ void reverse(float* x) {
  SHARED_FLOATS(s);
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void votes(int* out) {
  out[threadIdx.x] = __ballot_sync(~0u, threadIdx.x % 3 == 0);
}

extern "C" __global__ void left_early(int n) {
  if (threadIdx.x >= n) return;
  __syncthreads();
}

extern "C" __global__ void two_barriers(int n) {
  if (threadIdx.x % 2) __syncthreads(); else __syncwarp();
}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernels") / "kernels.cu"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def kernels(source: Path) -> Module:
    return build(source)


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_kernels_run_right_in_any_order(kernels: Module, seed: int) -> None:
    x = torch.arange(1000.0)
    y = torch.empty(1000)
    kernels.scale((3,), (64,), x, y, 2.5, 1000, seed=seed)
    assert torch.equal(y, x * 2.5)
    out = torch.zeros(1)
    kernels.block_sum((2,), (128,), x, out, 1000, seed=seed)
    assert out.item() == x.sum().item()
    a = torch.randn(40, 23)
    b = torch.empty(23, 40)
    kernels.transpose((2, 3), (16, 16), a, b, 40, 23, seed=seed)
    assert torch.equal(b, a.T)
    r = torch.arange(48.0)
    kernels.reverse((1,), (48,), r, seed=seed, shared=4 * 48)
    assert torch.equal(r, torch.arange(48.0).flip(0))
    v = torch.zeros(40, dtype=torch.int32)
    kernels.votes((1,), (40,), v, seed=seed)
    ones = [
        sum(1 << i % 32 for i in w if i % 3 == 0) for w in (range(32), range(32, 40))
    ]
    assert v.tolist() == [ones[0]] * 32 + [ones[1]] * 8


@pytest.mark.parametrize("seed", [1, 7])
def test_a_missing_barrier_gives_wrong_values(source: Path, seed: int) -> None:
    broken = build(source, ("NO_BARRIER",))
    a, b = torch.randn(40, 23), torch.zeros(23, 40)
    broken.transpose((2, 3), (16, 16), a, b, 40, 23, seed=seed)
    assert not torch.equal(b, a.T)


def test_barriers_that_do_not_fit_are_faults(kernels: Module) -> None:
    kernels.left_early((1,), (64,), 64)
    with pytest.raises(KernelFault, match="left_early: a barrier that some threads do"):
        kernels.left_early((1,), (64,), 10)
    with pytest.raises(KernelFault, match="two_barriers: threads that wait at unlike"):
        kernels.two_barriers((1,), (64,), 0)


def test_arguments_are_checked(kernels: Module) -> None:
    x = torch.zeros(4)
    with pytest.raises(TypeError, match="scale: got 3 arguments, expected const float"):
        kernels.scale((1,), (4,), x, x, 1.0)
    with pytest.raises(
        TypeError, match=r"got float for 'const float \* __restrict__ x'"
    ):
        kernels.scale((1,), (4,), 1.0, x, 1.0, 4)
    with pytest.raises(TypeError, match="got Tensor for 'float by'"):
        kernels.scale((1,), (4,), x, x, x, 4)
    with pytest.raises(ValueError, match="must be contiguous"):
        kernels.reverse((1,), (4,), torch.zeros(4, 2)[:, 0])
    with pytest.raises(AttributeError, match="no kernel 'missing', expected one of"):
        kernels.missing((1,), (1,))
