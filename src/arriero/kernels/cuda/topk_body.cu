// The K best of each piece of a row: falling, equal ones by rising index, NaN last. The grid is (pieces, rows).
// KEYED: `scores` are keys that another run wrote, and `places` their indices.
{
  using namespace arriero;
  __shared__ Counts counts_;
  __shared__ u64 best_[SORTED];
  __shared__ u32 filled_;
  const u32 length = scores_shape[1], first = blockIdx.x * (u32)SPAN_, count = min((u32)SPAN_, length - first);
  const size_t from = (size_t)blockIdx.y * length + first;
  auto key = [&](u32 i) -> u32 {
    if (KEYED) return ((const u32*)scores)[from + i];
    return WIDE ? order_of(((const float*)scores)[from + i]) : order_of(number(((const u16*)scores)[from + i]));
  };
  const u32 k = min((u32)K, count);
  for (u32 i = threadIdx.x; i < SORTED; i += THREADS) best_[i] = 0;
  if (threadIdx.x == 0) filled_ = 0;
  __syncthreads();
  Cut cut;
  cut.key = 0, cut.index = 0x7FFFFFFFu;
  if (k < count) cut = cut_of(key, count, k, counts_);
  for (u32 i = threadIdx.x; i < count; i += THREADS) {
    const u32 x = key(i);
    if (cut.passes(x, i)) {
      const u32 index = KEYED ? ((const u32*)PLACES)[from + i] : first + i;
      best_[atomicAdd(&filled_, 1u)] = (u64)x << 32 | (0xFFFFFFFFu - index);
    }
  }
  __syncthreads();
  sort_falling<SORTED>(best_);
  const size_t to = ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * K;
  for (u32 i = threadIdx.x; i < K; i += THREADS) {
    best[to + i] = (int)(0xFFFFFFFFu - (u32)best_[i]);
    if (KEYS) ((u32*)MORE)[to + i] = (u32)(best_[i] >> 32);
  }
}
