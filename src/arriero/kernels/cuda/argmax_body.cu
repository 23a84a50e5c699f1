// The index of the largest element of each row: the first of equal ones, NaN after all else. One block a row.
{
  using namespace arriero;
  __shared__ u64 best_[THREADS];
  const size_t row = blockIdx.x;
  u64 best = 0;
  auto meet = [&](float value, u32 index) {
    // Keys in the order of the scores, as kernels/topk.py makes them.
    float x = value + 0.f;
    u32 bits = __float_as_uint(x);
    u32 key = (bits ^ ((u32)((int)bits >> 31) | 0x80000000u)) + 0x7FFFFFu;
    u64 one = ((u64)max(key, 0xFFFFFDu) << 32) | (0xFFFFFFFFu - index);
    best = max(best, one);
  };
  if (WIDE) {
    const float* of = (const float*)scores + row * LENGTH;
    for (u32 i = threadIdx.x; i < LENGTH; i += THREADS) meet(of[i], i);
  } else {
    const u16* of = (const u16*)scores + row * LENGTH;
    for (u32 i = threadIdx.x; i < LENGTH; i += THREADS) meet(number(of[i]), i);
  }
  best_[threadIdx.x] = best;
  __syncthreads();
  for (u32 half = THREADS / 2; half; half >>= 1) {
    if (threadIdx.x < half) best_[threadIdx.x] = max(best_[threadIdx.x], best_[threadIdx.x + half]);
    __syncthreads();
  }
  if (threadIdx.x == 0) out[row] = 0xFFFFFFFFu - (u32)best_[0];
}
