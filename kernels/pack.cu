// Boxes of a tensor to and from stretches of a buffer, all of them in one launch.
//
// Header-free CUDA C++: NVRTC and nvcc compile it for a GPU, g++ under tests/cpusim.h
// for the tests. Everything counts in bytes, so one kernel moves every dtype. A box is a
// run of bytes that lie together, repeated along four levels, the outermost first: byte
// (i0, i1, i2, i3, c) lies at base + i0 s0 + i1 s1 + i2 s2 + i3 s3 + c in the tensor, and
// the bytes follow each other in that order in the buffer. Levels that are not there
// have the length 1 and the stride 0.

typedef unsigned long long u64;
typedef unsigned int u32;

#ifndef TILE
#define TILE 16384  // bytes of a box that one block moves; as in pack.py
#endif
#define BATCH 4  // words that a thread has under way

struct alignas(16) Quad {
  u32 a, b, c, d;
};

// One row of the table, as pack.py makes it.
struct Box {
  u64 first;  // number of the block that moves its first tile
  u64 base;   // where it begins in the tensor
  u64 start;  // where it begins in the buffer
  u64 bytes;  // in all, not zero
  u64 run, n1, n2, n3;
  u64 s0, s1, s2, s3;
};

__device__ inline u64 place(const Box& b, u64 row) {
  if (row < b.n3) return row * b.s3;  // one level beside the run: no divisions
  const u64 outer = row / b.n3, inner = row % b.n3 * b.s3;
  if (outer < b.n2) return outer * b.s2 + inner;
  const u64 most = outer / b.n2;
  return most / b.n1 * b.s0 + most % b.n1 * b.s1 + outer % b.n2 * b.s2 + inner;
}

// The bytes from begin to end of a box, in words that all its addresses allow.
template <class Word, bool PACK>
__device__ inline void move(const Box& b, char* tensor, char* buffer, u64 begin,
                            u64 end) {
  const u64 run = b.run / sizeof(Word), stop = end / sizeof(Word);
  Word* flat = (Word*)buffer;
  u64 at = begin / sizeof(Word) + threadIdx.x;
  if (at >= stop) return;
  u64 row = at / run, column = at % run;
  const u64 down = blockDim.x / run, across = blockDim.x % run;
  for (; at < stop; at += BATCH * blockDim.x) {
    Word held[BATCH];
    u64 where[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      where[k] = place(b, row) + column * sizeof(Word);
      row += down;
      column += across;
      if (column >= run) {
        column -= run;
        ++row;
      }
    }
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      const u64 to = at + k * blockDim.x;
      if (to < stop) held[k] = PACK ? *(Word*)(tensor + where[k]) : flat[to];
    }
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      const u64 to = at + k * blockDim.x;
      if (to < stop) (PACK ? flat[to] : *(Word*)(tensor + where[k])) = held[k];
    }
  }
}

template <bool PACK>
__device__ inline void move_tile(char* tensor, char* buffer, const u64* table,
                                 u64 boxes) {
  if (boxes == 0) return;
  const Box* all = (const Box*)table;
  u64 low = 0, high = boxes;  // the last box whose first block is not beyond this one
  while (high - low > 1) {
    const u64 middle = (low + high) / 2;
    if (all[middle].first <= blockIdx.x)
      low = middle;
    else
      high = middle;
  }
  const Box b = all[low];
  const u64 begin = (blockIdx.x - b.first) * TILE;
  if (begin >= b.bytes) return;
  const u64 end = b.bytes - begin < TILE ? b.bytes : begin + TILE;
  tensor += b.base;
  buffer += b.start;
  // The lowest bit that is set: what every word of this box is aligned to.
  const u64 bits = (u64)tensor | (u64)buffer | b.run | b.s0 | b.s1 | b.s2 | b.s3;
  if (bits % 16 == 0)
    move<Quad, PACK>(b, tensor, buffer, begin, end);
  else if (bits % 8 == 0)
    move<u64, PACK>(b, tensor, buffer, begin, end);
  else if (bits % 4 == 0)
    move<u32, PACK>(b, tensor, buffer, begin, end);
  else if (bits % 2 == 0)
    move<unsigned short, PACK>(b, tensor, buffer, begin, end);
  else
    move<unsigned char, PACK>(b, tensor, buffer, begin, end);
}

extern "C" __global__ void __launch_bounds__(256)
    pack(char* tensor, char* buffer, const u64* table, u64 boxes) {
  move_tile<true>(tensor, buffer, table, boxes);
}

extern "C" __global__ void __launch_bounds__(256)
    unpack(char* tensor, char* buffer, const u64* table, u64 boxes) {
  move_tile<false>(tensor, buffer, table, boxes);
}
