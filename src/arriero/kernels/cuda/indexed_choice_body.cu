// The BUDGET best blocks of each query among those that it sees: rising, then -1. One block of threads a query.
{
  using namespace arriero;
  __shared__ Counts counts_;
  __shared__ u64 best_[SORTED];
  __shared__ u32 filled_;
  const u32 seen = (((const Query*)queries)[blockIdx.x].here + 1) / BLOCK_;
  const float* row = scores + (size_t)blockIdx.x * scores_shape[1];
  int* to = out + (size_t)blockIdx.x * BUDGET;
  if (seen <= BUDGET) {
    for (u32 i = threadIdx.x; i < BUDGET; i += THREADS) to[i] = i < seen ? (int)i : -1;
    return;
  }
  // A block that is seen comes before what is not, whatever it scores.
  auto key = [&](u32 i) -> u32 { return max(order_of(row[i]), NAN_KEY + 1); };
  for (u32 i = threadIdx.x; i < SORTED; i += THREADS) best_[i] = 0;
  if (threadIdx.x == 0) filled_ = 0;
  __syncthreads();
  const Cut cut = cut_of(key, seen, BUDGET, counts_);
  for (u32 i = threadIdx.x; i < seen; i += THREADS)
    if (cut.passes(key(i), i)) best_[atomicAdd(&filled_, 1u)] = 0xFFFFFFFFu - i;
  __syncthreads();
  sort_falling<SORTED>(best_);
  for (u32 i = threadIdx.x; i < BUDGET; i += THREADS) to[i] = (int)(0xFFFFFFFFu - (u32)best_[i]);
}
