// x + branch, and that sum normed; without a branch x is. A block is one row, a thread holds EACH times 8 of its numbers.
{
  using namespace arriero;
  constexpr int EACH_ = (WIDTH / 8 + THREADS - 1) / THREADS;
  __shared__ float sums[THREADS / 32];
  const size_t row = (size_t)blockIdx.x * WIDTH;
  uint4 a[EACH_], b[EACH_];
#pragma unroll
  for (int k = 0; k < EACH_; ++k) {
    const int at = (threadIdx.x + k * THREADS) * 8;
    a[k] = b[k] = make_uint4(0, 0, 0, 0);
    if (at < WIDTH) {
      a[k] = *(const uint4*)((const bf16*)x + row + at);
      if (SUM) b[k] = *(const uint4*)((const bf16*)BRANCH + row + at);
    }
  }
  float squares = 0.f;
  // What is normed is the sum as it is kept.
  auto two = [&](u32 p, u32 q) {
    const u32 s = pair(low(p) + low(q), high(p) + high(q));
    squares += low(s) * low(s) + high(s) * high(s);
    return s;
  };
#pragma unroll
  for (int k = 0; k < EACH_; ++k) {
    const int at = (threadIdx.x + k * THREADS) * 8;
    a[k] = make_uint4(two(a[k].x, b[k].x), two(a[k].y, b[k].y), two(a[k].z, b[k].z), two(a[k].w, b[k].w));
    if (SUM && at < WIDTH) *(uint4*)((bf16*)TOTAL + row + at) = a[k];
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  float all = 0.f;
#pragma unroll
  for (int k = 0; k < THREADS / 32; ++k) all += sums[k];
  const float r = rsqrtf(all / WIDTH + __int_as_float(EPS_BITS));
#pragma unroll
  for (int k = 0; k < EACH_; ++k) {
    const int at = (threadIdx.x + k * THREADS) * 8;
    if (at >= WIDTH) continue;
    float g[8];
    if (WIDE_GAIN) {
      const float4 first = ((const float4*)gain)[at / 4], second = ((const float4*)gain)[at / 4 + 1];
      g[0] = first.x, g[1] = first.y, g[2] = first.z, g[3] = first.w;
      g[4] = second.x, g[5] = second.y, g[6] = second.z, g[7] = second.w;
    } else {
      const uint4 v = ((const uint4*)gain)[at / 8];
      g[0] = low(v.x), g[1] = high(v.x), g[2] = low(v.y), g[3] = high(v.y);
      g[4] = low(v.z), g[5] = high(v.z), g[6] = low(v.w), g[7] = high(v.w);
    }
    const uint4 s = a[k];
    *(uint4*)((bf16*)normed + row + at) = make_uint4(
        pair(low(s.x) * r * g[0], high(s.x) * r * g[1]), pair(low(s.y) * r * g[2], high(s.y) * r * g[3]),
        pair(low(s.z) * r * g[4], high(s.z) * r * g[5]), pair(low(s.w) * r * g[6], high(s.w) * r * g[7]));
  }
}
