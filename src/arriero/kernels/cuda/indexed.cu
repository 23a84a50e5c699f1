// Attention of each query over listed blocks of its row's cache. All query heads of one key head are the lines of the
// tensor cores' product and share each reading of a key; nothing is gathered and no mask is made. The grid is (splits,
// key heads, queries). Splits of a query's keys are brought together by the last block to arrive.
namespace arriero {

constexpr float NO_KEY = -1e30f;

// What a query reads, in turn: BS keys of each listed block that is complete, then the incomplete block up to itself.
template <int BS, int WIDTH>
__device__ __forceinline__ int key_of(const int* list, int slot, int end, int complete) {
  if (slot >= end) return -1;
  const int block = slot / BS;
  if (block >= WIDTH) return complete * BS + slot - WIDTH * BS;
  return list[block] < 0 ? -1 : list[block] * BS + slot % BS;
}

// GATED: results are multiplied by sigma of the gate that lies in `gates`, rows of GATE_ROW numbers, behind each head's query.
template <int D, int HEADS, int PER_HEAD, int SPLITS, int BS, int WIDTH, int GATE_ROW, bool PLAIN>
__device__ __forceinline__ void read_listed(const bf16* q, Side keys, Side values, const int* blocks, Query of,
                                            const bf16* gates, float* parts, u32* arrived, bf16* out, float scale,
                                            char* shared) {
  constexpr int SLICES = (PER_HEAD + 15) / 16, PADDED = SLICES * 16, STRIDE = D + 4, C = D / 32, V = D / 64;
  static_assert(THREADS == SLICES * 128, "four warps for 16 lines");
  bf16* qs = (bf16*)shared;                       // [PADDED][D]
  float* os = (float*)(shared + PADDED * D * 2);  // [4][PADDED][STRIDE]
  float* ml = os + 4 * PADDED * STRIDE;           // [4][PADDED][2]
  int* list = (int*)(ml + 4 * PADDED * 2);        // [WIDTH]
  __shared__ bool last;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, gid = lane >> 2, t = lane & 3;
  const int split = blockIdx.x, head = blockIdx.y, query = of.line, here = of.here;
  const int complete = (here + 1) / BS, total = WIDTH * BS + here + 1 - complete * BS;
  const int chunk = ((total + SPLITS - 1) / SPLITS + 63) & ~63;
  const int lo = split * chunk, hi = min(lo + chunk, total);
  const size_t line = (size_t)query * HEADS * PER_HEAD + head * PER_HEAD;
  const bf16* mine_of_q = q + ((size_t)of.query * HEADS + head) * PER_HEAD * D;
  for (int i = tid; i < PADDED * D / 8; i += THREADS)
    ((uint4*)qs)[i] = i < PER_HEAD * D / 8 ? ((const uint4*)mine_of_q)[i] : make_uint4(0, 0, 0, 0);
  for (int i = tid; i < WIDTH; i += THREADS) {
    const int block = blocks[(size_t)query * WIDTH + i];
    list[i] = block < complete ? block : -1;
  }
  __syncthreads();

  const bf16* K = keys.at + head * keys.head;
  const bf16* of_values = values.at + head * values.head;
  const int slice = warp >> 2, quarter = warp & 3, line0 = slice * 16 + gid, line1 = line0 + 8;
  float o[D / 8][4], m0 = NO_KEY, m1 = NO_KEY, l0 = 0.f, l1 = 0.f;
#pragma unroll
  for (int i = 0; i < D / 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
  const float factor = scale * 1.4426950408889634f;
  const uint4 none = make_uint4(0, 0, 0, 0);
  for (int kb = lo + 16 * quarter; kb < hi; kb += 64) {
    float s[2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
    {
      uint4 kf[2][C];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int key = key_of<BS, WIDTH>(list, kb + 8 * j + gid, hi, complete);
        const bf16* p = K + key * keys.key;
#pragma unroll
        for (int c = 0; c < C; ++c) kf[j][c] = key < 0 ? none : eight<PLAIN>(keys, p, 32 * c + 8 * t);
      }
#pragma unroll
      for (int c = 0; c < C; ++c) {
        uint4 qa = *(const uint4*)(qs + line0 * D + 32 * c + 8 * t), qb = *(const uint4*)(qs + line1 * D + 32 * c + 8 * t);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          mma(s[j], qa.x, qb.x, qa.y, qb.y, kf[j][c].x, kf[j][c].y);
          mma(s[j], qa.z, qb.z, qa.w, qb.w, kf[j][c].z, kf[j][c].w);
        }
      }
    }
    // The keys of this lane's columns are those whose values it holds.
    int seen[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) seen[j] = key_of<BS, WIDTH>(list, kb + 2 * t + (j & 1) + 8 * (j >> 1), hi, complete);
    float x0 = NO_KEY, x1 = NO_KEY;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool see = seen[2 * j + e] >= 0;
        s[j][e] = see ? s[j][e] * factor : NO_KEY;
        s[j][2 + e] = see ? s[j][2 + e] * factor : NO_KEY;
        x0 = fmaxf(x0, s[j][e]);
        x1 = fmaxf(x1, s[j][2 + e]);
      }
    x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 1));
    x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 2));
    x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 1));
    x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 2));
    float n0 = fmaxf(m0, x0), n1 = fmaxf(m1, x1), f0 = exp2f(m0 - n0), f1 = exp2f(m1 - n1);
    m0 = n0, m1 = n1, l0 *= f0, l1 *= f1;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        // Where all is hidden the greatest is NO_KEY too, and its power would be 1.
        s[j][e] = s[j][e] <= NO_KEY ? 0.f : exp2f(s[j][e] - n0);
        s[j][2 + e] = s[j][2 + e] <= NO_KEY ? 0.f : exp2f(s[j][2 + e] - n1);
        l0 += s[j][e];
        l1 += s[j][2 + e];
      }
#pragma unroll
    for (int i = 0; i < D / 8; ++i) o[i][0] *= f0, o[i][1] *= f0, o[i][2] *= f1, o[i][3] *= f1;
    u32 a0 = pair(s[0][0], s[0][1]), a1 = pair(s[0][2], s[0][3]);
    u32 a2 = pair(s[1][0], s[1][1]), a3 = pair(s[1][2], s[1][3]);
    uint4 vf[4][V];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bf16* p = of_values + seen[j] * values.key;
#pragma unroll
      for (int c = 0; c < V; ++c) vf[j][c] = seen[j] < 0 ? none : eight<PLAIN>(values, p, 64 * c + 8 * gid);
    }
#pragma unroll
    for (int c = 0; c < V; ++c) {
      const u32 *v0 = (const u32*)&vf[0][c], *v1 = (const u32*)&vf[1][c];
      const u32 *v2 = (const u32*)&vf[2][c], *v3 = (const u32*)&vf[3][c];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        u32 half = (j & 1) ? 0x7632 : 0x5410;
        mma(o[c * 8 + j], a0, a1, a2, a3, permute(v0[j >> 1], v1[j >> 1], half), permute(v2[j >> 1], v3[j >> 1], half));
      }
    }
  }
  l0 += __shfl_xor_sync(~0u, l0, 1);
  l0 += __shfl_xor_sync(~0u, l0, 2);
  l1 += __shfl_xor_sync(~0u, l1, 1);
  l1 += __shfl_xor_sync(~0u, l1, 2);
#pragma unroll
  for (int c = 0; c < V; ++c)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      int d = 64 * c + 16 * t + j;
      float *p0 = os + (quarter * PADDED + line0) * STRIDE + d, *p1 = os + (quarter * PADDED + line1) * STRIDE + d;
      p0[0] = o[c * 8 + j][0], p0[8] = o[c * 8 + j][1];
      p1[0] = o[c * 8 + j][2], p1[8] = o[c * 8 + j][3];
    }
  if (t == 0) {
    float *p0 = ml + (quarter * PADDED + line0) * 2, *p1 = ml + (quarter * PADDED + line1) * 2;
    p0[0] = m0, p0[1] = l0;
    p1[0] = m1, p1[1] = l1;
  }
  __syncthreads();

  const int place = query * HEADS + head;
  float* mine = parts + (size_t)place * SPLITS * PER_HEAD * STRIDE;
  auto give = [&](int r, int d, float4 a, float l) {
    // A query that reads no key yields zeros.
    const float inverse = l > 0.f ? 1.f / l : 0.f;
    u32 v[2] = {pair(a.x * inverse, a.y * inverse), pair(a.z * inverse, a.w * inverse)};
    if (GATE_ROW) {
      const uint2 g = *(const uint2*)(gates + (size_t)of.query * GATE_ROW + (size_t)(2 * (head * PER_HEAD + r) + 1) * D + d);
      v[0] = pair(low(v[0]) / (1.f + __expf(-low(g.x))), high(v[0]) / (1.f + __expf(-high(g.x))));
      v[1] = pair(low(v[1]) / (1.f + __expf(-low(g.y))), high(v[1]) / (1.f + __expf(-high(g.y))));
    }
    *(uint2*)(out + (line + r) * D + d) = make_uint2(v[0], v[1]);
  };
  for (int i = tid; i < PER_HEAD * (D / 4); i += THREADS) {
    int r = i / (D / 4), d = i % (D / 4) * 4;
    float m = NO_KEY, l = 0.f;
    float4 a = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int k = 0; k < 4; ++k) m = fmaxf(m, ml[(k * PADDED + r) * 2]);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float f = exp2f(ml[(k * PADDED + r) * 2] - m);
      float4 v = *(float4*)(os + (k * PADDED + r) * STRIDE + d);
      l += f * ml[(k * PADDED + r) * 2 + 1];
      a.x += f * v.x, a.y += f * v.y, a.z += f * v.z, a.w += f * v.w;
    }
    if (SPLITS == 1) {
      give(r, d, a, l);
    } else {
      float* to = mine + ((size_t)split * PER_HEAD + r) * STRIDE;
      __stcg((float4*)(to + d), a);
      if (d == 0) __stcg((float2*)(to + D), make_float2(m, l));
    }
  }
  if (SPLITS == 1) return;
  __threadfence();
  __syncthreads();
  if (tid == 0) last = atomicAdd(arrived + place, 1u) == SPLITS - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int i = tid; i < PER_HEAD * (D / 4); i += THREADS) {
    int r = i / (D / 4), d = i % (D / 4) * 4;
    float m = NO_KEY, l = 0.f;
    float4 a = make_float4(0, 0, 0, 0);
    float2 of[SPLITS];
#pragma unroll
    for (int k = 0; k < SPLITS; ++k) {
      of[k] = __ldcg((const float2*)(mine + ((size_t)k * PER_HEAD + r) * STRIDE + D));
      m = fmaxf(m, of[k].x);
    }
#pragma unroll
    for (int k = 0; k < SPLITS; ++k) {
      float f = exp2f(of[k].x - m);
      float4 v = __ldcg((const float4*)(mine + ((size_t)k * PER_HEAD + r) * STRIDE + d));
      l += f * of[k].y;
      a.x += f * v.x, a.y += f * v.y, a.z += f * v.z, a.w += f * v.w;
    }
    give(r, d, a, l);
  }
  if (tid == 0) arrived[place] = 0;
}

}  // namespace arriero
