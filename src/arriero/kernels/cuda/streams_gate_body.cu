// The same mean where the gates `[T, COUNT · HIDDEN]` are there: 8 numbers a thread.
{
  using namespace arriero;
  const size_t piece = (size_t)blockIdx.x * THREADS + threadIdx.x, token = piece / (HIDDEN / 8);
  if (token >= normed_shape[0]) return;
  const size_t h = piece % (HIDDEN / 8) * 8;
  float sum[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = 0.f;
#pragma unroll
  for (int c = 0; c < COUNT; ++c) {
    const size_t at = (token * COUNT + c) * HIDDEN + h;
    const uint4 g = *(const uint4*)(gate + at), n = *(const uint4*)(normed + at);
    const u32 gs[4] = {g.x, g.y, g.z, g.w}, ns[4] = {n.x, n.y, n.z, n.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] += low(ns[i]) / (1.f + __expf(-low(gs[i]))) / COUNT;
      sum[2 * i + 1] += high(ns[i]) / (1.f + __expf(-high(gs[i]))) / COUNT;
    }
  }
  *(uint4*)(mixed + token * HIDDEN + h) =
      make_uint4(pair(sum[0], sum[1]), pair(sum[2], sum[3]), pair(sum[4], sum[5]), pair(sum[6], sum[7]));
}
