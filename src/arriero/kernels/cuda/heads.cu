// What attention does not do itself for some models, in launches before and behind it. Rows hold the query heads, each
// with a gate behind it or not, then the heads of k, then those of v, unless keys are the values too.
namespace arriero {

// One warp, one head: norms of q and k with gains, norm of v without one, rotation of the first ROTATED elements of q and
// k by halves. The grid is (heads / warps, tokens).
template <int D, int HEADS, int KV_HEADS, int ROTATED, bool WIDE_GAIN, bool GATED, bool KEYS_ARE_VALUES, bool NORM_V>
__device__ __forceinline__ void heads(const bf16* rows, const float* angles, const void* q_gain, const void* k_gain,
                                      float q_eps, float k_eps, bf16* out) {
  constexpr int ALL = HEADS + 2 * KV_HEADS, WARPS = THREADS / 32, PER = D / 32, EACH_ = GATED ? 2 : 1;
  constexpr size_t WIDTH = (size_t)(EACH_ * HEADS + (KEYS_ARE_VALUES ? 1 : 2) * KV_HEADS) * D;
  __shared__ float lines[WARPS][D];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, token = blockIdx.y;
  const int head = min((int)blockIdx.x * WARPS + warp, ALL - 1);  // some warps repeat the last one
  const bool query = head < HEADS, value = head >= HEADS + KV_HEADS;
  const int at = query ? EACH_ * head : (EACH_ - 1) * HEADS + head - (KEYS_ARE_VALUES && value ? KV_HEADS : 0);
  const bf16* from = rows + token * WIDTH + (size_t)at * D;
  float x[PER], squares = 0.f;
#pragma unroll
  for (int e = 0; e < PER; ++e) {
    x[e] = __bfloat162float(from[lane + 32 * e]);
    squares += x[e] * x[e];
  }
  const float r = rsqrtf(warp_sum(squares) / D + (query ? q_eps : k_eps));
  const void* gain = query ? q_gain : k_gain;
#pragma unroll
  for (int e = 0; e < PER; ++e) {
    const int i = lane + 32 * e;
    if (!value || NORM_V) {
      float g = 1.f;
      if (!value) g = WIDE_GAIN ? ((const float*)gain)[i] : __bfloat162float(((const bf16*)gain)[i]);
      // The graph rounds here, too.
      x[e] = __bfloat162float(__float2bfloat16(x[e] * r * g));
    }
    lines[warp][i] = x[e];
  }
  __syncthreads();
#pragma unroll
  for (int e = 0; e < PER; ++e) {
    const int i = lane + 32 * e, half = ROTATED / 2;
    float y = x[e];
    if (!value && i < ROTATED) {
      const float2 turn = ((const float2*)angles)[token * half + i % half];
      y = i < half ? y * turn.x - lines[warp][i + half] * turn.y : y * turn.x + lines[warp][i - half] * turn.y;
    }
    out[((size_t)token * ALL + head) * D + i] = __float2bfloat16(y);
  }
}

// y · σ(gate), two elements a thread. The grid is (pairs / THREADS, tokens).
template <int D, int HEADS, int KV_HEADS>
__device__ __forceinline__ void gate_heads(const bf16* rows, const bf16* y, bf16* out) {
  constexpr size_t WIDTH = (size_t)(2 * HEADS + 2 * KV_HEADS) * D;
  const int i = (blockIdx.x * THREADS + threadIdx.x) * 2;
  if (i >= HEADS * D) return;
  const size_t at = (size_t)blockIdx.y * HEADS * D + i;
  const u32 v = *(const u32*)(y + at), g = *(const u32*)(rows + blockIdx.y * WIDTH + i / D * 2 * D + D + i % D);
  *(u32*)(out + at) = pair(low(v) / (1.f + expf(-low(g))), high(v) / (1.f + expf(-high(g))));
}

}  // namespace arriero
