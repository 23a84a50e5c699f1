// The selective state space of Mamba-2 over spans that each go on from a state of their own, token by token.
//
// Four threads keep one row of a head's state S [P, N] in registers. Per token: S <- exp(-rate Δ) S + Δ x bᵀ, then
// y = S c + skip x, where Δ = softplus(dt + bias) within limits. Rows hold x of all heads, then b and c of all groups. A
// block holds ROWS rows of one head, and takes TILE tokens at a time through shared memory. The grid is (P / ROWS, heads,
// spans).
namespace arriero {

template <bool WIDE>
__device__ __forceinline__ float number_at(const void* p, size_t i) {
  return WIDE ? ((const float*)p)[i] : number(((const u16*)p)[i]);
}

struct Selective {
  const void* x;
  const void* dt;     // in rows of DT_WIDTH
  const float* rate;  // [H]
  const float* bias;
  const float* skip;
  void* y;            // [T, H * P]
  const int* stops;
  const float* state;
  float* state_end;
  float* state_kept;
  float low, high;
};

template <int P, int N, int H, int G, int ROWS, int TILE, int DT_WIDTH, bool WIDE>
__device__ __forceinline__ void selective(const Selective& d, const Span& span, char* shared) {
  constexpr int PER = N / 16, LINE = 2 * N + ROWS, WIDTH = H * P + 2 * G * N;  // of one token: b, c, x of these rows
  static_assert(THREADS == 4 * ROWS && N % 16 == 0 && P % ROWS == 0, "four threads a row");
  float* lines = (float*)shared;     // [TILE][LINE]
  float* decay = lines + TILE * LINE;
  float* step = decay + TILE;
  const int tid = threadIdx.x, row = tid >> 2, part = tid & 3;
  const int head = blockIdx.y, row0 = blockIdx.x * ROWS, group = head / (H / G);
  float4 s[PER];
  const size_t place = ((size_t)head * P + row0 + row) * N + part * 4;
#pragma unroll
  for (int i = 0; i < PER; ++i) s[i] = *(const float4*)(d.state + place + 16 * i);
  const float skip = d.skip[head];

  int next = 0;
  for (int t0 = 0; t0 < span.length; t0 += TILE) {
    const int n = min(TILE, span.length - t0);
#pragma unroll 8
    for (int i = tid; i < n * LINE; i += THREADS) {
      const int t = i / LINE, e = i % LINE;
      const int column = e >= 2 * N ? head * P + row0 + e - 2 * N : H * P + (e < N ? 0 : G * N) + group * N + e % N;
      lines[i] = number_at<WIDE>(d.x, (size_t)(span.first + t0 + t) * WIDTH + column);
    }
    for (int t = tid; t < n; t += THREADS) {
      const float raw = number_at<WIDE>(d.dt, (size_t)(span.first + t0 + t) * DT_WIDTH + head) + d.bias[head];
      const float by = fminf(fmaxf(fmaxf(raw, 0.f) + log1pf(expf(-fabsf(raw))), d.low), d.high);
      step[t] = by;
      decay[t] = expf(-d.rate[head] * by);
    }
    __syncthreads();
#pragma unroll 1
    for (int t = 0; t < n; ++t) {
      const float4 *b = (const float4*)(lines + t * LINE) + part, *c = (const float4*)(lines + t * LINE + N) + part;
      const float g = decay[t], x = lines[t * LINE + 2 * N + row], u = step[t] * x;
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int i = 0; i < PER; ++i) {
        const float4 w = b[4 * i], o = c[4 * i];
        s[i].x = s[i].x * g + u * w.x, s[i].y = s[i].y * g + u * w.y;
        s[i].z = s[i].z * g + u * w.z, s[i].w = s[i].w * g + u * w.w;
        sum.x += s[i].x * o.x, sum.y += s[i].y * o.y, sum.z += s[i].z * o.z, sum.w += s[i].w * o.w;
      }
      float y = (sum.x + sum.y) + (sum.z + sum.w);
      y += __shfl_xor_sync(~0u, y, 1);
      y += __shfl_xor_sync(~0u, y, 2);
      if (part == 0) {
        const size_t at = (size_t)(span.first + t0 + t) * H * P + head * P + row0 + row;
        y += skip * x;
        if (WIDE) ((float*)d.y)[at] = y;
        else ((bf16*)d.y)[at] = __float2bfloat16(y);
      }
      if (next < span.stops && d.stops[span.stop + next] == t0 + t + 1) {
        float* to = d.state_kept + (size_t)next * H * P * N + place;
#pragma unroll
        for (int i = 0; i < PER; ++i) *(float4*)(to + 16 * i) = s[i];
        ++next;
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < PER; ++i) *(float4*)(d.state_end + place + 16 * i) = s[i];
}

}  // namespace arriero
