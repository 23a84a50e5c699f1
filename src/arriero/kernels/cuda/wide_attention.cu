// Causal attention of few new tokens of several rows, each over its own cache, for heads wider than attention.cu holds in
// registers: its warps divide the keys to score them, and the elements of the values to sum them. q, k and v come normed
// and rotated; the new ones are appended in place.
//
// Groups are attention.cu's, of at most 16 lines. The grid is (splits, key heads, groups).
namespace arriero {

template <int D, int HEADS, int PER_HEAD, int TOKENS, int SPLITS>
__device__ __forceinline__ void attend_wide(const bf16* qkv, const Group* groups, bf16* const* keys,
                                            bf16* const* values, u32* arrived, float* parts, bf16* out, float scale,
                                            char* shared) {
  constexpr int LINES = TOKENS * PER_HEAD, QUERIES = HEADS * PER_HEAD * D, WIDTH = QUERIES + 2 * HEADS * D;
  constexpr int STRIDE = D + 4, OWN = D / 4, V = OWN / 64, SCORES = 64 + 4;
  static_assert(THREADS == 128 && LINES <= 16 && OWN % 64 == 0, "four warps, 16 lines, a quarter of the values each");
  bf16* qs = (bf16*)shared;                        // [16][D]
  float* scores = (float*)(shared + 16 * D * 2);   // [16][SCORES]
  __shared__ bool last;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, gid = lane >> 2, t = lane & 3;
  const int split = blockIdx.x, head = blockIdx.y;
  const Group g = groups[blockIdx.z];
  bf16* K = keys[g.row] + (size_t)head * g.capacity * D;
  bf16* values_of_head = values[g.row] + (size_t)head * g.capacity * D;
  const int end = g.place + g.count, chunk = ((end + SPLITS - 1) / SPLITS + 63) & ~63;
  const int lo = split * chunk, hi = min(lo + chunk, end), lines = g.count * PER_HEAD;

  if (lo < hi) {
    for (int i = tid; i < 16 * (D / 8); i += THREADS) {
      const int r = i / (D / 8), e = i % (D / 8);
      uint4 v = make_uint4(0, 0, 0, 0);
      if (r < lines)
        v = ((const uint4*)(qkv + (size_t)(g.query + r / PER_HEAD) * WIDTH + (head * PER_HEAD + r % PER_HEAD) * D))[e];
      ((uint4*)qs)[i] = v;
    }
    // Groups of one row may write the same places, with the same bits.
    for (int i = tid; i < (end - g.fresh_place) * (D / 8); i += THREADS) {
      const int n = i / (D / 8), e = i % (D / 8), place = g.fresh_place + n;
      if (place < lo || place >= hi) continue;
      const bf16* from = qkv + (size_t)(g.fresh + n) * WIDTH + QUERIES + head * D;
      ((uint4*)(K + (size_t)place * D))[e] = ((const uint4*)from)[e];
      ((uint4*)(values_of_head + (size_t)place * D))[e] = ((const uint4*)(from + HEADS * D))[e];
    }
  }
  __syncthreads();

  float o[OWN / 8][4], m0 = NOTHING, m1 = NOTHING, l0 = 0.f, l1 = 0.f;
#pragma unroll
  for (int i = 0; i < OWN / 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
  const float log2e = 1.4426950408889634f;
  const int limit0 = g.place + gid / PER_HEAD, limit1 = g.place + (gid + 8) / PER_HEAD;
  for (int kb = lo; kb < hi; kb += 64) {
    float s[2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
    const bf16 *k0 = K + (size_t)min(kb + 16 * warp + gid, hi - 1) * D + 8 * t,
               *k1 = K + (size_t)min(kb + 16 * warp + 8 + gid, hi - 1) * D + 8 * t;
#pragma unroll 4
    for (int c = 0; c < D / 32; ++c) {
      const uint4 a = *(const uint4*)(qs + gid * D + 32 * c + 8 * t), b = *(const uint4*)(qs + (gid + 8) * D + 32 * c + 8 * t);
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
        scores[gid * SCORES + column] = key < hi && key <= limit0 ? s[j][e] * scale * log2e : NOTHING;
        scores[(gid + 8) * SCORES + column] = key < hi && key <= limit1 ? s[j][2 + e] * scale * log2e : NOTHING;
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
        const int key = min(kb + 16 * k + 2 * t + (j & 1) + 8 * (j >> 1), hi - 1);
        const bf16* from = values_of_head + (size_t)key * D + OWN * warp + 8 * gid;
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
    __syncthreads();
  }
  l0 += __shfl_xor_sync(~0u, l0, 1);
  l0 += __shfl_xor_sync(~0u, l0, 2);
  l1 += __shfl_xor_sync(~0u, l1, 1);
  l1 += __shfl_xor_sync(~0u, l1, 2);

  const int place = blockIdx.z * HEADS + head;
  float* mine = parts + (size_t)place * SPLITS * LINES * STRIDE;
  auto line_of = [&](int part, int r) { return mine + ((size_t)part * LINES + r) * STRIDE; };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = gid + 8 * half;
    if (r >= lines) continue;
    float* to = line_of(split, r);
#pragma unroll
    for (int c = 0; c < V; ++c)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int d = OWN * warp + 64 * c + 16 * t + j;
        __stcg(to + d, o[c * 8 + j][2 * half]);
        __stcg(to + d + 8, o[c * 8 + j][2 * half + 1]);
      }
    if (warp == 0 && t == 0) {
      __stcg(to + D, half ? m1 : m0);
      __stcg(to + D + 1, half ? l1 : l0);
    }
  }
  __threadfence();
  __syncthreads();
  if (tid == 0) last = atomicAdd(arrived + place, 1u) == SPLITS - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int i = tid; i < lines * (D / 4); i += THREADS) {
    const int r = i / (D / 4), d = i % (D / 4) * 4;
    float m = NOTHING, l = 0.f;
    float4 a = make_float4(0, 0, 0, 0), part[SPLITS];
    float2 of[SPLITS];
#pragma unroll
    for (int k = 0; k < SPLITS; ++k) {
      of[k] = __ldcg((const float2*)(line_of(k, r) + D));
      part[k] = __ldcg((const float4*)(line_of(k, r) + d));
    }
#pragma unroll
    for (int k = 0; k < SPLITS; ++k) m = fmaxf(m, of[k].x);
#pragma unroll
    for (int k = 0; k < SPLITS; ++k) {
      const float f = exp2f(of[k].x - m);
      l += f * of[k].y;
      a.x += f * part[k].x, a.y += f * part[k].y, a.z += f * part[k].z, a.w += f * part[k].w;
    }
    const float inverse = 1.f / l;
    const size_t line = (size_t)(g.line + r / PER_HEAD) * QUERIES + (head * PER_HEAD + r % PER_HEAD) * D;
    *(uint2*)(out + line + d) = make_uint2(pair(a.x * inverse, a.y * inverse), pair(a.z * inverse, a.w * inverse));
  }
  if (tid == 0) arrived[place] = 0;
}

}  // namespace arriero
