// The experts of a few tokens in two launches. Lines of work are shared out among small blocks, whose warps divide a
// line's columns, and each warp has all that it reads of them in flight.
//
// First, for every pair of token and expert: activation(gate) · up, times the expert's weight. Then, for every token, one
// product with the down matrices of its experts side by side, so that their sum costs nothing.
//
// Rows may end in a quarter, a half or three quarters of a unit; threads that would read beyond hold zeros.
namespace arriero {

// A bank of matrices, or the one that every token takes; what may be missing is null.
struct Bank {
  const void* w;
  const void* scales;
  const void* biases;
  const float* factors;  // one an expert, or one a row of the one
  const void* bias;      // one a row
  int rows;              // of an expert's matrix
  int from;              // the first of them that counts
  int stride;            // from each that counts to the next
};

// The second of two, or the first: field by field, so that neither has to lie in memory.
__device__ __forceinline__ Bank either(bool second, const Bank& a, const Bank& b) {
  return {second ? b.w : a.w,         second ? b.scales : a.scales, second ? b.biases : a.biases,
          second ? b.factors : a.factors, second ? b.bias : a.bias,     second ? b.rows : a.rows,
          second ? b.from : a.from,   second ? b.stride : a.stride};
}
__device__ __forceinline__ long row_of(const Bank& bank, bool one, u32 expert, int row) {
  return (one ? 0l : (long)expert * bank.rows) + bank.from + (long)row * bank.stride;
}
__device__ __forceinline__ float factor_of(const Bank& bank, bool one, u32 expert, int row) {
  return bank.factors ? __ldg(bank.factors + (one ? (u32)(bank.from + row) : expert)) : 1.f;
}
__device__ __forceinline__ float bias_of(const Bank& bank, bool one, u32 expert, int row) {
  return bank.bias ? number(__ldg((const u16*)bank.bias + row_of(bank, one, expert, row))) : 0.f;
}

// Two results of a tile's row, gate and up or one, each the sum over a line's segments: their matrices are those of
// experts chosen(line · SEGMENTS + segment), of which EXPERTS means the one. of(line, segment) are a segment's
// activations, more(line, row) is read before the sums are there, and put(line, row, sums, more) takes them. ready()
// waits for what of and more read; the first weights are on their way by then.
template <int MODE, int GROUP, int K, int TILE_ROWS, int SEGMENTS, int EXPERTS, int TILES, int DEPTH, class Chosen,
          class Ready, class Of, class More, class Put>
__device__ __forceinline__ void mixture(const Bank* banks, const Chosen& chosen, const Ready& ready, int lines, char* shared,
                                        const Of& of, const More& more, const Put& put) {
  typedef Format<MODE, GROUP> F;
  constexpr int WARPS = THREADS / 32, UNIT = F::UNIT, BLOCKS = F::BLOCKS, EACH_ = (K + UNIT - 1) / UNIT;
  constexpr int UNITS = SEGMENTS * EACH_, QUARTERS = K % UNIT * 4 / UNIT;
  constexpr int SHARE = ((UNITS + WARPS - 1) / WARPS + DEPTH - 1) / DEPTH * DEPTH, STEPS = TILE_ROWS / 16;
  constexpr long ROW_BYTES = (long)K * 64 / UNIT;
  static_assert(K % (UNIT / 4) == 0, "a thread's 16 bytes are there or not");
  float* sums = (float*)shared;  // [2][WARPS][TILES][16]
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, gid = lane >> 2, t = lane & 3;
  const int grid = gridDim.x, block = blockIdx.x, all = lines * STEPS, mine = (all - block + grid - 1) / grid;
  const u64 policy = stream_policy();
  uint4 wa[DEPTH][TILES], wb[DEPTH][TILES];
  typename F::Scale sa[DEPTH][TILES], sb[DEPTH][TILES];

  auto there = [&](int u) { return QUARTERS == 0 || u % EACH_ < EACH_ - 1 || t < QUARTERS; };
  int load_step = 0, load_unit = 0;
  auto load = [&](int d) {
    const int u = warp * SHARE + load_unit;
    if (load_step < mine && u < UNITS) {
      const int step = block + load_step * grid, line = step / STEPS, segment = u / EACH_;
      const u32 expert = chosen(line * SEGMENTS + segment);
      const bool one = banks[TILES].w && expert == EXPERTS;
#pragma unroll
      for (int r = 0; r < TILES; ++r) {
        const Bank bank = either(one, banks[r], banks[r + TILES]);
        const long row = row_of(bank, one, expert, step % STEPS * 16 + gid);
        const char* q = (const char*)bank.w + row * ROW_BYTES + u % EACH_ * 64 + t * 16;
        if (there(u)) {
          wa[d][r] = load_stream(q, policy);
          wb[d][r] = load_stream(q + 8 * bank.stride * ROW_BYTES, policy);
          sa[d][r] = F::load(bank.scales, bank.biases, row, K, u % EACH_, t);
          sb[d][r] = F::load(bank.scales, bank.biases, row + 8 * bank.stride, K, u % EACH_, t);
        } else {
          wa[d][r] = wb[d][r] = make_uint4(0, 0, 0, 0);
          sa[d][r] = sb[d][r] = {};
        }
      }
    }
    if (++load_unit == SHARE) load_unit = 0, ++load_step;
  };
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) load(d);
  ready();

  float acc[TILES][4];
#pragma unroll
  for (int r = 0; r < TILES; ++r) acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = 0.f;
#pragma unroll 1
  for (int i = 0; i < mine; ++i) {
    const int step = block + i * grid, line = step / STEPS;
    // Only the first column of B is used: threads that would hold others hold zeros.
    auto fetch = [&](int c, uint4* x) {
      const int u = warp * SHARE + c;
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) {
        x[j] = make_uint4(0, 0, 0, 0);
        if (gid == 0 && c < SHARE && u < UNITS && there(u))
          x[j] = pairs_of<UNIT>(__ldcg((const uint4*)of(line, u / EACH_) + (u % EACH_ * 4 + t) * BLOCKS + j));
      }
    };
    uint4 x[BLOCKS], next[BLOCKS];
    fetch(0, x);
    const int own = step % STEPS * 16 + (tid & 15);
    decltype(more(line, own)) beside = {};
    if (tid < 16) beside = more(line, own);
#pragma unroll 1
    for (int c0 = 0; c0 < SHARE; c0 += DEPTH) {
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        fetch(c0 + d + 1, next);
        if (warp * SHARE + c0 + d < UNITS) {
#pragma unroll
          for (int r = 0; r < TILES; ++r) {
            const typename F::Factor fa = F::factor(sa[d][r]), fb = F::factor(sb[d][r]);
#pragma unroll
            for (int j = 0; j < BLOCKS; ++j) {
              u32 a[4], e[4];
              F::decode((const u32*)&wa[d][r], j, fa, a);
              F::decode((const u32*)&wb[d][r], j, fb, e);
              mma(acc[r], a[0], e[0], a[1], e[1], x[j].x, x[j].y);
              mma(acc[r], a[2], e[2], a[3], e[3], x[j].z, x[j].w);
            }
          }
        }
        load(d);
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) x[j] = next[j];
      }
    }
    float* buffer = sums + (i & 1) * WARPS * TILES * 16;
#pragma unroll
    for (int r = 0; r < TILES; ++r) {
      if (t == 0) {
        buffer[(warp * TILES + r) * 16 + gid] = acc[r][0];
        buffer[(warp * TILES + r) * 16 + gid + 8] = acc[r][2];
      }
      acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = 0.f;
    }
    __syncthreads();
    if (tid < 16) {
      float s[TILES];
#pragma unroll
      for (int r = 0; r < TILES; ++r) {
        s[r] = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) s[r] += buffer[(w * TILES + r) * 16 + tid];
        s[r] *= F::undo();
      }
      put(line, own, s, beside);
    }
  }
}

}  // namespace arriero
