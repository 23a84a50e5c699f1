// Divides rows that are sorted by expert into blocks of up to 64 of one expert. A thread takes an expert.
{
  using namespace arriero;
  struct Tile { int expert, first, count, unused; };
  __shared__ u32 warps_[32];
  __shared__ u32 total_;
  auto bound = [&](u32 expert) {
    u32 low = 0, high = PAIRS;
    while (low < high) {
      const u32 middle = (low + high) / 2;
      if (experts[middle] < expert) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  const u32 expert = threadIdx.x;
  const u32 first = expert < EXPERTS ? bound(expert) : 0, end = expert < EXPERTS ? bound(expert + 1) : 0;
  const u32 count = (end - first + 63) / 64;
  const u32 at = sum_before(count, warps_);
  Tile* to = (Tile*)tiles;
  for (u32 i = 0; i < count; ++i) {
    const u32 from = first + 64 * i;
    to[at + i] = {(int)expert, (int)from, (int)min(64u, end - from), 0};
  }
  if (threadIdx.x == THREADS - 1) total_ = at + count;
  __syncthreads();
  for (u32 i = total_ + threadIdx.x; i < MOST; i += THREADS) to[i] = {0, 0, 0, 0};
}
