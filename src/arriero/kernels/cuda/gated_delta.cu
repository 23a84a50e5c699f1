// The gated delta rule, token by token, over spans that each go on from a state of their own: of rows that are ready
// (`READY`: y is what the rule reads), or of a layer's products (the short convolution before it and the gated norm
// behind it are taken in). Every token's arithmetic is the same in all forms, whatever stands beside it.
//
// Four threads keep one row of a state S [DV, DK] in registers. Per token: S <- decay S, S <- S + beta (v - S k) kᵀ,
// y = S q, k divided by its length, q by its length and by sqrt(DK). A block holds ROWS rows of one head, and takes TILE
// tokens at a time through shared memory. The grid is (DV / ROWS, HV, spans).
namespace arriero {

// Where a launch's arrays are. Rows of x hold q, k and v of all heads; widths and places are numbers of elements.
struct Delta {
  const void* x;
  const void* z;          // in rows as wide as x's
  const void* b;          // in rows of GATE_WIDTH, as a; or else they are products of
  const void* a;
  const bf16* hidden;     // [T, HIDDEN], after a norm where there is
  const void* hidden_gain;  // [HIDDEN], with
  const bf16* w;          // [2 * HV, HIDDEN], b's rows before a's
  const bf16* taps;       // [TAPS, channels], the oldest first
  const float* rate;      // [HV]
  const float* bias;      // [HV]
  const float* gain;      // [DV]
  void* y;                // [T, HV * DV]
  const int* stops;
  const bf16* tail;       // this span's: [TAPS - 1, channels], rows of x before the convolution
  bf16* tail_end;
  bf16* tail_kept;        // [stops, TAPS - 1, channels]
  const float* state;     // [HV, DV, DK]
  float* state_end;
  float* state_kept;      // [stops, HV, DV, DK]
  float eps, norm_eps, hidden_eps;
};

template <bool WIDE>
__device__ __forceinline__ float element(const void* p, size_t i) {
  return WIDE ? ((const float*)p)[i] : number(((const u16*)p)[i]);
}
template <bool WIDE>
__device__ __forceinline__ float2 pair_of(const void* p, size_t i) {
  if (WIDE) return ((const float2*)p)[i];
  const u32 v = ((const u32*)p)[i];
  return make_float2(low(v), high(v));
}
__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16(x)); }
__device__ __forceinline__ float sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return (x < 0.f ? e : 1.f) / (1.f + e);
}

template <int DK, int DV, int HK, int HV, int ROWS, int TILE, int TAPS, int X_WIDTH, int GATE_WIDTH,
          int HIDDEN, bool WIDE_GAIN, bool READY, bool WIDE, bool SILU>
__device__ __forceinline__ void delta(const Delta& d, const Span& span, char* shared) {
  constexpr int PER = DK / 16, WARPS = THREADS / 32, REPEAT = HV / HK, CHANNELS = 2 * HK * DK + HV * DV;
  constexpr int LINE = 2 * DK + ROWS;  // of one token: q, k, and v of these rows
  static_assert(THREADS == 4 * ROWS && DK % 16 == 0 && DV % ROWS == 0, "four threads a row");
  static_assert(READY || (ROWS == DV && !WIDE), "the norm needs all rows of a head");
  float* lines = (float*)shared;          // [TILE][LINE]
  float* out = lines + TILE * LINE;       // [TILE][ROWS]
  float* decay = out + TILE * ROWS;       // [TILE]
  float* beta = decay + TILE;             // [TILE]
  float* sums = beta + TILE;              // [TILE][WARPS][3]
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, row = tid >> 2, part = tid & 3;
  const int head = blockIdx.y, row0 = blockIdx.x * ROWS, key_head = head / REPEAT;

  // Asked for before all else: it comes from memory, the rest mostly from the cache.
  float4 s[PER];
  const size_t place = ((size_t)head * DV + row0 + row) * DK + part * 4;
#pragma unroll
  for (int i = 0; i < PER; ++i) s[i] = *(const float4*)(d.state + place + 16 * i);

  // The channel of element e of a line.
  auto channel = [&](int e) -> int {
    if (e < DK) return key_head * DK + e;
    if (e < 2 * DK) return HK * DK + key_head * DK + e - DK;
    return 2 * HK * DK + head * DV + row0 + e - 2 * DK;
  };
  // Row r of what the convolution sees: the tail, then the span's own.
  auto seen = [&](int r) -> const bf16* {
    return r < TAPS - 1 ? d.tail + (size_t)r * CHANNELS : (const bf16*)d.x + (size_t)(span.first + r - TAPS + 1) * X_WIDTH;
  };

  if (!READY) {
    // Tails: of channels that several heads share the first writes them.
    for (int i = tid; i < (span.stops + 1) * (TAPS - 1) * (LINE / 2); i += THREADS) {
      const int pair_ = i % (LINE / 2), r = i / (LINE / 2) % (TAPS - 1), k = i / (LINE / 2) / (TAPS - 1);
      if (2 * pair_ < 2 * DK && head % REPEAT) continue;
      const int after = k < span.stops ? d.stops[span.stop + k] : span.length, c = channel(2 * pair_);
      bf16* to = k < span.stops ? d.tail_kept + (size_t)k * (TAPS - 1) * CHANNELS : d.tail_end;
      *(u32*)(to + (size_t)r * CHANNELS + c) = *(const u32*)(seen(after + r) + c);
    }
  }

  // Rows that are ready are asked for a tile ahead, 8 elements at a time.
  constexpr int EIGHTS = LINE / 8, LOADS = READY ? (TILE * EIGHTS + THREADS - 1) / THREADS : 1, PARTS = WIDE ? 2 : 1;
  uint4 ahead[LOADS][PARTS];
  float gate_ahead[2] = {0.f, 0.f};
  auto ask = [&](int t0) {
    const int n = min(TILE, span.length - t0);
#pragma unroll
    for (int k = 0; k < LOADS; ++k) {
      const int i = tid + k * THREADS, t = i / EIGHTS;
      if (t >= n) continue;
      const size_t at = (size_t)(span.first + t0 + t) * X_WIDTH + channel(i % EIGHTS * 8);
#pragma unroll
      for (int e = 0; e < PARTS; ++e) ahead[k][e] = ((const uint4*)((const char*)d.x + at * (WIDE ? 4 : 2)))[e];
    }
    if (tid < n) {
      const size_t at = (size_t)(span.first + t0 + tid) * GATE_WIDTH + head;
      gate_ahead[0] = element<WIDE>(d.a, at), gate_ahead[1] = element<WIDE>(d.b, at);
    }
  };
  if (READY) ask(0);

  int next = 0;
  for (int t0 = 0; t0 < span.length; t0 += TILE) {
    const int n = min(TILE, span.length - t0);
    if (HIDDEN) {
      for (int t = 0; t < n; ++t) {
        const bf16* from = d.hidden + (size_t)(span.first + t0 + t) * HIDDEN;
        float squares = 0.f, b = 0.f, a = 0.f;
        for (int k = tid; k < HIDDEN / 8; k += THREADS) {
          const uint4 v = ((const uint4*)from)[k], vb = __ldg((const uint4*)(d.w + (size_t)head * HIDDEN) + k),
                      va = __ldg((const uint4*)(d.w + (size_t)(HV + head) * HIDDEN) + k);
          const u32 *x = (const u32*)&v, *wb = (const u32*)&vb, *wa = (const u32*)&va;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float first = low(x[e]), second = high(x[e]);
            squares += first * first + second * second;
            if (d.hidden_gain) {
              const float2 g = pair_of<WIDE_GAIN>(d.hidden_gain, k * 4 + e);
              first *= g.x, second *= g.y;
            }
            b += first * low(wb[e]) + second * high(wb[e]);
            a += first * low(wa[e]) + second * high(wa[e]);
          }
        }
        squares = warp_sum(squares), b = warp_sum(b), a = warp_sum(a);
        if (lane == 0) {
          float* p = sums + (t * WARPS + warp) * 3;
          p[0] = squares, p[1] = b, p[2] = a;
        }
      }
    }
    if (READY) {
#pragma unroll
      for (int k = 0; k < LOADS; ++k) {
        const int i = tid + k * THREADS;
        if (i / EIGHTS >= n) continue;
        float4* to = (float4*)lines + 2 * i;
        if (WIDE) {
#pragma unroll
          for (int e = 0; e < PARTS; ++e) {
            const float* f = (const float*)&ahead[k][e];
            to[e] = make_float4(f[0], f[1], f[2], f[3]);
          }
        } else {
          const uint4 v = ahead[k][0];
          to[0] = make_float4(low(v.x), high(v.x), low(v.y), high(v.y));
          to[1] = make_float4(low(v.z), high(v.z), low(v.w), high(v.w));
        }
      }
    } else {
      for (int i = tid; i < n * (LINE / 2); i += THREADS) {
        const int t = i / (LINE / 2), e = i % (LINE / 2) * 2, c = channel(e);
        float first = 0.f, second = 0.f;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
          const u32 v = *(const u32*)(seen(t0 + t + j) + c), w = *(const u32*)(d.taps + (size_t)j * CHANNELS + c);
          first += low(v) * low(w);
          second += high(v) * high(w);
        }
        // The graph rounds here, too.
        lines[t * LINE + e] = rounded(first * sigmoid(first));
        lines[t * LINE + e + 1] = rounded(second * sigmoid(second));
      }
    }
    __syncthreads();
    for (int t = tid; t < n; t += THREADS) {
      float a, b;
      if (HIDDEN) {
        float squares = 0.f;
        a = b = 0.f;
#pragma unroll
        for (int j = 0; j < WARPS; ++j) {
          const float* p = sums + (t * WARPS + j) * 3;
          squares += p[0], b += p[1], a += p[2];
        }
        const float r = d.hidden_gain ? rsqrtf(squares / HIDDEN + d.hidden_eps) : 1.f;
        a *= r, b *= r;
      } else if (READY) {
        a = gate_ahead[0], b = gate_ahead[1];
      } else {
        const size_t at = (size_t)(span.first + t0 + t) * GATE_WIDTH + head;
        a = element<WIDE>(d.a, at), b = element<WIDE>(d.b, at);
      }
      a += d.bias[head];
      decay[t] = expf(-d.rate[head] * (fmaxf(a, 0.f) + log1pf(expf(-fabsf(a)))));
      beta[t] = sigmoid(b);
    }
#pragma unroll 4
    for (int i = warp; i < 2 * n; i += WARPS) {
      float* p = lines + (i >> 1) * LINE + (i & 1) * DK;
      float squares = 0.f;
      for (int e = lane; e < DK; e += 32) squares += p[e] * p[e];
      float f = rsqrtf(warp_sum(squares) + d.eps);
      if (!(i & 1)) f *= rsqrtf((float)DK);
      for (int e = lane; e < DK; e += 32) p[e] *= f;
    }
    __syncthreads();
    if (READY && t0 + TILE < span.length) ask(t0 + TILE);

#pragma unroll 1
    for (int t = 0; t < n; ++t) {
      const float4 *q = (const float4*)(lines + t * LINE) + part, *k = (const float4*)(lines + t * LINE + DK) + part;
      const float g = decay[t];
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int i = 0; i < PER; ++i) {
        const float4 w = k[4 * i];
        s[i].x *= g, s[i].y *= g, s[i].z *= g, s[i].w *= g;
        sum.x += s[i].x * w.x, sum.y += s[i].y * w.y, sum.z += s[i].z * w.z, sum.w += s[i].w * w.w;
      }
      float read = (sum.x + sum.y) + (sum.z + sum.w);
      read += __shfl_xor_sync(~0u, read, 1);
      read += __shfl_xor_sync(~0u, read, 2);
      const float u = beta[t] * (lines[t * LINE + 2 * DK + row] - read);
      sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int i = 0; i < PER; ++i) {
        const float4 w = k[4 * i], o = q[4 * i];
        s[i].x += u * w.x, s[i].y += u * w.y, s[i].z += u * w.z, s[i].w += u * w.w;
        sum.x += s[i].x * o.x, sum.y += s[i].y * o.y, sum.z += s[i].z * o.z, sum.w += s[i].w * o.w;
      }
      float y = (sum.x + sum.y) + (sum.z + sum.w);
      y += __shfl_xor_sync(~0u, y, 1);
      y += __shfl_xor_sync(~0u, y, 2);
      if (part == 0) out[t * ROWS + row] = y;
      if (next < span.stops && d.stops[span.stop + next] == t0 + t + 1) {
        float* to = d.state_kept + (size_t)next * HV * DV * DK + place;
#pragma unroll
        for (int i = 0; i < PER; ++i) *(float4*)(to + 16 * i) = s[i];
        ++next;
      }
    }
    __syncthreads();

    if (READY) {
      for (int i = tid; i < n * ROWS; i += THREADS) {
        const int t = i / ROWS, e = i % ROWS;
        const size_t at = (size_t)(span.first + t0 + t) * HV * DV + head * DV + row0 + e;
        if (WIDE) ((float*)d.y)[at] = out[i];
        else ((bf16*)d.y)[at] = __float2bfloat16(out[i]);
      }
    } else {
      for (int t = warp; t < n; t += WARPS) {
        const float* line = out + t * ROWS;
        const size_t token = span.first + t0 + t;
        float squares = 0.f;
        for (int e = lane; e < DV; e += 32) {
          const float v = rounded(line[e]);
          squares += v * v;
        }
        const float f = rsqrtf(warp_sum(squares) / DV + d.norm_eps);
        for (int e = lane; e < DV; e += 32) {
          const float g = element<false>(d.z, token * X_WIDTH + head * DV + e), w = sigmoid(g);
          const float v = rounded(line[e]) * f * d.gain[e];
          ((bf16*)d.y)[token * HV * DV + head * DV + e] = __float2bfloat16(v * (SILU ? g * w : w));
        }
      }
    }
    // No thread writes the next lines before all have left these; `out` and the gates are written behind a barrier.
  }
#pragma unroll
  for (int i = 0; i < PER; ++i) *(float4*)(d.state_end + place + 16 * i) = s[i];
}

}  // namespace arriero
