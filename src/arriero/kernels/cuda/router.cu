// Products of few rows with a small dense matrix, the norm and the sum before them taken in.
//
// A warp has one row of W at a time; the rows of x lie in shared memory, normed and rounded as the graph has them. The
// grid is as many blocks as there are rows of W for their warps.
namespace arriero {

// What may be missing is null.
struct Dense {
  const bf16* x;       // [rows, K]
  const bf16* branch;  // added to x first
  const void* gain;    // of the norm, [K]
  const bf16* w;       // [N - 1 or N, K]
  const bf16* more;    // the last row of W, where it is not in w
  bf16* sum;           // where x + branch goes
  bf16* normed;        // where its norm goes
  int rows;
  float eps;
};

// The greatest of a warp's numbers.
__device__ __forceinline__ u32 greatest_of_warp(u32 v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, v);
#else
#pragma unroll
  for (int o = 16; o; o >>= 1) v = max(v, __float_as_uint(__shfl_xor_sync(~0u, __uint_as_float(v), o)));
  return v;
#endif
}
// Numbers in the order of the floats that they stand for; no number is the least.
__device__ __forceinline__ u32 key_of(float x) {
  const u32 bits = __float_as_uint(x);
  return x == x ? bits ^ ((u32)((int)bits >> 31) | 0x80000000u) : 0u;
}
__device__ __forceinline__ float of_key(u32 key) {
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}
__device__ __forceinline__ float dot(uint4 a, uint4 b) {
  return (low(a.x) * low(b.x) + high(a.x) * high(b.x)) + (low(a.y) * low(b.y) + high(a.y) * high(b.y)) +
         ((low(a.z) * low(b.z) + high(a.z) * high(b.z)) + (low(a.w) * low(b.w) + high(a.w) * high(b.w)));
}

// ROWS rows of x at most, of which 8 are multiplied at a time; put(row, n, sum) takes the results from one lane each.
template <int N, int K, int ROWS, bool WIDE_GAIN, class Put>
__device__ __forceinline__ void dense(const Dense& d, char* shared, const Put& put) {
  constexpr int WARPS = THREADS / 32, EIGHTS = K / 8, AT_ONCE = ROWS < 8 ? ROWS : 8, BATCH = ROWS < 4 ? ROWS : 4;
  constexpr int LOADS = (EIGHTS + 31) / 32, AHEAD_ = LOADS < 8 ? LOADS : ROWS > 1 ? 4 : 8;
  static_assert(K % 8 == 0, "16 bytes at a time");
  uint4* xs = (uint4*)shared;                                // [ROWS][EIGHTS]
  float* squares = (float*)(shared + (size_t)ROWS * K * 2);  // [ROWS][WARPS]
  // Blocks without a row of W have nothing to do.
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, blocks = min((int)gridDim.x, (N + WARPS - 1) / WARPS);
  int n = blockIdx.x * WARPS + warp;
  if (blockIdx.x >= blocks) return;
  auto matrix = [&](int row) -> const uint4* {
    return (const uint4*)(d.more && row == N - 1 ? d.more : d.w + (size_t)row * K);
  };
  // The first of W before all else: it comes from memory.
  uint4 w[AHEAD_];
#pragma unroll
  for (int i = 0; i < AHEAD_; ++i)
    if (n < N && lane + 32 * i < EIGHTS) w[i] = __ldg(matrix(n) + lane + 32 * i);

  for (int m0 = 0; m0 < d.rows; m0 += BATCH) {
    float s[BATCH];
#pragma unroll
    for (int m = 0; m < BATCH; ++m) s[m] = 0.f;
    for (int k = tid; k < EIGHTS; k += THREADS) {
      // Some rows are on their way before the first is there.
      uint4 v[BATCH], o[BATCH];
#pragma unroll
      for (int m = 0; m < BATCH; ++m) {
        const size_t at = (size_t)min(m0 + m, d.rows - 1) * EIGHTS + k;
        v[m] = __ldcg((const uint4*)d.x + at);
        if (d.branch) o[m] = __ldcg((const uint4*)d.branch + at);
      }
#pragma unroll
      for (int m = 0; m < BATCH; ++m) {
        if (m0 + m >= d.rows) break;
        const size_t at = (size_t)(m0 + m) * EIGHTS + k;
        u32* a = (u32*)&v[m];
        if (d.branch) {
          const u32* c = (const u32*)&o[m];
#pragma unroll
          for (int e = 0; e < 4; ++e) a[e] = pair(low(a[e]) + low(c[e]), high(a[e]) + high(c[e]));
          if (k % blocks == blockIdx.x) ((uint4*)d.sum)[at] = v[m];
        }
        s[m] += dot(v[m], v[m]);
        xs[at] = v[m];
      }
    }
#pragma unroll
    for (int m = 0; m < BATCH; ++m) {
      const float all = warp_sum(s[m]);
      if (lane == 0 && m0 + m < d.rows) squares[(m0 + m) * WARPS + warp] = all;
    }
  }
  __syncthreads();
  if (d.gain) {
    for (int m = 0; m < d.rows; ++m) {
      float s = 0.f;
#pragma unroll
      for (int j = 0; j < WARPS; ++j) s += squares[m * WARPS + j];
      const float r = rsqrtf(s / K + d.eps);
      for (int k = tid; k < EIGHTS; k += THREADS) {
        const size_t at = (size_t)m * EIGHTS + k;
        uint4 v = xs[at];
        u32* a = (u32*)&v;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float g0, g1;
          if (WIDE_GAIN) {
            const float2 g = ((const float2*)d.gain)[k * 4 + e];
            g0 = g.x, g1 = g.y;
          } else {
            const u32 g = ((const u32*)d.gain)[k * 4 + e];
            g0 = low(g), g1 = high(g);
          }
          a[e] = pair(low(a[e]) * r * g0, high(a[e]) * r * g1);
        }
        xs[at] = v;
        if (d.normed && k % blocks == blockIdx.x) ((uint4*)d.normed)[at] = v;
      }
    }
    __syncthreads();
  }
  for (bool first = true; n < N; n += blocks * WARPS, first = false) {
    const uint4* from = matrix(n);
#pragma unroll 1
    for (int m0 = 0; m0 < d.rows; m0 += AT_ONCE) {
      float sums[AT_ONCE];
#pragma unroll
      for (int m = 0; m < AT_ONCE; ++m) sums[m] = 0.f;
      auto add = [&](uint4 of, int k) {
#pragma unroll
        for (int m = 0; m < AT_ONCE; ++m)
          if (m0 + m < d.rows) sums[m] += dot(xs[(size_t)(m0 + m) * EIGHTS + k], of);
      };
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const int k = lane + 32 * i;
        if (k < EIGHTS) add(i < AHEAD_ && first && m0 == 0 ? w[i < AHEAD_ ? i : 0] : __ldg(from + k), k);
      }
#pragma unroll
      for (int m = 0; m < AT_ONCE; ++m) {
        const float s = warp_sum(sums[m]);
        if (lane == 0 && m0 + m < d.rows) put(m0 + m, n, s);
      }
    }
  }
}

// What every token takes beside the experts chosen for it.
enum { NO_ONE = 0, GATED = 1, WHOLE = 2 };

// The TOP of EXPERTS logits, weighed by their softmax; or by their sigmoid, and chosen by that and a correction, out of the
// TOP_GROUPS groups whose two best sum highest. With NORMALISE the weights sum to one; `scale` multiplies them. ONE: the
// number of experts is a last choice, with the sigmoid of the logit behind theirs as weight, or 1.
//
// One warp does it: put(k, expert, weight) takes the k-th choice from one lane.
template <int EXPERTS, int TOP, int ONE, bool NORMALISE, bool SIGMOID, int GROUPS, int TOP_GROUPS, class Put>
__device__ __forceinline__ void choose(const float* logits, const float* correction, float scale, const Put& put) {
  constexpr int EACH_ = (EXPERTS + 31) / 32;
  const int lane = threadIdx.x & 31;
  auto sigmoid = [](float x) { return 1.f / (1.f + expf(-x)); };
  u32 v[EACH_], greatest = 0, gone = 0;
#pragma unroll
  for (int j = 0; j < EACH_; ++j) {
    const int e = lane + 32 * j;
    v[j] = 0;
    if (e < EXPERTS) {
      const float logit = __ldcg(logits + e);
      // −0 and 0 are equal; what is no number, and what is not there, comes after all else.
      v[j] = key_of((SIGMOID ? sigmoid(logit) + __ldg(correction + e) : logit) + 0.f);
    }
  }
  // Of those that are not gone, the first of the best, and the best that then remains.
  auto first_of = [&](u32 best) {
    u32 before = 0;  // how many come behind it
#pragma unroll
    for (int j = EACH_ - 1; j >= 0; --j) {
      const int e = lane + 32 * j;
      if (!(gone >> j & 1) && e < EXPERTS && v[j] == best) before = EXPERTS - e;
    }
    return EXPERTS - greatest_of_warp(before);
  };
  auto best_without = [&](u32 expert) {
    u32 next = 0;
#pragma unroll
    for (int j = 0; j < EACH_; ++j) {
      if (lane + 32 * j == expert) gone |= 1u << j;
      if (!(gone >> j & 1)) next = max(next, v[j]);
    }
    return greatest_of_warp(next);
  };
  if (TOP_GROUPS < GROUPS) {
    constexpr int SIZE = EXPERTS / GROUPS;
    u32 mine = 0;  // lane g: the order of group g
#pragma unroll 1
    for (int g = 0; g < GROUPS; ++g) {
      u32 of[2], where[2] = {EXPERTS, EXPERTS};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        u32 best = 0, before = 0;
#pragma unroll
        for (int j = 0; j < EACH_; ++j) {
          const u32 e = lane + 32 * j;
          if (e < EXPERTS && e / SIZE == g && e != where[0]) best = max(best, v[j]);
        }
        of[n] = greatest_of_warp(best);
#pragma unroll
        for (int j = EACH_ - 1; j >= 0; --j) {
          const u32 e = lane + 32 * j;
          if (e < EXPERTS && e / SIZE == g && e != where[0] && v[j] == of[n]) before = EXPERTS - e;
        }
        where[n] = EXPERTS - greatest_of_warp(before);
      }
      const u32 order = key_of(of_key(of[0]) + of_key(of[1]) + 0.f);
      if (lane == g) mine = order;
    }
    u32 kept = 0;
#pragma unroll 1
    for (int n = 0; n < TOP_GROUPS; ++n) {
      const u32 left = lane < GROUPS && !(kept >> lane & 1) ? mine : 0u, best = greatest_of_warp(left);
      const u32 before = lane < GROUPS && !(kept >> lane & 1) && left == best ? GROUPS - lane : 0u;
      kept |= 1u << (GROUPS - greatest_of_warp(before));
    }
#pragma unroll
    for (int j = 0; j < EACH_; ++j) {
      const int e = lane + 32 * j;
      if (e < EXPERTS && !(kept >> (e / SIZE) & 1)) gone |= 1u << j;
    }
  }
#pragma unroll
  for (int j = 0; j < EACH_; ++j)
    if (!(gone >> j & 1)) greatest = max(greatest, v[j]);
  greatest = greatest_of_warp(greatest);
  const float top = of_key(greatest);
  float total = SIGMOID ? 1e-20f : 0.f;
  if (!NORMALISE && !SIGMOID) {
#pragma unroll
    for (int j = 0; j < EACH_; ++j) total += v[j] ? expf(of_key(v[j]) - top) : 0.f;
    total = warp_sum(total);
  }
  // Lane i keeps the i-th: the greatest, of equals the first.
  float weight = 0.f;
  u32 expert = 0, best = greatest;
#pragma unroll 1
  for (int k = 0; k < TOP; ++k) {
    const u32 first = first_of(best);
    const float of = SIGMOID ? sigmoid(__ldcg(logits + min(first, (u32)EXPERTS - 1))) : best ? expf(of_key(best) - top) : 0.f;
    if (lane == k) weight = of, expert = first;
    if (NORMALISE) total += of;
    best = best_without(first);
  }
  if (lane < TOP) put(lane, expert, (NORMALISE || !SIGMOID ? weight / total : weight) * scale);
  if (ONE && lane == TOP) put(TOP, EXPERTS, ONE == GATED ? sigmoid(__ldcg(logits + EXPERTS)) : 1.f);
}

}  // namespace arriero
