// The sum and the norm in front of a mixture of experts, its router, the experts of each token and their weights: the
// last block to arrive chooses. `more` is the row of the gate of what every token takes, whose weight is its sigmoid.
extern __shared__ char shared_[];
{
  using namespace arriero;
  constexpr int ALL = EXPERTS_ + GATED_ONE, PER = TOP + GATED_ONE, EACH_ = (EXPERTS_ + 31) / 32;
  __shared__ bool last_;
  const int rows = x_shape[0];
  Dense dense_ = {};
  dense_.x = (const bf16*)x;
  dense_.branch = (const bf16*)BRANCH;
  dense_.gain = GAIN;
  dense_.w = (const bf16*)w;
  dense_.more = (const bf16*)MORE;
  dense_.sum = (bf16*)SUM;
  dense_.normed = (bf16*)NORMED;
  dense_.rows = rows;
  dense_.eps = __int_as_float(EPS_BITS);
  const u16* bias_ = (const u16*)BIAS;
  dense<ALL, K_, ROWS, WIDE_GAIN>(dense_, shared_, [&](int m, int n, float sum) {
    __stcg(scores + m * ALL + n, bias_ && n < EXPERTS_ ? sum + number(__ldg(bias_ + n)) : sum);
  });
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last_ = atomicAdd((u32*)arrived, 1u) == gridDim.x - 1;
  __syncthreads();
  if (last_) {
    __threadfence();
    const int lane = threadIdx.x & 31;
    for (int m = threadIdx.x >> 5; m < rows; m += THREADS / 32) {
      u32 v[EACH_], greatest = 0;
#pragma unroll
      for (int j = 0; j < EACH_; ++j) {
        const int e = lane + 32 * j;
        // −0 and 0 are equal; what is no number, and what is not there, comes after all else.
        v[j] = e < EXPERTS_ ? key_of(__ldcg(scores + m * ALL + e) + 0.f) : 0u;
        greatest = max(greatest, v[j]);
      }
      greatest = greatest_of_warp(greatest);
      const float top = of_key(greatest);
      float total = 0.f;
      if (!NORMALISE) {
#pragma unroll
        for (int j = 0; j < EACH_; ++j) total += v[j] ? expf(of_key(v[j]) - top) : 0.f;
        total = warp_sum(total);
      }
      // Lane i keeps the i-th: the greatest, of equals the first.
      float weight = 0.f;
      u32 expert = 0, best = greatest, gone = 0;
#pragma unroll 1
      for (int k = 0; k < TOP; ++k) {
        u32 before = 0;  // how many come behind the first of the best
#pragma unroll
        for (int j = EACH_ - 1; j >= 0; --j) {
          const int e = lane + 32 * j;
          if (!(gone >> j & 1) && e < EXPERTS_ && v[j] == best) before = EXPERTS_ - e;
        }
        const u32 first = EXPERTS_ - greatest_of_warp(before);
        const float of = best ? expf(of_key(best) - top) : 0.f;
        if (lane == k) weight = of, expert = first;
        if (NORMALISE) total += of;
        u32 next = 0;
#pragma unroll
        for (int j = 0; j < EACH_; ++j) {
          if (lane + 32 * j == first) gone |= 1u << j;
          if (!(gone >> j & 1)) next = max(next, v[j]);
        }
        best = greatest_of_warp(next);
      }
      if (lane < TOP) {
        chosen[m * PER + lane] = expert;
        weights[m * PER + lane] = weight / total;
      }
      if (GATED_ONE && lane == TOP) {
        chosen[m * PER + TOP] = EXPERTS_;
        weights[m * PER + TOP] = 1.f / (1.f + expf(-__ldcg(scores + m * ALL + EXPERTS_)));
      }
    }
    if (threadIdx.x == 0) *(u32*)arrived = 0;
  }
}
