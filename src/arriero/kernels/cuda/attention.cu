// Attention of few new tokens of several rows, causal or over all that is new, each over its own cache, in one launch: norms of q and k heads,
// rotation, append in place, softmax over splits of the keys, and their combination by the last block to arrive. A sink is
// one more logit of a query head, without a value, which that combination takes in.
//
// A group is some tokens of one row, few enough that with all query heads of one key head they are at most 32 lines of
// the tensor cores' product; they share each reading of the keys. The grid is (splits, key heads, groups).
namespace arriero {

// One group, in places of the row's buffers.
struct Group {
  int query;       // first token, on the packed axis
  int count;       // tokens
  int place;       // where the first token stands
  int fresh;       // first token of the row that is new, on the packed axis
  int fresh_place; // where that one stands
  int capacity;    // places of the buffers
  int row;         // whose buffers
  int line;        // of the result, where the first token's goes
};

constexpr float NOTHING = -1e30f;

// A head as one warp holds it: pairs (i, i + D/2), with their gains and turns, so that all is on its way at once.
template <int D, bool NORM, bool WIDE_GAIN, bool ROTATE>
struct Head {
  static constexpr int PER = D / 64;
  float a[PER], b[PER], gain_a[PER], gain_b[PER];
  float2 turn[PER];
  __device__ __forceinline__ void load(const bf16* from, const void* gain, const float* angles) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int e = 0; e < PER; ++e) {
      const int i = lane * PER + e;
      a[e] = __bfloat162float(from[i]);
      b[e] = __bfloat162float(from[i + D / 2]);
      if (NORM) {
        gain_a[e] = WIDE_GAIN ? ((const float*)gain)[i] : __bfloat162float(((const bf16*)gain)[i]);
        gain_b[e] = WIDE_GAIN ? ((const float*)gain)[i + D / 2] : __bfloat162float(((const bf16*)gain)[i + D / 2]);
      }
      if (ROTATE) turn[e] = ((const float2*)angles)[i];
    }
  }
  // Norm, gain, rotation of the pairs, to bfloat16.
  __device__ __forceinline__ void finish(float eps, bf16* to) {
    const int lane = threadIdx.x & 31;
    float squares = 0.f;
#pragma unroll
    for (int e = 0; e < PER; ++e) squares += a[e] * a[e] + b[e] * b[e];
    if (NORM) {
      float r = rsqrtf(warp_sum(squares) / D + eps);
#pragma unroll
      for (int e = 0; e < PER; ++e) {
        // The graph rounds here, too.
        a[e] = __bfloat162float(__float2bfloat16(a[e] * r * gain_a[e]));
        b[e] = __bfloat162float(__float2bfloat16(b[e] * r * gain_b[e]));
      }
    }
#pragma unroll
    for (int e = 0; e < PER; ++e) {
      int i = lane * PER + e;
      float x = a[e], y = b[e];
      if (ROTATE) {
        x = a[e] * turn[e].x - b[e] * turn[e].y;
        y = b[e] * turn[e].x + a[e] * turn[e].y;
      }
      to[i] = __float2bfloat16(x);
      to[i + D / 2] = __float2bfloat16(y);
    }
  }
};

template <int D, int HEADS, int PER_HEAD, int TOKENS, int SPLITS, int WINDOW, bool CAPPED, bool NORM_Q, bool NORM_K,
          bool WIDE_GAIN, bool ROTATE, bool ALL_NEW>
__device__ __forceinline__ void attend(const bf16* qkv, const float* angles, const Group* groups, const void* q_gain,
                                       const void* k_gain, const void* sinks, bf16* const* keys, bf16* const* values,
                                       u32* arrived, float* parts, bf16* out, float scale, float cap, float q_eps,
                                       float k_eps, char* shared) {
  constexpr int LINES = TOKENS * PER_HEAD, SLICES = (LINES + 15) / 16, PADDED = SLICES * 16;
  constexpr int QUERIES = HEADS * PER_HEAD * D, WIDTH = QUERIES + 2 * HEADS * D, STRIDE = D + 4;
  constexpr int C = D / 32, V = D / 64;
  static_assert(THREADS == SLICES * 128, "four warps for 16 lines");
  bf16* qs = (bf16*)shared;                              // [PADDED][D]
  float* os = (float*)(shared + PADDED * D * 2);         // [4][PADDED][STRIDE]
  float* ml = os + 4 * PADDED * STRIDE;                  // [4][PADDED][2]
  __shared__ bool last;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, gid = lane >> 2, t = lane & 3;
  const int split = blockIdx.x, head = blockIdx.y;
  const Group g = groups[blockIdx.z];
  bf16* K = keys[g.row] + (size_t)head * g.capacity * D;
  bf16* values_of_head = values[g.row] + (size_t)head * g.capacity * D;
  const int end = g.place + g.count;
  const int begin = WINDOW ? max(0, g.place - WINDOW + 1) : 0;
  const int chunk = ((end - begin + SPLITS - 1) / SPLITS + 63) & ~63;
  const int lo = begin + split * chunk, hi = min(lo + chunk, end);
  const int lines = g.count * PER_HEAD;

  const int slice = warp >> 2, quarter = warp & 3, line0 = slice * 16 + gid, line1 = line0 + 8;
  uint4 kf[2][C], vf[4][V];
  auto load_keys = [&](int kb) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bf16* p = K + (size_t)min(kb + 8 * j + gid, hi - 1) * D + 8 * t;
#pragma unroll
      for (int c = 0; c < C; ++c) kf[j][c] = *(const uint4*)(p + 32 * c);
    }
  };
  auto load_values = [&](int kb) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bf16* p = values_of_head + (size_t)min(kb + 2 * t + (j & 1) + 8 * (j >> 1), hi - 1) * D + 8 * gid;
#pragma unroll
      for (int c = 0; c < V; ++c) vf[j][c] = *(const uint4*)(p + 64 * c);
    }
  };
  const int first_key = lo + 16 * quarter;
  // Keys that stood there before need not wait for the new ones.
  const bool early = first_key + 16 <= min(hi, g.fresh_place);

  if (lo < hi) {
    constexpr int ALL = THREADS / 32;
    const int fresh = end - g.fresh_place;
    auto query_of = [&](int r) {
      return qkv + (size_t)(g.query + r / PER_HEAD) * WIDTH + (head * PER_HEAD + r % PER_HEAD) * D;
    };
    auto key_of = [&](int i) { return qkv + (size_t)(g.fresh + i) * WIDTH + QUERIES + head * D; };
    auto mine_to_write = [&](int i) { return g.fresh_place + i >= lo && g.fresh_place + i < hi; };
    // The last warps take the new keys first, since the lines may be too few for them.
    Head<D, NORM_Q, WIDE_GAIN, ROTATE> query;
    Head<D, NORM_K, WIDE_GAIN, ROTATE> key;
    auto load_query = [&](int r) { query.load(query_of(r), q_gain, angles + (size_t)(g.query + r / PER_HEAD) * D); };
    auto load_key = [&](int i) { key.load(key_of(i), k_gain, angles + (size_t)(g.fresh + i) * D); };
    int r = warp, i = ALL - 1 - warp;
    if (r < lines) load_query(r);
    if (i < fresh && mine_to_write(i)) load_key(i);
    if (early) load_keys(first_key), load_values(first_key);
    for (; r < PADDED; r += ALL) {
      if (r < lines) {
        if (r != warp) load_query(r);
        query.finish(q_eps, qs + r * D);
      } else {
        for (int e = lane; e < D; e += 32) qs[r * D + e] = __float2bfloat16(0.f);
      }
    }
    // Groups of one row may write the same places, with the same bits.
    for (; i < fresh; i += ALL) {
      if (!mine_to_write(i)) continue;
      const size_t place = (size_t)(g.fresh_place + i) * D;
      const u32* v = (const u32*)(key_of(i) + HEADS * D);
      for (int e = lane; e < D / 2; e += 32) ((u32*)(values_of_head + place))[e] = v[e];
      if (i != ALL - 1 - warp) load_key(i);
      key.finish(k_eps, K + place);
    }
  }
  __syncthreads();

  float o[D / 8][4], m0 = NOTHING, m1 = NOTHING, l0 = 0.f, l1 = 0.f;
#pragma unroll
  for (int i = 0; i < D / 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
  if (lo < hi) {
    const float log2e = 1.4426950408889634f;
    const int at0 = g.place + line0 / PER_HEAD, at1 = g.place + line1 / PER_HEAD;
    const int limit0 = ALL_NEW ? end - 1 : at0, limit1 = ALL_NEW ? end - 1 : at1;
    if (!early && first_key < hi) load_keys(first_key), load_values(first_key);
    for (int kb = first_key; kb < hi; kb += 64) {
      float s[2][4];
#pragma unroll
      for (int j = 0; j < 2; ++j) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
#pragma unroll
      for (int c = 0; c < C; ++c) {
        uint4 qa = *(const uint4*)(qs + line0 * D + 32 * c + 8 * t), qb = *(const uint4*)(qs + line1 * D + 32 * c + 8 * t);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          mma(s[j], qa.x, qb.x, qa.y, qb.y, kf[j][c].x, kf[j][c].y);
          mma(s[j], qa.z, qb.z, qa.w, qb.w, kf[j][c].z, kf[j][c].w);
        }
      }
      // What comes next takes the place of what has been read.
      if (kb + 64 < hi) load_keys(kb + 64);
      float x0 = NOTHING, x1 = NOTHING;
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int key = kb + 8 * j + 2 * t + e;
          float v0 = s[j][e] * scale, v1 = s[j][2 + e] * scale;
          if (CAPPED) {
            v0 = cap * tanhf(v0 / cap);
            v1 = cap * tanhf(v1 / cap);
          }
          bool see0 = key < hi && key <= limit0, see1 = key < hi && key <= limit1;
          if (WINDOW) see0 = see0 && key > at0 - WINDOW, see1 = see1 && key > at1 - WINDOW;
          s[j][e] = see0 ? v0 * log2e : NOTHING;
          s[j][2 + e] = see1 ? v1 * log2e : NOTHING;
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
          // Where all is hidden the greatest is NOTHING too, and its power would be 1.
          s[j][e] = s[j][e] <= NOTHING ? 0.f : exp2f(s[j][e] - n0);
          s[j][2 + e] = s[j][2 + e] <= NOTHING ? 0.f : exp2f(s[j][2 + e] - n1);
          l0 += s[j][e];
          l1 += s[j][2 + e];
        }
#pragma unroll
      for (int i = 0; i < D / 8; ++i) o[i][0] *= f0, o[i][1] *= f0, o[i][2] *= f1, o[i][3] *= f1;
      u32 a0 = pair(s[0][0], s[0][1]), a1 = pair(s[0][2], s[0][3]);
      u32 a2 = pair(s[1][0], s[1][1]), a3 = pair(s[1][2], s[1][3]);
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
      if (kb + 64 < hi) load_values(kb + 64);
    }
    l0 += __shfl_xor_sync(~0u, l0, 1);
    l0 += __shfl_xor_sync(~0u, l0, 2);
    l1 += __shfl_xor_sync(~0u, l1, 1);
    l1 += __shfl_xor_sync(~0u, l1, 2);
  }
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

  const int place = blockIdx.z * HEADS + head;
  float* mine = parts + (size_t)place * SPLITS * LINES * STRIDE;
  for (int i = tid; i < lines * (D / 4); i += THREADS) {
    int r = i / (D / 4), d = i % (D / 4) * 4;
    float m = NOTHING, l = 0.f;
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
    float* to = mine + ((size_t)split * LINES + r) * STRIDE;
    __stcg((float4*)(to + d), a);
    if (d == 0) __stcg((float2*)(to + D), make_float2(m, l));
  }
  __syncthreads();
  if (tid == 0) last = count_arrival(arrived + place) == SPLITS - 1;
  __syncthreads();
  if (!last) return;
  for (int i = tid; i < lines * (D / 4); i += THREADS) {
    int r = i / (D / 4), d = i % (D / 4) * 4;
    const float sink = sinks ? number(((const u16*)sinks)[head * PER_HEAD + r % PER_HEAD]) * 1.4426950408889634f : NOTHING;
    float m = sink;
    float4 a = make_float4(0, 0, 0, 0);
    float2 of[SPLITS];
    float4 part[SPLITS];
#pragma unroll
    for (int k = 0; k < SPLITS; ++k) {
      const float* from = mine + ((size_t)k * LINES + r) * STRIDE;
      of[k] = __ldcg((const float2*)(from + D));
      part[k] = __ldcg((const float4*)(from + d));
    }
#pragma unroll
    for (int k = 0; k < SPLITS; ++k) m = fmaxf(m, of[k].x);
    float l = sinks ? exp2f(sink - m) : 0.f;
#pragma unroll
    for (int k = 0; k < SPLITS; ++k) {
      float f = exp2f(of[k].x - m);
      float4 v = part[k];
      l += f * of[k].y;
      a.x += f * v.x, a.y += f * v.y, a.z += f * v.z, a.w += f * v.w;
    }
    float inverse = 1.f / l;
    size_t line = (size_t)(g.line + r / PER_HEAD) * QUERIES + (head * PER_HEAD + r % PER_HEAD) * D;
    *(uint2*)(out + line + d) = make_uint2(pair(a.x * inverse, a.y * inverse), pair(a.z * inverse, a.w * inverse));
  }
  if (tid == 0) arrived[place] = 0;
}

}  // namespace arriero
