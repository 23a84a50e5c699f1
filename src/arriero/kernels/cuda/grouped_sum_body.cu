// The sum of a token's PER rows of y, weighed: 8 numbers a thread. The grid is (8 · THREADS numbers, tokens).
{
  using namespace arriero;
  const int i = blockIdx.x * THREADS + threadIdx.x, token = blockIdx.y;
  if (i < WIDTH / 8) {
    float sums[8] = {};
#pragma unroll
    for (int k = 0; k < PER; ++k) {
      const float weight = weights[token * PER + k];
      const uint4 v = __ldcs((const uint4*)y + ((size_t)token * PER + k) * (WIDTH / 8) + i);
      const u32 of[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[2 * e] += weight * low(of[e]);
        sums[2 * e + 1] += weight * high(of[e]);
      }
    }
    ((uint4*)out)[(size_t)token * (WIDTH / 8) + i] =
        make_uint4(pair(sums[0], sums[1]), pair(sums[2], sums[3]), pair(sums[4], sums[5]), pair(sums[6], sums[7]));
  }
}
