// Sums of bfloat16 and float16, accumulated in float32 and rounded once.
//
// Header-free CUDA C++: NVRTC and nvcc compile it for a GPU, g++ under tests/cpusim.h
// for the tests. The rows are added in their order, each addition rounded to float32 by
// itself; the last rounding is to nearest, ties to even. So the values are those of
// short_sum.py, bit by bit, but for which NaN a NaN is.

typedef unsigned long long u64;
typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;

struct alignas(16) Quad {
  u32 part[4];
};

struct BFloat16 {
  static __device__ inline float wide(u32 h) { return __uint_as_float(h << 16); }
  static __device__ inline u32 narrow(float x) {
    const u32 b = __float_as_uint(x);
    if ((b & 0x7FFFFFFFu) > 0x7F800000u) return b >> 16 | 0x40u;  // NaN
    return (b + 0x7FFFu + (b >> 16 & 1u)) >> 16;  // beyond the largest comes infinity
  }
};

struct Float16 {
  static __device__ inline float wide(u32 h) {
    const u32 b = (h & 0x7FFFu) << 13;
    // The exponents differ by 112; the product is exact, for subnormals too.
    u32 size = __float_as_uint(__fmul_rn(__uint_as_float(b), 0x1p112f));
    if ((h & 0x7C00u) == 0x7C00u) size = b | 0x7F800000u;  // infinity, NaN
    return __uint_as_float(size | (h & 0x8000u) << 16);
  }
  static __device__ inline u32 narrow(float x) {
    const u32 b = __float_as_uint(x), sign = b >> 16 & 0x8000u, size = b & 0x7FFFFFFFu;
    if (size > 0x7F800000u) return sign | 0x7E00u;   // NaN
    if (size >= 0x477FF000u) return sign | 0x7C00u;  // rounds beyond the largest
    if (size < 0x38800000u) {  // subnormal: a unit in the last place of 0.5 is one
      const float sum = __fadd_rn(__uint_as_float(size), 0.5f);
      return sign | (__float_as_uint(sum) - 0x3F000000u);
    }
    return sign | (size - 0x38000000u + 0xFFFu + (size >> 13 & 1u)) >> 13;
  }
};

// Row r begins step * r bytes after the first.
template <class Short>
__device__ inline void sum(const char* rows, i64 step, u64 n, char* out, u64 count) {
  if (n == 0) return;
  const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  const u64 threads = (u64)gridDim.x * blockDim.x;
  u64 done = 0;
  if (((u64)rows | (u64)step | (u64)out) % 16 == 0) {
    const u64 quads = count / 8;
    for (u64 q = thread; q < quads; q += threads) {
      float total[8];
      const Quad first = *(const Quad*)(rows + q * 16);
#pragma unroll
      for (int k = 0; k < 8; ++k)
        total[k] = Short::wide(first.part[k / 2] >> k % 2 * 16 & 0xFFFFu);
#pragma unroll 4
      for (u64 r = 1; r < n; ++r) {
        const Quad given = *(const Quad*)(rows + (i64)r * step + q * 16);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const float x = Short::wide(given.part[k / 2] >> k % 2 * 16 & 0xFFFFu);
          total[k] = __fadd_rn(total[k], x);
        }
      }
      Quad kept;
#pragma unroll
      for (int k = 0; k < 4; ++k)
        kept.part[k] =
            Short::narrow(total[2 * k]) | Short::narrow(total[2 * k + 1]) << 16;
      *(Quad*)(out + q * 16) = kept;
    }
    done = quads * 8;
  }
  for (u64 at = done + thread; at < count; at += threads) {
    float total = Short::wide(((const u16*)rows)[at]);
    for (u64 r = 1; r < n; ++r) {
      const u16 given = ((const u16*)(rows + (i64)r * step))[at];
      total = __fadd_rn(total, Short::wide(given));
    }
    ((u16*)out)[at] = (u16)Short::narrow(total);
  }
}

extern "C" __global__ void sum_bfloat16(const char* rows, i64 step, u64 n, char* out,
                                        u64 count) {
  sum<BFloat16>(rows, step, n, out, count);
}

extern "C" __global__ void sum_float16(const char* rows, i64 step, u64 n, char* out,
                                       u64 count) {
  sum<Float16>(rows, step, n, out, count);
}
