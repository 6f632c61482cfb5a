// The baseline of the in-register reduction paper as its section 3.2 describes it, in textbook CUDA: the product of two
// 16x16 matrices to shared memory, a barrier, and a thread for each row. The three wmma calls are the instructions that
// nvcuda::wmma's functions are made of, so that this compiles without any header.
//
// With REPEATS defined, a warp does so many operations, each dependent on the one before, on the tile of its CTA; two
// tiles in shared memory take turns. That is how the ladder's rungs are timed.
#ifndef REPEATS
#define REPEATS 1
#endif
extern "C" __global__ void textbook_row_max(const unsigned short* a, const unsigned short* b, float* out,
                                            long long* cycles, unsigned zero) {
  __shared__ float tiles[REPEATS > 1 ? 2 : 1][16 * 16];
  const int of = REPEATS > 1 ? blockIdx.x : 0;
  unsigned a0, a1, a2, a3, b0, b1, b2, b3;
  float c0, c1, c2, c3, c4, c5, c6, c7;
  asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.global.bf16 {%0, %1, %2, %3}, [%4], 16;"
               : "=r"(a0), "=r"(a1), "=r"(a2), "=r"(a3) : "l"(__cvta_generic_to_global(a + of * 256)) : "memory");
  asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.global.bf16 {%0, %1, %2, %3}, [%4], 16;"
               : "=r"(b0), "=r"(b1), "=r"(b2), "=r"(b3) : "l"(__cvta_generic_to_global(b + of * 256)) : "memory");
  const long long start = REPEATS > 1 ? clock64() : 0;
  const int row = threadIdx.x;
#pragma unroll 2
  for (int repeat = 0; repeat < REPEATS; ++repeat) {
    float* tile = tiles[REPEATS > 1 ? repeat & 1 : 0];
    asm volatile(
        "wmma.mma.sync.aligned.row.col.m16n16k16.f32.bf16.bf16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, {%12, %13, %14, %15}, {%16, %16, %16, %16, %16, %16, %16, %16};"
        : "=f"(c0), "=f"(c1), "=f"(c2), "=f"(c3), "=f"(c4), "=f"(c5), "=f"(c6), "=f"(c7)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(b2), "r"(b3), "f"(0.0f));
    asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8}, 16;"
                 :: "l"(__cvta_generic_to_shared(tile)), "f"(c0), "f"(c1), "f"(c2), "f"(c3), "f"(c4), "f"(c5), "f"(c6),
                    "f"(c7) : "memory");
    __syncthreads();
    if (row < 16) {
      float largest = -1e30f;
      for (int column = 0; column < 16; ++column) largest = fmaxf(largest, tile[row * 16 + column]);
      if (repeat == REPEATS - 1) out[of * 16 + row] = largest;
      if (REPEATS > 1) a0 ^= __float_as_uint(largest) & zero;
    }
  }
  if (REPEATS > 1 && row == 0) cycles[of] = clock64() - start;
}
