// Latent attention of few new tokens of several rows, each over its own cache, in one launch. All query heads share one
// key a token, RANK elements of a latent and ROTATED of a rotated key; the latent is the value too. Queries come absorbed:
// their part for latents is made, their other part is rotated here. What is new is normed, rotated and appended in place.
//
// A line is one head of one token; a block takes 16 lines of one of attention.cu's groups and a part of the keys. Its warps
// divide the keys to score them, and the elements of the latents to sum them; the next 64 keys are on their way to shared
// memory meanwhile. Then the blocks wait for one another, and
// those of the same lines divide the elements among themselves to sum what all have made of them. The grid is splits times
// blocks of lines times groups, and all of it stands on the device at once where there is more than one split.
namespace arriero {

struct Latent {
  const bf16* absorbed;  // [HEADS, all tokens, RANK]
  int tokens;            // of all
  const bf16* queries;   // of each token QUERY_WIDTH elements, HEADS times NOPE that are absorbed and ROTATED that are not
  const bf16* fresh;     // of each token FRESH_WIDTH elements: its latent and what is rotated, from FRESH_FROM on
  const float* angles;   // [all tokens, ROTATED / 2, 2]
  const void* gain;      // of the latent's norm
  float eps, scale;
};

constexpr int LINES = 16;

// Elements from one line of queries or keys to the next: 20 words behind a multiple of 32, so that what lanes read together
// lies in different banks.
__device__ constexpr int line_of(int width) { return width + (20 + 32 - width / 2 % 32) % 32 * 2; }

// Keys of a split.
template <int SPLITS>
__device__ __forceinline__ int chunk_of(int end) {
  return ((end + SPLITS - 1) / SPLITS + 63) & ~63;
}

// Element i of a rotated part, by pairs (2i, 2i + 1) or by halves.
template <int ROTATED, bool INTERLEAVED>
__device__ __forceinline__ bf16 turned(const bf16* from, const float* angles, int i) {
  constexpr int HALF = ROTATED / 2;
  const int first = INTERLEAVED ? i & ~1 : i % HALF, second = INTERLEAVED ? i | 1 : i % HALF + HALF;
  const float2 turn = ((const float2*)angles)[INTERLEAVED ? i / 2 : i % HALF];
  const float a = __bfloat162float(from[first]), b = __bfloat162float(from[second]);
  return __float2bfloat16(i == first ? a * turn.x - b * turn.y : b * turn.x + a * turn.y);
}

template <int HEADS, int RANK, int ROTATED, int NOPE, int QUERY_WIDTH, int FRESH_WIDTH, int FRESH_FROM, int SPLITS,
          int BUFFERS, bool INTERLEAVED, bool WIDE_GAIN>
__device__ __forceinline__ void attend_latent(const Latent& in, const Group& g, bf16* K, float* mine, int split, int line0, char* shared) {
  constexpr int D = RANK + ROTATED, OWN = RANK / 4, V = OWN / 64, STRIDE = RANK + 4, SCORES = 64 + 4;
  constexpr int LINE = line_of(D);
  static_assert(THREADS == 128 && OWN % 64 == 0 && D % 32 == 0, "four warps, a quarter of the latents each");
  bf16* qs = (bf16*)shared;                            // [LINES][LINE]
  bf16* tiles = qs + LINES * LINE;                      // [BUFFERS][64][LINE]
  float* scores = (float*)(tiles + BUFFERS * 64 * LINE);  // [LINES][SCORES]
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, gid = lane >> 2, t = lane & 3;
  const int lines = min(g.count * HEADS - line0, LINES);
  const int end = g.place + g.count, chunk = chunk_of<SPLITS>(end), lo = split * chunk, hi = min(lo + chunk, end);
  if (lines <= 0) return;
  // 64 keys from `kb` on, of those that stand from `from` to before `to`; what is behind the last is the last again.
  auto bring = [&](int kb, int from, int to) {
    bf16* tile = tiles + (BUFFERS == 1 ? 0 : (kb - lo) / 64 % BUFFERS) * 64 * LINE;
    for (int i = tid; i < 64 * (D / 8); i += THREADS) {
      const int r = i / (D / 8), e = i % (D / 8) * 8, key = min(kb + r, hi - 1);
      if (key >= from && key < to) begin_copy(tile + r * LINE + e, K + (size_t)key * D + e);
    }
  };
  if (lo < hi) {
    // All but the new ones, before all else.
    bring(lo, lo, g.fresh_place);
    for (int i = tid; i < LINES * (RANK / 8); i += THREADS) {
      const int r = i / (RANK / 8), e = i % (RANK / 8), line = line0 + r;
      uint4 v = make_uint4(0, 0, 0, 0);
      if (r < lines)
        v = ((const uint4*)(in.absorbed + ((size_t)(line % HEADS) * in.tokens + g.query + line / HEADS) * RANK))[e];
      *(uint4*)(qs + r * LINE + 8 * e) = v;
    }
    for (int i = tid; i < LINES * ROTATED; i += THREADS) {
      const int r = i / ROTATED, e = i % ROTATED, line = line0 + r;
      bf16 v = __float2bfloat16(0.f);
      if (r < lines) {
        const size_t token = g.query + line / HEADS;
        v = turned<ROTATED, INTERLEAVED>(in.queries + token * QUERY_WIDTH + line % HEADS * (NOPE + ROTATED) + NOPE,
                                         in.angles + token * ROTATED, e);
      }
      qs[r * LINE + RANK + e] = v;
    }
    // Blocks of one row may write the same places, with the same bits.
    for (int n = warp; n < end - g.fresh_place; n += THREADS / 32) {
      const int at = g.fresh_place + n;
      if (at < lo || at >= hi) continue;
      const size_t token = g.fresh + n;
      const bf16* from = in.fresh + token * FRESH_WIDTH + FRESH_FROM;
      float x[RANK / 32], squares = 0.f;
#pragma unroll
      for (int e = 0; e < RANK / 32; ++e) {
        x[e] = __bfloat162float(from[lane + 32 * e]);
        squares += x[e] * x[e];
      }
      const float r = rsqrtf(warp_sum(squares) / RANK + in.eps);
#pragma unroll
      for (int e = 0; e < RANK / 32; ++e) {
        const int i = lane + 32 * e;
        const float gain = WIDE_GAIN ? ((const float*)in.gain)[i] : __bfloat162float(((const bf16*)in.gain)[i]);
        K[(size_t)at * D + i] = __float2bfloat16(x[e] * r * gain);
      }
      for (int e = lane; e < ROTATED; e += 32)
        K[(size_t)at * D + RANK + e] = turned<ROTATED, INTERLEAVED>(from + RANK, in.angles + token * ROTATED, e);
    }
    __threadfence();
    __syncthreads();
    bring(lo, max(lo, g.fresh_place), hi);

    float o[OWN / 8][4], m0 = NOTHING, m1 = NOTHING, l0 = 0.f, l1 = 0.f;
#pragma unroll
    for (int i = 0; i < OWN / 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
    const float log2e = 1.4426950408889634f;
    const int limit0 = g.place + (line0 + gid) / HEADS, limit1 = g.place + (line0 + gid + 8) / HEADS;
    for (int kb = lo; kb < hi; kb += 64) {
      end_copies();
      __syncthreads();
      if (BUFFERS > 1 && kb + 64 < hi) bring(kb + 64, lo, hi);
      const bf16* tile = tiles + (BUFFERS == 1 ? 0 : (kb - lo) / 64 % BUFFERS) * 64 * LINE;
      float s[2][4];
#pragma unroll
      for (int j = 0; j < 2; ++j) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
      const bf16 *k0 = tile + (16 * warp + gid) * LINE + 8 * t, *k1 = k0 + 8 * LINE;
#pragma unroll 9
      for (int c = 0; c < D / 32; ++c) {
        const uint4 a = *(const uint4*)(qs + gid * LINE + 32 * c + 8 * t);
        const uint4 b = *(const uint4*)(qs + (gid + 8) * LINE + 32 * c + 8 * t);
        const uint4 f0 = *(const uint4*)(k0 + 32 * c), f1 = *(const uint4*)(k1 + 32 * c);
        mma(s[0], a.x, b.x, a.y, b.y, f0.x, f0.y);
        mma(s[0], a.z, b.z, a.w, b.w, f0.z, f0.w);
        mma(s[1], a.x, b.x, a.y, b.y, f1.x, f1.y);
        mma(s[1], a.z, b.z, a.w, b.w, f1.z, f1.w);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = 16 * warp + 8 * j + 2 * t + e, key = kb + column;
          scores[gid * SCORES + column] = key < hi && key <= limit0 ? s[j][e] * in.scale * log2e : NOTHING;
          scores[(gid + 8) * SCORES + column] = key < hi && key <= limit1 ? s[j][2 + e] * in.scale * log2e : NOTHING;
        }
      __syncthreads();
      // All warps need all weights, and make them alike.
      float p[4][8], x0 = NOTHING, x1 = NOTHING;
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int column = 16 * k + 8 * (e >> 1) + 2 * t + (e & 1);
          p[k][e] = scores[gid * SCORES + column];
          p[k][4 + e] = scores[(gid + 8) * SCORES + column];
          x0 = fmaxf(x0, p[k][e]);
          x1 = fmaxf(x1, p[k][4 + e]);
        }
      x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 1));
      x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 2));
      x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 1));
      x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 2));
      const float n0 = fmaxf(m0, x0), n1 = fmaxf(m1, x1), f0 = exp2f(m0 - n0), f1 = exp2f(m1 - n1);
      m0 = n0, m1 = n1, l0 *= f0, l1 *= f1;
#pragma unroll
      for (int i = 0; i < OWN / 8; ++i) o[i][0] *= f0, o[i][1] *= f0, o[i][2] *= f1, o[i][3] *= f1;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // Where all is hidden the greatest is NOTHING too, and its power would be 1.
          p[k][e] = p[k][e] <= NOTHING ? 0.f : exp2f(p[k][e] - n0);
          p[k][4 + e] = p[k][4 + e] <= NOTHING ? 0.f : exp2f(p[k][4 + e] - n1);
          l0 += p[k][e];
          l1 += p[k][4 + e];
        }
        uint4 vf[4][V];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const bf16* from = tile + (16 * k + 2 * t + (j & 1) + 8 * (j >> 1)) * LINE + OWN * warp + 8 * gid;
#pragma unroll
          for (int c = 0; c < V; ++c) vf[j][c] = *(const uint4*)(from + 64 * c);
        }
        const u32 a0 = pair(p[k][0], p[k][1]), a1 = pair(p[k][4], p[k][5]), a2 = pair(p[k][2], p[k][3]),
                  a3 = pair(p[k][6], p[k][7]);
#pragma unroll
        for (int c = 0; c < V; ++c) {
          const u32 *v0 = (const u32*)&vf[0][c], *v1 = (const u32*)&vf[1][c];
          const u32 *v2 = (const u32*)&vf[2][c], *v3 = (const u32*)&vf[3][c];
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const u32 half = (j & 1) ? 0x7632 : 0x5410;
            mma(o[c * 8 + j], a0, a1, a2, a3, permute(v0[j >> 1], v1[j >> 1], half), permute(v2[j >> 1], v3[j >> 1], half));
          }
        }
      }
      if (BUFFERS == 1 && kb + 64 < hi) {
        __syncthreads();
        bring(kb + 64, lo, hi);
      }
    }
    l0 += __shfl_xor_sync(~0u, l0, 1);
    l0 += __shfl_xor_sync(~0u, l0, 2);
    l1 += __shfl_xor_sync(~0u, l1, 1);
    l1 += __shfl_xor_sync(~0u, l1, 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = gid + 8 * half;
      if (r >= lines) continue;
      float* to = mine + ((size_t)split * LINES + r) * STRIDE;
#pragma unroll
      for (int c = 0; c < V; ++c)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int d = OWN * warp + 64 * c + 16 * t + j;
          __stcg(to + d, o[c * 8 + j][2 * half]);
          __stcg(to + d + 8, o[c * 8 + j][2 * half + 1]);
        }
      if (warp == 0 && t == 0) {
        __stcg(to + RANK, half ? m1 : m0);
        __stcg(to + RANK + 1, half ? l1 : l0);
      }
    }
  }
}

// A block's share of the elements of its lines: of each the sum over all splits, weighed by what their keys weigh.
template <int HEADS, int RANK, int SPLITS>
__device__ __forceinline__ void combine_latent(const Group& g, const float* mine, bf16* out, int split, int line0,
                                               char* shared) {
  constexpr int STRIDE = RANK + 4, SHARE = RANK / SPLITS, ITEMS = LINES * SHARE / 4;
  constexpr int TOGETHER = ITEMS < THREADS ? THREADS / ITEMS : 1;  // threads that divide the splits of four elements
  static_assert(SHARE % 4 == 0 && (TOGETHER & (TOGETHER - 1)) == 0 && TOGETHER <= 32, "lanes of a warp sum");
  float* weights = (float*)shared;  // [LINES][SPLITS]
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int lines = min(g.count * HEADS - line0, LINES), end = g.place + g.count, chunk = chunk_of<SPLITS>(end);
  const int used = (end + chunk - 1) / chunk;
  auto line_of = [&](int part, int r) { return mine + ((size_t)part * LINES + r) * STRIDE; };
  for (int r = warp; r < lines; r += THREADS / 32) {
    float m = NOTHING, l = 0.f;
    for (int k = lane; k < used; k += 32) m = fmaxf(m, __ldcg(line_of(k, r) + RANK));
#pragma unroll
    for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    for (int k = lane; k < used; k += 32) {
      const float2 of = __ldcg((const float2*)(line_of(k, r) + RANK));
      const float f = exp2f(of.x - m);
      weights[r * SPLITS + k] = f;
      l += f * of.y;
    }
    l = 1.f / warp_sum(l);
    for (int k = lane; k < used; k += 32) weights[r * SPLITS + k] *= l;
  }
  __syncthreads();
#pragma unroll 1
  for (int item = tid / TOGETHER; item < ITEMS; item += THREADS / TOGETHER) {
    const int r = item / (SHARE / 4), d = split * SHARE + item % (SHARE / 4) * 4, line = line0 + r;
    float4 a = make_float4(0, 0, 0, 0);
    const int count = r < lines ? used : 0;
#pragma unroll 16
    for (int k = tid % TOGETHER; k < count; k += TOGETHER) {
      const float4 v = __ldcg((const float4*)(line_of(k, r) + d));
      const float f = weights[r * SPLITS + k];
      a.x += f * v.x, a.y += f * v.y, a.z += f * v.z, a.w += f * v.w;
    }
#pragma unroll
    for (int o = TOGETHER / 2; o; o >>= 1) {
      a.x += __shfl_xor_sync(~0u, a.x, o);
      a.y += __shfl_xor_sync(~0u, a.y, o);
      a.z += __shfl_xor_sync(~0u, a.z, o);
      a.w += __shfl_xor_sync(~0u, a.w, o);
    }
    if (r < lines && tid % TOGETHER == 0) {
      bf16* to = out + ((size_t)(g.line + line / HEADS) * HEADS + line % HEADS) * RANK + d;
      *(uint2*)to = make_uint2(pair(a.x, a.y), pair(a.z, a.w));
    }
  }
}

}  // namespace arriero
