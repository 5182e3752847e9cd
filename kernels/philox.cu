// Philox4x64-10 by (seed, call, global element index): as philox.py and samples.py.
//
// Header-free CUDA C++: NVRTC and nvcc compile it for a GPU, g++ under tests/cpusim.h
// for the tests. Every operation on floating numbers is rounded by itself (the _rn
// functions are never fused), in the order of samples.py, so the values are the CPU's,
// bit by bit.
//
// All kernels take the same arguments. The elements lie along four levels, the
// outermost first; element (i0, i1, i2, i3) has the global index
// base + i0 s0 + i1 s1 + i2 s2 + i3.

typedef unsigned long long u64;
typedef unsigned int u32;

// ---- the generator ------------------------------------------------------------------
struct Block {
  u64 word[4];
};

__device__ inline Block philox(u64 seed, u64 call, u64 block) {
  const u64 m0 = 0xD2E7470EE14C6C93ull, m1 = 0xCA5A826395121157ull;
  Block c = {{block + 1, 0, 0, 0}};  // numpy's first block has the counter 1
  for (int round = 0; round < 10; ++round) {
    u64 high0 = __umul64hi(m0, c.word[0]), low0 = m0 * c.word[0];
    u64 high1 = __umul64hi(m1, c.word[2]), low1 = m1 * c.word[2];
    c.word[0] = high1 ^ c.word[1] ^ seed;
    c.word[1] = low1;
    c.word[2] = high0 ^ c.word[3] ^ call;
    c.word[3] = low0;
    seed += 0x9E3779B97F4A7C15ull;
    call += 0xBB67AE8584CAA73Bull;
  }
  return c;
}

__device__ inline u32 lane32(const Block& b, u64 index) {
  u64 word = b.word[index / 2 % 4];
  return index % 2 ? (u32)(word >> 32) : (u32)word;
}

__device__ inline u64 lane64(const Block& b, u64 index) { return b.word[index % 4]; }

// ---- arithmetic, each step rounded --------------------------------------------------
__device__ inline float add(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double add(double a, double b) { return __dadd_rn(a, b); }
__device__ inline float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double mul(double a, double b) { return __dmul_rn(a, b); }
__device__ inline float divide(float a, float b) { return __fdiv_rn(a, b); }
__device__ inline double divide(double a, double b) { return __ddiv_rn(a, b); }
__device__ inline float root(float a) { return __fsqrt_rn(a); }
__device__ inline double root(double a) { return __dsqrt_rn(a); }

#define PI 3.141592653589793
#define LN2 0.6931471805599453

// 1 + c[0] z + c[1] z**2 + ...; the coefficients are rounded from double.
template <class F>
__device__ inline F horner(F z, const double* c, int terms) {
  F total = mul(z, (F)c[terms - 1]);
  for (int k = terms - 2; k >= 0; --k) total = mul(add(total, (F)c[k]), z);
  return add(total, (F)1);
}

template <class F>
__device__ inline F log_series(F z) {  // of artanh(s) / s, z = s * s
  const double c[] = {1.0 / 3, 1.0 / 5, 1.0 / 7, 1.0 / 9, 1.0 / 11,
                      1.0 / 13, 1.0 / 15, 1.0 / 17, 1.0 / 19, 1.0 / 21};
  return horner(z, c, sizeof(F) == 4 ? 4 : 10);
}

template <class F>
__device__ inline void sine_cosine(F y, F* sine, F* cosine) {
  const double s[] = {-1.0 / 6.0, 1.0 / 120.0, -1.0 / 5040.0, 1.0 / 362880.0,
                      -1.0 / 39916800.0, 1.0 / 6227020800.0, -1.0 / 1307674368000.0,
                      1.0 / 355687428096000.0, -1.0 / 121645100408832000.0,
                      1.0 / 51090942171709440000.0};
  const double c[] = {-1.0 / 2.0, 1.0 / 24.0, -1.0 / 720.0, 1.0 / 40320.0,
                      -1.0 / 3628800.0, 1.0 / 479001600.0, -1.0 / 87178291200.0,
                      1.0 / 20922789888000.0, -1.0 / 6402373705728000.0,
                      1.0 / 2432902008176640000.0};
  const int terms = sizeof(F) == 4 ? 6 : 10;
  F z = mul(y, y);
  *sine = mul(horner(z, s, terms), y);
  *cosine = horner(z, c, terms);
}

// ---- uniform ------------------------------------------------------------------------
__device__ inline float uniform(u32 lane, int digits) {
  return mul((float)(int)(lane >> (32 - digits)), (float)(1.0 / (1 << digits)));
}

__device__ inline double uniform53(u64 lane) {
  return mul((double)(long long)(lane >> 11), 1.0 / 9007199254740992.0);
}

// ---- exponential: minus the logarithm of a number in (0, 1] -------------------------
__device__ inline float minus_log(u32 lane) {
  int bits = __float_as_int(__int2float_rn((int)((lane & 0x7FFFFFFFu) | 1u)));
  int exponent = (bits - 0x3F3504F3) >> 23;
  float m = __int_as_float((int)((u32)bits - ((u32)exponent << 23)));
  float s = divide(add(m, -1.0f), add(m, 1.0f));
  float log = mul(log_series(mul(s, s)), mul(s, 2.0f));
  return add(mul(__int2float_rn(exponent - 31), (float)-LN2), -log);
}

__device__ inline double minus_log(u64 lane) {
  double odd = __ll2double_rn((long long)((lane >> 11) | 1ull));
  long long bits = __double_as_longlong(odd);
  long long exponent = (bits - 0x3FE6A09E667F3BCDll) >> 52;
  double m = __longlong_as_double((long long)((u64)bits - ((u64)exponent << 52)));
  double s = divide(add(m, -1.0), add(m, 1.0));
  double log = mul(log_series(mul(s, s)), mul(s, 2.0));
  return add(mul(__ll2double_rn(exponent - 53), -LN2), -log);
}

// ---- normal: Box and Muller, a radius and an angle for a pair of elements -----------
__device__ inline float normal(u32 first, u32 second, bool odd) {
  float radius = root(mul(minus_log(first), 2.0f));
  if (second & 0x80000000u) radius = -radius;
  float y = __int2float_rn((int)(second & 0x7FFFFFFFu) - (1 << 30));
  float sine, cosine;
  sine_cosine(mul(y, (float)(PI / 2147483648.0)), &sine, &cosine);
  return mul(radius, odd ? sine : cosine);
}

__device__ inline double normal(u64 first, u64 second, bool odd) {
  double radius = root(mul(minus_log(first), 2.0));
  if (second >> 63) radius = -radius;
  double y = __ll2double_rn((long long)(second << 1 >> 1) - (1ll << 62));
  double sine, cosine;
  sine_cosine(mul(y, PI / 9223372036854775808.0), &sine, &cosine);
  return mul(radius, odd ? sine : cosine);
}

// ---- Cauchy: the tangent of an angle ------------------------------------------------
template <class F>
__device__ inline F tangent(long long size, int top, bool negative) {
  const bool steep = size > 1ll << (top - 2);
  const long long near = steep ? (1ll << (top - 1)) - size : size;
  const F scale = (F)(top == 31 ? PI / 2147483648.0 : PI / 9223372036854775808.0);
  F y = sizeof(F) == 4 ? (F)__int2float_rn((int)near) : (F)__ll2double_rn(near);
  F sine, cosine;
  sine_cosine(mul(y, scale), &sine, &cosine);
  F out = steep ? divide(cosine, sine) : divide(sine, cosine);
  return negative ? -out : out;
}

__device__ inline float cauchy(u32 lane) {
  int t = (int)((lane & 0x7FFFFFFFu) | 1u) - (1 << 30);
  return tangent<float>(t < 0 ? -t : t, 31, t < 0);
}

__device__ inline double cauchy(u64 lane) {
  long long t = (long long)((lane << 1 >> 1) | 1ull) - (1ll << 62);
  return tangent<double>(t < 0 ? -t : t, 63, t < 0);
}

// ---- where an element lies ----------------------------------------------------------
__device__ inline u64 global_index(u64 at, u64 base, u64 n1, u64 n2, u64 n3, u64 s0,
                                   u64 s1, u64 s2) {
  if (at < n3) return base + at;  // one run: no divisions
  u64 outer = at / n3;
  return base + at % n3 + outer % n2 * s2 + outer / n2 % n1 * s1 + outer / n2 / n1 * s0;
}

// ---- the kernels --------------------------------------------------------------------
// A thread makes eight consecutive elements, so that a block is made once where they
// lie together.
#define KERNEL(NAME, TYPE, LANES, VALUE)                                               \
  extern "C" __global__ void NAME(TYPE* out, u64 count, u64 seed, u64 call, u64 base,  \
                                  u64 n1, u64 n2, u64 n3, u64 s0, u64 s1, u64 s2) {    \
    u64 made = ~0ull;                                                                  \
    Block b;                                                                           \
    u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8;                      \
    for (; first < count; first += (u64)gridDim.x * blockDim.x * 8) {                  \
      for (u64 at = first; at < count && at < first + 8; ++at) {                       \
        u64 g = global_index(at, base, n1, n2, n3, s0, s1, s2);                        \
        if (g / LANES != made) b = philox(seed, call, made = g / LANES);               \
        out[at] = VALUE;                                                               \
      }                                                                                \
    }                                                                                  \
  }

KERNEL(philox_word32, u32, 8, lane32(b, g))
KERNEL(philox_word64, u64, 4, lane64(b, g))
KERNEL(philox_uniform8, float, 8, uniform(lane32(b, g), 8))
KERNEL(philox_uniform11, float, 8, uniform(lane32(b, g), 11))
KERNEL(philox_uniform24, float, 8, uniform(lane32(b, g), 24))
KERNEL(philox_uniform53, double, 4, uniform53(lane64(b, g)))
KERNEL(philox_exponential32, float, 8, minus_log(lane32(b, g)))
KERNEL(philox_exponential64, double, 4, minus_log(lane64(b, g)))
KERNEL(philox_cauchy32, float, 8, cauchy(lane32(b, g)))
KERNEL(philox_cauchy64, double, 4, cauchy(lane64(b, g)))
KERNEL(philox_normal32, float, 8,
       normal(lane32(b, g & ~1ull), lane32(b, g | 1), g & 1))
KERNEL(philox_normal64, double, 4,
       normal(lane64(b, g & ~1ull), lane64(b, g | 1), g & 1))
