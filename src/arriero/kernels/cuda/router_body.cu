// The sum and the norm in front of a mixture of experts, its router, the experts of each token and their weights: the
// last block to arrive chooses. `more` is the row of the gate of what every token takes, whose weight is its sigmoid.
extern __shared__ char shared_[];
{
  using namespace arriero;
  constexpr int ALL = EXPERTS_ + GATED_ONE, PER = TOP + GATED_ONE, EACH_ = (EXPERTS_ + 31) / 32;
  const float LEAST = __uint_as_float(0xff800000u);  // minus infinity
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
  dense<ALL, K_, ROWS, WIDE_GAIN>(dense_, shared_, [&](int m, int n, float sum) { __stcg(scores + m * ALL + n, sum); });
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last_ = atomicAdd((u32*)arrived, 1u) == gridDim.x - 1;
  __syncthreads();
  if (last_) {
    __threadfence();
    const int lane = threadIdx.x & 31;
    for (int m = threadIdx.x >> 5; m < rows; m += THREADS / 32) {
      float v[EACH_], greatest = LEAST, total = 0.f;
#pragma unroll
      for (int j = 0; j < EACH_; ++j) {
        const int e = lane + 32 * j;
        v[j] = e < EXPERTS_ ? __ldcg(scores + m * ALL + e) : LEAST;
        // What is no number comes after all else.
        if (!(v[j] > LEAST)) v[j] = LEAST;
        greatest = fmaxf(greatest, v[j]);
      }
      greatest = greatest_of_warp(greatest);
      if (!NORMALISE) {
#pragma unroll
        for (int j = 0; j < EACH_; ++j) total += expf(v[j] - greatest);
        total = warp_sum(total);
      }
      // Lane i keeps the i-th: the greatest, of equals the first.
      float weight = 0.f, best = greatest;
      u32 expert = 0;
      u32 gone = 0;
#pragma unroll 1
      for (int k = 0; k < TOP; ++k) {
        float first = (float)EXPERTS_;
#pragma unroll
        for (int j = EACH_ - 1; j >= 0; --j)
          if (!(gone >> j & 1) && lane + 32 * j < EXPERTS_ && v[j] == best) first = (float)(lane + 32 * j);
        first = -greatest_of_warp(-first);
        const float of = expf(best - greatest);
        if (lane == k) weight = of, expert = (u32)first;
        if (NORMALISE) total += of;
        float next = LEAST;
#pragma unroll
        for (int j = 0; j < EACH_; ++j) {
          if (lane + 32 * j == (int)first) gone |= 1u << j;
          if (!(gone >> j & 1)) next = fmaxf(next, v[j]);
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
