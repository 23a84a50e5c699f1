// Heads of a prompt between its products: norms of q and k with gains, of v without one, rotation, keys and values into
// their row's cache in place, queries side by side as attention takes them. Rows hold the query heads, each with a gate
// behind it or not, then the heads of k, then those of v, unless keys are the values too.
//
// A block is one token, or a part of its heads; of the queries, some in front of the first and behind the last token are zeros.
namespace arriero {

// Where the tokens of one row are.
struct Run {
  int first;     // on the packed axis
  int count;
  int before;    // queries of no account in front of the first
  int place;     // of the first in the buffers
  int capacity;  // places of the buffers
};

__device__ __forceinline__ void fetch(u32* to, const u32* from) {
  const uint4 four = *(const uint4*)from;
  to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

template <int D, int HEADS, int KV_HEADS, int ROTATED, bool INTERLEAVED, bool NORM_Q, bool NORM_K, bool NORM_V,
          bool WIDE_GAIN, bool GATED, bool KEYS_ARE_VALUES>
__device__ __forceinline__ void prompt_heads(const bf16* rows, const float* angles, const void* q_gain,
                                             const void* k_gain, const Run* runs, bf16* keys, bf16* values, bf16* out,
                                             float q_eps, float k_eps) {
  constexpr int PER = D > 256 ? D / 32 : 8, LANES = D / PER, TOGETHER = THREADS / LANES, WORDS = PER / 2;
  constexpr int ALL = HEADS + 2 * KV_HEADS, TIMES = (ALL + TOGETHER - 1) / TOGETHER;
  constexpr int PASSES = (TIMES + 3) / 4, AHEAD = (TIMES + PASSES - 1) / PASSES;  // up to four heads on their way at once
  constexpr int GAINS = NORM_Q || NORM_K ? (WIDE_GAIN ? PER : WORDS) : 1;  // words of a lane
  constexpr int HALF = ROTATED / 2, TURNS = INTERLEAVED ? WORDS : PER, EACH_ = GATED ? 2 : 1;
  constexpr size_t WIDTH = (size_t)(EACH_ * HEADS + (KEYS_ARE_VALUES ? 1 : 2) * KV_HEADS) * D;
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, at = lane * PER;
  const Run run = *runs;
  const int i = (int)blockIdx.x - run.before;
  bf16* queries = out + (size_t)blockIdx.x * HEADS * D + at;
  if (i < 0 || i >= run.count) {
    for (int head = group + blockIdx.y * TOGETHER; head < HEADS; head += TOGETHER * gridDim.y)
#pragma unroll
      for (int e = 0; e < WORDS; e += 4) *(uint4*)(queries + head * D + 2 * e) = make_uint4(0, 0, 0, 0);
    return;
  }
  const int token = run.first + i;
  const bool turns = at < ROTATED, lower = at < HALF;
  // All heads turn alike: a thread has the same places in each.
  float2 turn[TURNS];
  if (turns) {
    const float* from = angles + 2 * ((size_t)token * HALF + (INTERLEAVED ? at / 2 : lower ? at : at - HALF));
#pragma unroll
    for (int e = 0; e < TURNS; e += 2) {
      const float4 two = *(const float4*)(from + 2 * e);
      turn[e] = {two.x, two.y};
      turn[e + 1] = {two.z, two.w};
    }
  }
  // And so do their gains.
  u32 q_by[GAINS], k_by[GAINS];
#pragma unroll
  for (int e = 0; e < GAINS; e += 4) {
    if (NORM_Q) fetch(q_by + e, (const u32*)q_gain + lane * GAINS + e);
    if (NORM_K) fetch(k_by + e, (const u32*)k_gain + lane * GAINS + e);
  }
  const bf16* mine = rows + token * WIDTH + at;
  for (int begin = blockIdx.y * AHEAD; begin < TIMES; begin += AHEAD * gridDim.y) {
    u32 w[AHEAD][WORDS];
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      const int head = min(group + (begin + k) * TOGETHER, ALL - 1);  // some repeat the last one, and keep it
      const bool query = head < HEADS, value = head >= HEADS + KV_HEADS;
      const int place = query ? EACH_ * head : (EACH_ - 1) * HEADS + head - (KEYS_ARE_VALUES && value ? KV_HEADS : 0);
#pragma unroll
      for (int e = 0; e < WORDS; e += 4) fetch(w[k] + e, (const u32*)(mine + (size_t)place * D) + e);
    }
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      const int head = group + (begin + k) * TOGETHER;
      const bool query = head < HEADS, value = head >= HEADS + KV_HEADS;
      if (NORM_Q || NORM_K || NORM_V) {
        float squares = 0.f;
#pragma unroll
        for (int e = 0; e < WORDS; ++e) squares += low(w[k][e]) * low(w[k][e]) + high(w[k][e]) * high(w[k][e]);
#pragma unroll
        for (int o = LANES / 2; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
        if (query ? NORM_Q : value ? NORM_V : NORM_K) {
          const float r = rsqrtf(squares / D + (query ? q_eps : k_eps));
#pragma unroll
          for (int e = 0; e < WORDS; ++e) {
            float a = 1.f, b = 1.f;
            if (!value && WIDE_GAIN) {
              a = __uint_as_float(query ? q_by[2 * e] : k_by[2 * e]);
              b = __uint_as_float(query ? q_by[2 * e + 1] : k_by[2 * e + 1]);
            } else if (!value) {
              const u32 two = query ? q_by[e] : k_by[e];
              a = low(two), b = high(two);
            }
            // The graph rounds here, too.
            w[k][e] = pair(low(w[k][e]) * r * a, high(w[k][e]) * r * b);
          }
        }
      }
      if (ROTATED && INTERLEAVED) {
        if (turns && !value) {
#pragma unroll
          for (int e = 0; e < WORDS; ++e) {
            const float a = low(w[k][e]), b = high(w[k][e]);
            w[k][e] = pair(a * turn[e].x - b * turn[e].y, b * turn[e].x + a * turn[e].y);
          }
        }
      } else if (ROTATED) {
#pragma unroll
        for (int e = 0; e < WORDS; ++e) {
          const u32 other = __float_as_uint(__shfl_xor_sync(~0u, __uint_as_float(w[k][e]), HALF / PER));
          const float2 s = turn[2 * e], t = turn[2 * e + 1];
          const float a = low(w[k][e]), b = high(w[k][e]), c = low(other), d = high(other);
          const u32 turned = lower ? pair(a * s.x - c * s.y, b * t.x - d * t.y) : pair(a * s.x + c * s.y, b * t.x + d * t.y);
          if (turns && !value) w[k][e] = turned;
        }
      }
      if (head >= ALL) continue;
      bf16* to = queries + (size_t)head * D;
      if (!query) {
        const int of = head - HEADS - (value ? KV_HEADS : 0);
        to = (value ? values : keys) + ((size_t)of * run.capacity + run.place + i) * D + at;
      }
#pragma unroll
      for (int e = 0; e < WORDS; e += 4)
        *(uint4*)(to + 2 * e) = make_uint4(w[k][e], w[k][e + 1], w[k][e + 2], w[k][e + 3]);
    }
  }
}

}  // namespace arriero
