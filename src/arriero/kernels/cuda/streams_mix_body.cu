// What a part of a layer takes from normed streams `[T, COUNT, HIDDEN]`: the mean of all, each times sigma of a gate that
// is the product of `up [COUNT · HIDDEN, RANK]` with silu(low / COUNT). A warp takes one number of HIDDEN and reads its
// COUNT rows once for all tokens of the block; the grid is (HIDDEN / warps, groups of TOKENS).
//
// INJECTS: the first block of a group also makes the weights `2 · sigma(shares / COUNT)` of each stream. MODE: as formats.cu
// names them, or 15 for bfloat16.
{
  using namespace arriero;
  constexpr bool DENSE = MODE == 15;
  typedef Format<DENSE ? MXFP8 : MODE, 32> F;
  constexpr int PER_WORD = DENSE ? 2 : 4, ROW_WORDS = RANK / PER_WORD, EACH = (ROW_WORDS + 31) / 32;
  __shared__ float low_[TOKENS * RANK];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = blockIdx.y * TOKENS;
  const int tokens = min(TOKENS, (int)low_rank_shape[0] - first), h = blockIdx.x * (THREADS / 32) + warp;
  for (int i = threadIdx.x; i < TOKENS * RANK; i += THREADS) {
    float x = 0.f;
    if (i < tokens * RANK) {
      x = __bfloat162float(low_rank[(size_t)first * RANK + i]) / COUNT;
      x = __bfloat162float(__float2bfloat16(x / (1.f + __expf(-x))));
    }
    low_[i] = x;
  }
  u32 words[COUNT][EACH];
  u32 factors[COUNT][EACH];
#pragma unroll
  for (int c = 0; c < COUNT; ++c) {
    const size_t row = (size_t)c * HIDDEN + min(h, HIDDEN - 1);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int word = lane + 32 * e;
      words[c][e] = word < ROW_WORDS ? __ldg((const u32*)up + row * ROW_WORDS + word) : 0u;
      factors[c][e] = !DENSE && word < ROW_WORDS ? __ldg((const u8*)SCALES + row * (RANK / 32) + word / 8) : 0u;
    }
  }
  __syncthreads();
  float dots[COUNT][TOKENS];
#pragma unroll
  for (int c = 0; c < COUNT; ++c)
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) dots[c][t] = 0.f;
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int word = lane + 32 * e;
    if (word >= ROW_WORDS) break;
#pragma unroll
    for (int c = 0; c < COUNT; ++c) {
      float w[4];
      if (DENSE) {
        w[0] = low(words[c][e]), w[1] = high(words[c][e]), w[2] = w[3] = 0.f;
      } else {
        typename F::Scale scale;
        scale.v = factors[c][e];
        u32 p[2];
        F::word(words[c][e], F::factor(scale), p);
        w[0] = low(p[0]), w[1] = low(p[1]), w[2] = high(p[0]), w[3] = high(p[1]);
      }
#pragma unroll
      for (int t = 0; t < TOKENS; ++t)
#pragma unroll
        for (int i = 0; i < PER_WORD; ++i) dots[c][t] += w[i] * low_[t * RANK + word * PER_WORD + i];
    }
  }
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < COUNT; ++c) {
      // The product is rounded, as one by itself is.
      const float gate = __bfloat162float(__float2bfloat16(warp_sum(dots[c][t]) * (DENSE ? 1.f : F::undo())));
      if (h < HIDDEN && t < tokens) {
        const float n = __bfloat162float(normed[((size_t)(first + t) * COUNT + c) * HIDDEN + h]);
        sum += n / (1.f + __expf(-gate)) / COUNT;
      }
    }
    if (lane == 0 && h < HIDDEN && t < tokens) mixed[(size_t)(first + t) * HIDDEN + h] = __float2bfloat16(sum);
  }
  if (INJECTS && blockIdx.x == 0 && threadIdx.x < tokens * COUNT) {
    const int token = first + threadIdx.x / COUNT, stream = threadIdx.x % COUNT;
    float sum = 0.f;
    for (int c = 0; c < COUNT; ++c) sum += ((const float*)SHARES)[((size_t)token * COUNT + c) * COUNT + stream];
    sum = __bfloat162float(__float2bfloat16(sum)) / COUNT;
    ((float*)WEIGHTS)[token * COUNT + stream] = 2.f / (1.f + __expf(-sum));
  }
}
