// Products of many rows with packed matrices of their own out of a bank: rows are sorted by expert, and a block of four
// warps takes up to 64 rows of one expert and 32 columns a warp. Weights are decoded in registers, each once a block;
// rows lie in shared memory, the next 128 numbers of each on their way while these are multiplied. Where rows end before
// 128 numbers do, zeros stand for the others, 32 weights of a lane and 8 numbers of x at a time.
namespace arriero {

// One block's rows.
struct Rows {
  int expert;
  int first;  // of the sorted rows
  int count;
  int unused;
};

constexpr int MOST_ROWS = 64, STEP = 128, ROW_BYTES = STEP * 2 + 16;

// 32 weights of one row, which a lane decodes.
template <class F>
struct Piece {
  uint4 codes[STEP / F::UNIT];
  typename F::Scale scale;
};

// A bank of matrices [COLUMNS, K]; what may be missing is null. Of an expert's rows count those from `from` on, every
// `stride`-th.
struct Matrices {
  const u8* w;
  const void* scales;
  const void* biases;
  const float* factors;
  const void* bias;
  int from, stride;
};

template <class F, int K>
__device__ __forceinline__ void load_piece(Piece<F>& p, const Matrices& m, size_t row, int step, int t) {
  constexpr int PIECES = STEP / F::UNIT;
  if (K % STEP && step * STEP + t * 32 >= K) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) p.codes[i] = make_uint4(0, 0, 0, 0);
    p.scale = {};
    return;
  }
  const uint4* from = (const uint4*)(m.w + row * ((size_t)K * 64 / F::UNIT) + step * (STEP * 64 / F::UNIT)) + t * PIECES;
#pragma unroll
  for (int i = 0; i < PIECES; ++i) p.codes[i] = __ldg(from + i);
  p.scale = PIECES == 1 ? F::load(m.scales, m.biases, row, K, step, t)
                        : F::load(m.scales, m.biases, row, K, 2 * step + (t >> 1), (t & 1) * 2);
}

// The weights 8 · block to 8 · block + 7 of a piece, in their order.
template <class F>
__device__ __forceinline__ void decode_block(const Piece<F>& p, const typename F::Factor& factor, int block, u32* to) {
  u32 d[4];
  if (F::UNIT == STEP) {
    F::decode((const u32*)p.codes, block, factor, d);
    to[0] = permute(d[0], d[1], 0x5410), to[1] = permute(d[2], d[3], 0x5410);
    to[2] = permute(d[0], d[1], 0x7632), to[3] = permute(d[2], d[3], 0x7632);
  } else {
    F::decode((const u32*)&p.codes[block / 2 % (STEP / F::UNIT)], block & 1, factor, d);
    to[0] = permute(d[0], d[1], 0x5410), to[1] = permute(d[0], d[1], 0x7632);
    to[2] = permute(d[2], d[3], 0x5410), to[3] = permute(d[2], d[3], 0x7632);
  }
}

// GATED: the columns of a warp are 16 of gate and the same of up, and gated(gate, up) is what comes out.
// SPREAD: row i is row order[i] / SPREAD of x and comes out at i; else it is row i of x and comes out at order[i].
template <int MODE, int GROUP, int K, int COLUMNS, int COLUMNS_OUT, bool GATED, int SPREAD, class Gated>
__device__ __forceinline__ void group(const bf16* x, const u32* order, Rows of, const Matrices& first, const Matrices& second,
                                      bf16* out, char* shared, const Gated& gated) {
  typedef Format<MODE, GROUP> F;
  constexpr int STEPS = (K + STEP - 1) / STEP, WIDE = GATED ? 64 : 128;
  static_assert(K % 32 == 0 && COLUMNS_OUT % (WIDE / 4) == 0, "lanes and warps have all of their work or none");
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, gid = lane >> 2, t = lane & 3;
  const int wanted = blockIdx.x * WIDE + warp * (WIDE / 4), column = min(wanted, COLUMNS_OUT - WIDE / 4);
  // A thread copies the same 16 bytes of every eighth row; numbers that a lane multiplies together lie together.
  const int unit = tid & 15, place = ((unit & 3) >> 1) * 8 + (unit >> 2) * 2 + (unit & 1);
  const bf16* from[MOST_ROWS / 8];
#pragma unroll
  for (int j = 0; j < MOST_ROWS / 8; ++j) {
    const int slot = of.first + min((tid >> 4) + 8 * j, of.count - 1);
    from[j] = x + (size_t)(SPREAD ? order[slot] / (SPREAD ? SPREAD : 1) : slot) * K + unit * 8;
  }
  auto bring = [&](int step) {
    char* to = shared + (step & 1) * MOST_ROWS * ROW_BYTES + (tid >> 4) * ROW_BYTES + place * 16;
    const bool there = K % STEP == 0 || step * STEP + unit * 8 < K;
#pragma unroll
    for (int j = 0; j < MOST_ROWS / 8; ++j) {
      if (there) begin_copy(to + 8 * j * ROW_BYTES, from[j] + step * STEP);
      else *(uint4*)(to + 8 * j * ROW_BYTES) = make_uint4(0, 0, 0, 0);
    }
  };
  auto row_of = [&](const Matrices& m, int of_out) {
    return (size_t)of.expert * COLUMNS + m.from + (size_t)of_out * m.stride;
  };
  Piece<F> now[4], next[4];
  auto load = [&](int step, Piece<F>* to) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const Matrices& m = GATED && n > 1 ? second : first;
      load_piece<F, K>(to[n], m, row_of(m, column + (GATED ? n & 1 : n) * 8 + gid), step, t);
    }
  };
  float c[4][4][4];
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int n = 0; n < 4; ++n) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.f;
  bring(0);
  load(0, now);
  for (int step = 0; step < STEPS; ++step) {
    end_copies();
    __syncthreads();
    if (step + 1 < STEPS) {
      bring(step + 1);
      load(step + 1, next);
    }
    const char* rows = shared + (step & 1) * MOST_ROWS * ROW_BYTES;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      u32 b[4][8];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const typename F::Factor factor = F::factor(now[n].scale);
        decode_block<F>(now[n], factor, 2 * part, b[n]);
        decode_block<F>(now[n], factor, 2 * part + 1, b[n] + 4);
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        if (m * 16 >= of.count) break;
        const char* line = rows + (m * 16 + gid) * ROW_BYTES + part * 128 + t * 32;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 a = *(const uint4*)(line + half * 16), d = *(const uint4*)(line + 8 * ROW_BYTES + half * 16);
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            mma(c[m][n], a.x, d.x, a.y, d.y, b[n][4 * half], b[n][4 * half + 1]);
            mma(c[m][n], a.z, d.z, a.w, d.w, b[n][4 * half + 2], b[n][4 * half + 3]);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) now[n] = next[n];
  }
  if (wanted >= COLUMNS_OUT) return;
  const float one = F::undo() * (first.factors ? __ldg(first.factors + of.expert) : 1.f);
  const float two = F::undo() * (second.factors ? __ldg(second.factors + of.expert) : 1.f);
  float added[GATED ? 2 : 4][2][GATED ? 2 : 1];
#pragma unroll
  for (int n = 0; n < (GATED ? 2 : 4); ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int k = 0; k < (GATED ? 2 : 1); ++k) {
        const Matrices& m = k ? second : first;
        added[n][e][k] = m.bias ? number(__ldg((const u16*)m.bias + row_of(m, column + 8 * n + 2 * t + e))) : 0.f;
      }
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = m * 16 + half * 8 + gid;
      if (line >= of.count) continue;
      const int slot = of.first + line;
      bf16* to = out + (size_t)(SPREAD ? slot : order[slot]) * (size_t)COLUMNS_OUT + column + 2 * t;
#pragma unroll
      for (int n = 0; n < (GATED ? 2 : 4); ++n) {
        float v[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          v[e] = c[m][n][2 * half + e] * one + added[n][e][0];
          if (GATED) v[e] = gated(v[e], c[m][GATED ? n + 2 : n][2 * half + e] * two + added[n][e][GATED ? 1 : 0]);
        }
        *(u32*)(to + 8 * n) = pair(v[0], v[1]);
      }
    }
}

}  // namespace arriero
