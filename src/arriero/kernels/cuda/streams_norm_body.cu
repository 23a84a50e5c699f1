// Residual streams `[T, COUNT, HIDDEN]`: a part's result added to each by its weight, the norm of each, and the products
// of all of them with few rows. One block a stream of a token; the grid is (COUNT, T).
//
// WRITES: `streams + weights · y` in `sums`. INJECTS: `shares [T, COUNT, COUNT]` are this stream's part of the products.
{
  using namespace arriero;
  constexpr int PIECES = HIDDEN / 8, EACH = (PIECES + THREADS - 1) / THREADS;
  __shared__ float partial_[(COUNT + 1) * 32];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, stream = blockIdx.x;
  const size_t token = blockIdx.y, at = (token * COUNT + stream) * HIDDEN;
  float x[EACH][8], squares = 0.f;
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int piece = threadIdx.x + e * THREADS;
    if (piece >= PIECES) break;
    const uint4 of = ((const uint4*)(streams + at))[piece];
    u32 v[4] = {of.x, of.y, of.z, of.w};
    if (WRITES) {
      const float weight = ((const float*)WEIGHTS)[token * COUNT + stream];
      const uint4 more = ((const uint4*)((const bf16*)BRANCH + token * HIDDEN))[piece];
      const u32 y[4] = {more.x, more.y, more.z, more.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = pair(low(v[i]) + weight * low(y[i]), high(v[i]) + weight * high(y[i]));
      ((uint4*)((bf16*)SUMS + at))[piece] = make_uint4(v[0], v[1], v[2], v[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[e][2 * i] = low(v[i]), x[e][2 * i + 1] = high(v[i]);
      squares += x[e][2 * i] * x[e][2 * i] + x[e][2 * i + 1] * x[e][2 * i + 1];
    }
  }
  squares = warp_sum(squares);
  if (lane == 0) partial_[warp] = squares;
  __syncthreads();
  squares = 0.f;
#pragma unroll
  for (int w = 0; w < THREADS / 32; ++w) squares += partial_[w];
  const float r = rsqrtf(squares / HIDDEN + __int_as_float(EPS_BITS));
  float dots[COUNT];
#pragma unroll
  for (int c = 0; c < COUNT; ++c) dots[c] = 0.f;
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int piece = threadIdx.x + e * THREADS;
    if (piece >= PIECES) break;
    u32 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 g = ((const float2*)(gain + (size_t)stream * HIDDEN))[piece * 4 + i];
      v[i] = pair(x[e][2 * i] * r * g.x, x[e][2 * i + 1] * r * g.y);
    }
    ((uint4*)(normed + at))[piece] = make_uint4(v[0], v[1], v[2], v[3]);
    if (INJECTS) {
#pragma unroll
      for (int c = 0; c < COUNT; ++c) {
        const bf16* row = (const bf16*)INJECT + ((size_t)c * COUNT + stream) * HIDDEN;
        const uint4 of = ((const uint4*)row)[piece];
        const u32 w[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) dots[c] += low(v[i]) * low(w[i]) + high(v[i]) * high(w[i]);
      }
    }
  }
  if (INJECTS) {
#pragma unroll
    for (int c = 0; c < COUNT; ++c) {
      const float sum = warp_sum(dots[c]);
      if (lane == 0) partial_[(c + 1) * 32 + warp] = sum;
    }
    __syncthreads();
    if (threadIdx.x < COUNT) {
      float sum = 0.f;
      for (int w = 0; w < THREADS / 32; ++w) sum += partial_[(threadIdx.x + 1) * 32 + w];
      ((float*)SHARES)[(token * COUNT + stream) * COUNT + threadIdx.x] = sum;
    }
  }
}
