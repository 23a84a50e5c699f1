// norm(y) · activation(z) of heads, in float32 and rounded once: LANES lanes hold a head, 8 numbers each. The grid is
// (heads / those of a block, tokens); z stands at Z_AT of rows of STRIDE numbers.
{
  using namespace arriero;
  constexpr int LANES = WIDTH / 8, TOGETHER = THREADS / LANES;
  const int lane = threadIdx.x % LANES, head = blockIdx.x * TOGETHER + threadIdx.x / LANES;
  const int of = min(head, HEADS - 1);  // some repeat the last one, and keep it
  const size_t at = ((size_t)blockIdx.y * HEADS + of) * WIDTH + 8 * lane;
  const uint4 v = *(const uint4*)((const bf16*)y + at);
  const uint4 g = *(const uint4*)((const bf16*)rows + (size_t)blockIdx.y * STRIDE + Z_AT + of * WIDTH + 8 * lane);
  const float4 first = ((const float4*)gain)[2 * lane], second = ((const float4*)gain)[2 * lane + 1];
  const float by[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  const u32 a[4] = {v.x, v.y, v.z, v.w}, z[4] = {g.x, g.y, g.z, g.w};
  float squares = 0.f;
#pragma unroll
  for (int e = 0; e < 4; ++e) squares += low(a[e]) * low(a[e]) + high(a[e]) * high(a[e]);
#pragma unroll
  for (int o = LANES / 2; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
  const float r = rsqrtf(squares / WIDTH + __int_as_float(EPS_BITS));
  auto gate = [](float x) { return (SILU ? x : 1.f) / (1.f + __expf(-x)); };
  u32 w[4];
#pragma unroll
  for (int e = 0; e < 4; ++e)
    w[e] = pair(low(a[e]) * r * by[2 * e] * gate(low(z[e])), high(a[e]) * r * by[2 * e + 1] * gate(high(z[e])));
  if (head < HEADS) *(uint4*)((bf16*)out + at) = make_uint4(w[0], w[1], w[2], w[3]);
}
