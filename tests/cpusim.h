// Runs CUDA C++ on the CPU, for tests: included before the source of the kernels.
//
// Blocks run one after another. The threads of a block are fibers: each runs until it
// ends or waits at a barrier, in an order that the seed shuffles anew after each one.
// A launch returns what went wrong: SKIPPED_BARRIER where a barrier was left to the
// threads that had not ended, DIVERGED where threads waited at unlike barriers.
//
// It does not show: races between blocks, the memory model, coalescing, alignment,
// fused multiply-adds, launch limits. Inline PTX and tensor cores do not run here.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define CPUSIM 1
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict
// extern __shared__ has no counterpart; a kernel says DYNAMIC_SHARED(float, s) under
// CPUSIM and `extern __shared__ float s[]` elsewhere.
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(sim::dynamic())

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct uint3 {
  unsigned x, y, z;
};

namespace sim {

enum Wait { NONE, AT_BLOCK, AT_WARP };
enum Fault { SKIPPED_BARRIER = 1, DIVERGED = 2 };
constexpr size_t STACK = 64 << 10;
constexpr int WARP = 32;

// What is running: one launch at a time, one block of it, one thread of that.
struct State {
  uint3 thread, index;
  dim3 size, grid;
  int threads = 0, current = 0, faults = 0;
  unsigned seed = 0;
  ucontext_t scheduler;
  std::vector<ucontext_t> fibers;
  std::vector<char> stacks, dynamic;
  std::vector<Wait> waits;
  std::vector<char> ended;
  std::vector<uint64_t> exchanged;
  std::vector<int> order;
  std::function<void()> body;
};
inline State block;

inline char* dynamic() { return block.dynamic.data(); }

inline void fiber() {
  block.body();
  block.ended[block.current] = 1;
  swapcontext(&block.fibers[block.current], &block.scheduler);
}

inline void wait(Wait why) {
  block.waits[block.current] = why;
  swapcontext(&block.fibers[block.current], &block.scheduler);
}

inline void shuffle() {
  if (!block.seed) return;
  for (int i = block.threads - 1; i > 0; --i) {
    block.seed = block.seed * 1664525u + 1013904223u;
    std::swap(block.order[i], block.order[(block.seed >> 8) % (i + 1)]);
  }
}

// Lets the warps go on whose threads have all come; returns whether any did.
inline bool release_warps() {
  bool any = false;
  for (int first = 0; first < block.threads; first += WARP) {
    int last = std::min(block.threads, first + WARP), alive = 0, come = 0;
    for (int i = first; i < last; ++i) {
      alive += !block.ended[i];
      come += !block.ended[i] && block.waits[i] == AT_WARP;
    }
    if (!come || come != alive) continue;
    for (int i = first; i < last; ++i) block.waits[i] = NONE;
    any = true;
  }
  return any;
}

inline void run_block() {
  const int n = block.threads;
  block.waits.assign(n, NONE);
  block.ended.assign(n, 0);
  block.exchanged.assign(n, 0);
  std::fill(block.dynamic.begin(), block.dynamic.end(), static_cast<char>(0xcd));
  for (int i = 0; i < n; ++i) {
    block.order[i] = i;
    getcontext(&block.fibers[i]);
    block.fibers[i].uc_stack.ss_sp = block.stacks.data() + i * STACK;
    block.fibers[i].uc_stack.ss_size = STACK;
    block.fibers[i].uc_link = nullptr;
    makecontext(&block.fibers[i], fiber, 0);
  }
  for (;;) {
    shuffle();
    for (int i : block.order) {
      if (block.ended[i] || block.waits[i] != NONE) continue;
      block.current = i;
      const unsigned x = block.size.x, y = block.size.y, t = i;
      block.thread = {t % x, t / x % y, t / (x * y)};
      swapcontext(&block.scheduler, &block.fibers[i]);
    }
    int alive = 0, come = 0;
    for (int i = 0; i < n; ++i) {
      alive += !block.ended[i];
      come += !block.ended[i] && block.waits[i] == AT_BLOCK;
    }
    if (!alive) return;
    if (release_warps()) continue;
    if (come != alive)
      block.faults |= DIVERGED;
    else if (alive != n)
      block.faults |= SKIPPED_BARRIER;
    block.waits.assign(n, NONE);
  }
}

inline int launch(const unsigned* shape, size_t shared, unsigned seed,
                  std::function<void()> body) {
  block.grid = dim3(shape[0], shape[1], shape[2]);
  block.size = dim3(shape[3], shape[4], shape[5]);
  block.threads = block.size.x * block.size.y * block.size.z;
  block.faults = 0;
  block.seed = seed;
  block.fibers.resize(block.threads);
  block.stacks.resize(block.threads * STACK);
  block.order.resize(block.threads);
  block.dynamic.resize(shared + 64);
  block.body = std::move(body);
  for (unsigned z = 0; z < block.grid.z; ++z)
    for (unsigned y = 0; y < block.grid.y; ++y)
      for (unsigned x = 0; x < block.grid.x; ++x) {
        block.index = {x, y, z};
        run_block();
      }
  return block.faults;
}

// A barrier: what belongs to this thread is as before afterwards.
inline void barrier(Wait why) {
  const uint3 thread = block.thread;
  const int current = block.current;
  wait(why);
  block.thread = thread;
  block.current = current;
}

inline int lane() { return block.current % WARP; }

// What the thread of another lane of this warp gave; its own where there is none.
template <class T>
T exchange(T value, int source) {
  static_assert(sizeof(T) <= 8, "lanes exchange up to 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  block.exchanged[block.current] = bits;
  barrier(AT_WARP);
  const int other = block.current - lane() + source;
  if (source >= 0 && source < WARP && other < block.threads)
    bits = block.exchanged[other];
  barrier(AT_WARP);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace sim

#define threadIdx (sim::block.thread)
#define blockIdx (sim::block.index)
#define blockDim (sim::block.size)
#define gridDim (sim::block.grid)
static const int warpSize = sim::WARP;

// ---- barriers and warps -------------------------------------------------------------
inline void __syncthreads() { sim::barrier(sim::AT_BLOCK); }
inline void __syncwarp(unsigned = ~0u) { sim::barrier(sim::AT_WARP); }
inline void __threadfence() {}
template <class T>
T __shfl_sync(unsigned, T v, int source, int width = 32) {
  return sim::exchange(v, (sim::lane() & ~(width - 1)) + (source & (width - 1)));
}
template <class T>
T __shfl_down_sync(unsigned, T v, int by, int width = 32) {
  const int l = sim::lane();
  return sim::exchange(v, (l & (width - 1)) + by < width ? l + by : l);
}
template <class T>
T __shfl_up_sync(unsigned, T v, int by, int width = 32) {
  const int l = sim::lane();
  return sim::exchange(v, (l & (width - 1)) - by >= 0 ? l - by : l);
}
template <class T>
T __shfl_xor_sync(unsigned, T v, int mask, int = 32) {
  return sim::exchange(v, sim::lane() ^ mask);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  sim::block.exchanged[sim::block.current] = predicate != 0;
  sim::barrier(sim::AT_WARP);
  unsigned found = 0;
  const int first = sim::block.current - sim::lane();
  for (int i = 0; i < sim::WARP && first + i < sim::block.threads; ++i)
    found |= static_cast<unsigned>(sim::block.exchanged[first + i]) << i;
  sim::barrier(sim::AT_WARP);
  return found;
}

// ---- atomics: one thread runs at a time ---------------------------------------------
template <class T>
T atomicAdd(T* p, T v) {
  const T old = *p;
  *p = old + v;
  return old;
}
template <class T>
T atomicMax(T* p, T v) {
  const T old = *p;
  *p = std::max(old, v);
  return old;
}
template <class T>
T atomicMin(T* p, T v) {
  const T old = *p;
  *p = std::min(old, v);
  return old;
}
template <class T>
T __ldg(const T* p) {
  return *p;
}

// ---- arithmetic; the compiler must not fuse (-ffp-contract=off) ---------------------
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline double __ll2double_rn(long long x) { return static_cast<double>(x); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

// ---- bits ---------------------------------------------------------------------------
template <class To, class From>
To reinterpreted(From x) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline int __float_as_int(float x) { return reinterpreted<int>(x); }
inline unsigned __float_as_uint(float x) { return reinterpreted<unsigned>(x); }
inline float __int_as_float(int x) { return reinterpreted<float>(x); }
inline float __uint_as_float(unsigned x) { return reinterpreted<float>(x); }
inline long long __double_as_longlong(double x) { return reinterpreted<long long>(x); }
inline double __longlong_as_double(long long x) { return reinterpreted<double>(x); }

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
