// Products of few rows with a matrix of few rows and many columns in MXFP8: `low [T, RANK]` of `normed [T, COLUMNS]`.
// A block takes ROWS rows, whose words its threads have under way at once; the grid is (RANK / ROWS, groups of TOKENS).
{
  using namespace arriero;
  typedef Format<MXFP8, 32> F;
  constexpr int WORDS = COLUMNS / 4, EACH = (WORDS + THREADS - 1) / THREADS;
  __shared__ float sums_[ROWS * TOKENS * (THREADS / 32)];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = blockIdx.y * TOKENS;
  const int tokens = min(TOKENS, (int)normed_shape[0] - first);
  u32 words[ROWS][EACH];
  u32 factors[ROWS][EACH];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const size_t row = blockIdx.x * ROWS + r;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int word = threadIdx.x + e * THREADS;
      const bool there = word < WORDS;
      words[r][e] = there ? __ldcs((const u32*)down + row * WORDS + word) : 0u;
      factors[r][e] = there ? __ldg((const u8*)scales + row * (COLUMNS / 32) + word / 8) : 0u;
    }
  }
  float dots[ROWS][TOKENS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) dots[r][t] = 0.f;
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int word = min((int)threadIdx.x + e * THREADS, WORDS - 1);
    float w[ROWS][4];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      typename F::Scale scale;
      scale.v = factors[r][e];
      u32 p[2];
      F::word(words[r][e], F::factor(scale), p);
      w[r][0] = low(p[0]), w[r][1] = low(p[1]), w[r][2] = high(p[0]), w[r][3] = high(p[1]);
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      // What is beyond a row is multiplied by codes of zero.
      const uint2 x = ((const uint2*)(normed + (size_t)(first + min(t, tokens - 1)) * COLUMNS))[word];
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        dots[r][t] += w[r][0] * low(x.x) + w[r][1] * high(x.x) + (w[r][2] * low(x.y) + w[r][3] * high(x.y));
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const float sum = warp_sum(dots[r][t]);
      if (lane == 0) sums_[(r * TOKENS + t) * (THREADS / 32) + warp] = sum;
    }
  __syncthreads();
  const int r = threadIdx.x / TOKENS, t = threadIdx.x % TOKENS;
  if (r < ROWS && t < tokens) {
    float sum = 0.f;
    for (int w = 0; w < THREADS / 32; ++w) sum += sums_[threadIdx.x * (THREADS / 32) + w];
    low_rank[(size_t)(first + t) * RANK + blockIdx.x * ROWS + r] = __float2bfloat16(sum * F::undo());
  }
}
