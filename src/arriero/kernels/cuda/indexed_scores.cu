// Scores of blocks of keys for index queries: the sum over heads of what products are above zero, times a scale.
//
// A query's heads stand side by side among the 16 lines of a tensor cores' product, so that their sum stays in a warp; a
// score's bits depend on its query and its key alone. The grid is (tiles of keys, groups of queries).
namespace arriero {

struct Queries {
  int first;  // of their scores
  int count;
  int row;    // whose keys
  int seen;   // keys that the last of them sees
};

// `lines` are those of the first query; GROUPS groups of 16 lines, KEYS keys a block, W numbers a line.
template <int W, int H, int GROUPS, int KEYS, bool PLAIN>
__device__ __forceinline__ void score(const bf16* lines, Side keys, Queries of, float* scores, float scale) {
  constexpr int C = W / 32, TOGETHER = 16 / H;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gid = lane >> 2, t = lane & 3;
  const size_t width = (size_t)gridDim.x * KEYS;
  const int from = blockIdx.x * KEYS;
  uint4 qa[GROUPS][C], qb[GROUPS][C];
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    // Lines of no query are those of the last.
    const int a = min(g * 16 + gid, of.count * H - 1), b = min(g * 16 + gid + 8, of.count * H - 1);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      qa[g][c] = *(const uint4*)(lines + (size_t)a * W + 32 * c + 8 * t);
      qb[g][c] = *(const uint4*)(lines + (size_t)b * W + 32 * c + 8 * t);
    }
  }
  for (int at = from + warp * 8; at < min(from + KEYS, of.seen); at += THREADS / 4) {
    const bf16* p = keys.at + (long)min(at + gid, of.seen - 1) * keys.key;
    uint4 kf[C];
#pragma unroll
    for (int c = 0; c < C; ++c) kf[c] = eight<PLAIN>(keys, p, 32 * c + 8 * t);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      float s[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int c = 0; c < C; ++c) {
        mma(s, qa[g][c].x, qb[g][c].x, qa[g][c].y, qb[g][c].y, kf[c].x, kf[c].y);
        mma(s, qa[g][c].z, qb[g][c].z, qa[g][c].w, qb[g][c].w, kf[c].z, kf[c].w);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // NaN stays.
        s[e] = s[e] < 0.f ? 0.f : s[e];
#pragma unroll
        for (int o = 4; o < 4 * H; o *= 2) s[e] += __shfl_xor_sync(~0u, s[e], o);
        const int query = g * TOGETHER + (gid + 8 * (e >> 1)) / H;
        if (gid % H == 0 && query < of.count) scores[(of.first + query) * width + at + 2 * t + (e & 1)] = s[e] * scale;
      }
    }
  }
}

}  // namespace arriero
