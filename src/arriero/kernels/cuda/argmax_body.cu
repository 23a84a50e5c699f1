// The index of the largest element of each row: the first of equal ones, NaN after all else. PARTS blocks share a row;
// the last to arrive compares what they found.
{
  using namespace arriero;
  __shared__ u64 best_[THREADS];
  __shared__ bool last_;
  const u32 row = blockIdx.y;
  u64 best = 0;
  auto meet = [&](float value, u32 index) {
    // Keys in the order of the scores, as kernels/topk.py makes them.
    float x = value + 0.f;
    u32 bits = __float_as_uint(x);
    u32 key = (bits ^ ((u32)((int)bits >> 31) | 0x80000000u)) + 0x7FFFFFu;
    u64 one = ((u64)max(key, 0xFFFFFDu) << 32) | (0xFFFFFFFFu - index);
    best = max(best, one);
  };
  auto greatest = [&]() {
    best_[threadIdx.x] = best;
    __syncthreads();
    for (u32 half = THREADS / 2; half; half >>= 1) {
      if (threadIdx.x < half) best_[threadIdx.x] = max(best_[threadIdx.x], best_[threadIdx.x + half]);
      __syncthreads();
    }
  };
  constexpr u32 WIDTH = WIDE ? 4 : 8, WHOLE = LENGTH % WIDTH == 0 ? LENGTH / WIDTH : 0;  // 16 bytes at a time
  const u32 first = blockIdx.x * THREADS + threadIdx.x;
  for (u32 i = first; i < WHOLE; i += PARTS * THREADS) {
    uint4 v = ((const uint4*)scores)[(size_t)row * WHOLE + i];
    const u32* words = (const u32*)&v;
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
      if (WIDE) {
        meet(__uint_as_float(words[e]), i * 4 + e);
      } else {
        meet(low(words[e]), i * 8 + 2 * e);
        meet(high(words[e]), i * 8 + 2 * e + 1);
      }
    }
  }
  for (u32 i = WHOLE * WIDTH + first; i < LENGTH; i += PARTS * THREADS) {
    const size_t at = (size_t)row * LENGTH + i;
    meet(WIDE ? ((const float*)scores)[at] : number(((const u16*)scores)[at]), i);
  }
  greatest();
  if (PARTS == 1) {
    if (threadIdx.x == 0) out[row] = 0xFFFFFFFFu - (u32)best_[0];
    return;
  }
  if (threadIdx.x == 0) {
    __stcg((u64*)parts + row * PARTS + blockIdx.x, best_[0]);
    __threadfence();
    last_ = atomicAdd((u32*)arrived + row, 1u) == PARTS - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last_) return;
  best = threadIdx.x < PARTS ? __ldcg((const u64*)parts + row * PARTS + threadIdx.x) : 0;
  greatest();
  if (threadIdx.x == 0) {
    out[row] = 0xFFFFFFFFu - (u32)best_[0];
    ((u32*)arrived)[row] = 0;
  }
}
