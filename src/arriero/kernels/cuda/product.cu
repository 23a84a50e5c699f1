// y = x Wᵀ for few rows of x and a packed W, on the tensor cores, so that eight rows cost little more than one.
//
// One persistent block per multiprocessor. A step is TILES tiles of 16 rows of W; the block's warps share out its
// columns, and each keeps DEPTH units of every row in flight. A is W, decoded in registers; B is x, up to 8 rows as 8
// columns. Columns are permuted inside a unit, alike on both sides, so that each thread decodes 16 contiguous bytes.
//
// The norm costs nothing: x · gain is staged, the squares are summed on the way, and 1 / rms multiplies the result.
//
// With EXPERTS the rows of x are few too, but each is multiplied with matrices of its own out of a bank: the steps of all
// pairs (row, expert) are shared out, and only one column of B is used.
namespace arriero {

enum { PLAIN = 0, SILU = 1, GELU_TANH = 2, GELU = 3 };

template <int ACTIVATION>
__device__ __forceinline__ float activate(float g) {
  if (ACTIVATION == SILU) return g / (1.f + __expf(-g));
  if (ACTIVATION == GELU_TANH) {
    float t = 0.7978845608028654f * (g + 0.044715f * g * g * g);
    return g / (1.f + __expf(-2.f * t));
  }
  return 0.5f * g * (1.f + erff(g * 0.7071067811865476f));
}

// What a product may have beside x and W; null where it has not.
struct Extras {
  const void* branch;     // added to x first, [rows, K]
  void* sum;              // where x + branch goes
  const void* gain;       // of the norm, [K], bfloat16 or float32
  const float* factors;   // multiply the result: one a row of W, or one an expert
  const void* bias;       // added to the result, [N]
  const void* residual;   // added to the result, [rows, N]
  const u32* experts;     // of each pair
};

// What x waits for, where the kernel before has written it: nothing.
struct Written {
  __device__ __forceinline__ void wait() const {}
};

template <int MODE, int GROUP, int N, int K, int ROWS, int ACTIVATION, int DEPTH, int TILES, int BUFFERS, bool NORM,
          bool WIDE_GAIN, bool EXPERTS, int SHARED_BY, class Input>
__device__ __forceinline__ void product(const bf16* x, const void* w, const void* scales, const void* biases,
                                        const Extras& extra, bf16* out, int rows, float eps, char* shared,
                                        const Input& input) {
  typedef Format<MODE, GROUP> F;
  constexpr int WARPS = THREADS / 32, UNIT = F::UNIT, BLOCKS = F::BLOCKS, UNITS = K / UNIT;
  constexpr int SHARE = (UNITS + WARPS - 1) / WARPS;     // units of one warp
  constexpr int COLUMNS = EXPERTS ? 1 : ROWS;            // of B that are used
  constexpr int HALVES = (COLUMNS + 7) / 8;
  constexpr long ROW_BYTES = (long)UNITS * 64;
  constexpr int INNER = N / 2, ROW_TILES = N / 16, STEPS = (ROW_TILES + TILES - 1) / TILES;
  constexpr bool GATED = ACTIVATION != PLAIN;
  constexpr bool RAGGED_K = UNITS % WARPS != 0, RAGGED_N = !GATED && ROW_TILES % TILES != 0;
  static_assert(SHARE % DEPTH == 0, "the units of a warp divide into rounds");
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, gid = lane >> 2, t = lane & 3;
  const int grid = gridDim.x, block = blockIdx.x;
  uint4* xs = (uint4*)shared;
  float* sums = (float*)(shared + (size_t)ROWS * K * 2);
  float* norms = sums + BUFFERS * WARPS * HALVES * TILES * 128;
  const int all = EXPERTS ? rows * SHARED_BY * STEPS : STEPS;
  const int mine = (all - block + grid - 1) / grid;

  auto first_row = [&](int step, int tile) -> int {
    int s = block + step * grid;
    if (EXPERTS) s %= STEPS;
    return GATED ? (tile & 1) * INNER + (s * (TILES / 2) + (tile >> 1)) * 16 : (s * TILES + tile) * 16;
  };
  auto pair_of = [&](int step) -> int { return EXPERTS ? (block + step * grid) / STEPS : 0; };
  auto expert_of = [&](int step) -> int { return EXPERTS ? (int)__ldg(extra.experts + pair_of(step)) : 0; };

  const u64 policy = stream_policy();
  uint4 wa[DEPTH][TILES], wb[DEPTH][TILES];
  typename F::Scale sa[DEPTH][TILES], sb[DEPTH][TILES];
  int load_step = 0, load_unit = 0;
  auto load = [&](int d) {
    int u = warp * SHARE + load_unit;
    if (load_step < mine && (!RAGGED_K || u < UNITS)) {
      const long bank = EXPERTS ? (long)expert_of(load_step) * N : 0;
#pragma unroll
      for (int r = 0; r < TILES; ++r) {
        int rr = first_row(load_step, r);
        if (RAGGED_N) rr = min(rr, N - 16);
        long row = bank + rr + gid;
        const char* q = (const char*)w + row * ROW_BYTES + u * 64 + t * 16;
        wa[d][r] = load_stream(q, policy);
        wb[d][r] = load_stream(q + 8 * ROW_BYTES, policy);
        sa[d][r] = F::load(scales, biases, row, K, u, t);
        sb[d][r] = F::load(scales, biases, row + 8, K, u, t);
      }
    }
    if (++load_unit == SHARE) {
      load_unit = 0;
      ++load_step;
    }
  };
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) load(d);
  input.wait();

  // x goes to shared memory in the order of the fragments of B. Blocks of a unit stand crosswise, so that threads that
  // bring neighbours write to different banks.
  constexpr int CROSS = !EXPERTS && ROWS >= 8 ? 8 / BLOCKS : 0;
  auto place_of = [&](int u, int j, int m, int tt) { return (u * BLOCKS + j) * (4 * ROWS) + ((m * 4 + tt) ^ (j * CROSS)); };
  if (EXPERTS) {
    for (int i = tid; i < rows * (K / 8); i += THREADS) {
      int m = i / (K / 8), k8 = i % (K / 8), u = k8 / (4 * BLOCKS), tt = (k8 / BLOCKS) & 3, j = k8 % BLOCKS;
      xs[m * (K / 8) + (u * BLOCKS + j) * 4 + tt] = pairs_of<UNIT>(__ldcg((const uint4*)(x + (size_t)m * K + k8 * 8)));
    }
  } else if (ROWS == 1 && !NORM && !extra.branch) {
    constexpr int ROUNDS = (K / 8 + THREADS - 1) / THREADS;
    uint4 v[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i)
      if (i * THREADS + tid < K / 8) v[i] = __ldcg((const uint4*)x + i * THREADS + tid);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      int k8 = i * THREADS + tid, u = k8 / (4 * BLOCKS), tt = (k8 / BLOCKS) & 3, j = k8 % BLOCKS;
      if (k8 < K / 8) xs[place_of(u, j, 0, tt)] = pairs_of<UNIT>(v[i]);
    }
  } else {
    float squares[ROWS];
#pragma unroll
    for (int m = 0; m < ROWS; ++m) squares[m] = 0.f;
    constexpr int BATCH = ROWS < 8 ? ROWS : 8;
    // Few columns' x is on its way at once, as far as registers hold it.
    constexpr int AT_ONCE = ROWS == 8 && !NORM && K / 8 == 2 * THREADS ? 2 : 1;
#pragma unroll AT_ONCE
    for (int k8 = tid; k8 < K / 8; k8 += THREADS) {
      int u = k8 / (4 * BLOCKS), tt = (k8 / BLOCKS) & 3, j = k8 % BLOCKS;
      float gain[8];
      if (NORM) {
        if (WIDE_GAIN) {
#pragma unroll
          for (int e = 0; e < 8; ++e) gain[e] = ((const float*)extra.gain)[k8 * 8 + e];
        } else {
          uint4 g = *(const uint4*)((const bf16*)extra.gain + k8 * 8);
          const u32* c = (const u32*)&g;
#pragma unroll
          for (int e = 0; e < 4; ++e) gain[2 * e] = low(c[e]), gain[2 * e + 1] = high(c[e]);
        }
      }
#pragma unroll
      for (int m0 = 0; m0 < ROWS; m0 += BATCH) {
        uint4 v[BATCH];
#pragma unroll
        for (int m = 0; m < BATCH; ++m) {
          v[m] = make_uint4(0, 0, 0, 0);
          if (ROWS == 1 || m0 + m < rows) v[m] = __ldcg((const uint4*)(x + (size_t)(m0 + m) * K + k8 * 8));
        }
        if (extra.branch) {
#pragma unroll
          for (int m = 0; m < BATCH; ++m)
            if (ROWS == 1 || m0 + m < rows) {
              size_t at = (size_t)(m0 + m) * K + k8 * 8;
              uint4 o = __ldcg((const uint4*)((const bf16*)extra.branch + at));
              u32* a = (u32*)&v[m];
              const u32* c = (const u32*)&o;
#pragma unroll
              for (int e = 0; e < 4; ++e) a[e] = pair(low(a[e]) + low(c[e]), high(a[e]) + high(c[e]));
              if (k8 % grid == block) *(uint4*)((bf16*)extra.sum + at) = v[m];
            }
        }
#pragma unroll
        for (int m = 0; m < BATCH; ++m) {
          if (NORM) {
            u32* a = (u32*)&v[m];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              float l = low(a[e]), h = high(a[e]);
              squares[m0 + m] += l * l + h * h;
              a[e] = pair(l * gain[2 * e], h * gain[2 * e + 1]);
            }
          }
          xs[place_of(u, j, m0 + m, tt)] = pairs_of<UNIT>(v[m]);
        }
      }
    }
    if (NORM) {
#pragma unroll
      for (int m = 0; m < ROWS; ++m) {
        float s = warp_sum(squares[m]);
        if (lane == 0) norms[16 + m * WARPS + warp] = s;
      }
    }
  }
  __syncthreads();
  if (NORM) {  // read only after the step's barrier below
    for (int m = warp; m < ROWS; m += WARPS) {
      float s = warp_sum(lane < WARPS ? norms[16 + m * WARPS + lane] : 0.f);
      if (lane == 0) norms[m] = rsqrtf(s / K + eps);
    }
  }

  float acc[TILES][HALVES][4];
#pragma unroll
  for (int r = 0; r < TILES; ++r)
#pragma unroll
    for (int h = 0; h < HALVES; ++h) acc[r][h][0] = acc[r][h][1] = acc[r][h][2] = acc[r][h][3] = 0.f;
  constexpr int STRIDE = EXPERTS ? 4 : 4 * ROWS;
  const uint4* xb = xs + warp * SHARE * BLOCKS * STRIDE;
  const int fragment = EXPERTS ? t : gid * 4 + t;
  // One unit of a step, and what took its place in the ring.
  auto decode_unit = [&](int d, int step, int c) {
    const uint4* xp = EXPERTS ? xb + (pair_of(step) / SHARED_BY) * (K / 8) : xb;
    if (!RAGGED_K || warp * SHARE + c < UNITS) {
      typename F::Factor fa[TILES], fb[TILES];
#pragma unroll
      for (int r = 0; r < TILES; ++r) {
        fa[r] = F::factor(sa[d][r]);
        fb[r] = F::factor(sb[d][r]);
      }
#pragma unroll
      for (int i = 0; i < BLOCKS; ++i) {
        uint4 b[HALVES];
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
          b[h] = make_uint4(0, 0, 0, 0);
          if (COLUMNS % 8 == 0 || h * 8 + gid < COLUMNS)
            b[h] = xp[(c * BLOCKS + i) * STRIDE + h * 32 + (fragment ^ (i * CROSS))];
        }
#pragma unroll
        for (int r = 0; r < TILES; ++r) {
          u32 a[4], e[4];
          F::decode((const u32*)&wa[d][r], i, fa[r], a);
          F::decode((const u32*)&wb[d][r], i, fb[r], e);
#pragma unroll
          for (int h = 0; h < HALVES; ++h) {
            mma(acc[r][h], a[0], e[0], a[1], e[1], b[h].x, b[h].y);
            mma(acc[r][h], a[2], e[2], a[3], e[3], b[h].z, b[h].w);
          }
        }
      }
    }
    load(d);
  };
  // What the sums are multiplied with and added to is on its way while a step is decoded.
  constexpr int GROUPS = GATED ? TILES / 2 : TILES;
  constexpr bool EARLY = !EXPERTS && GROUPS * 128 <= THREADS;
  const int part_of = tid & 3, from_of = (tid & 127) >> 2, group_of = tid >> 7;
  const int row_of = (from_of >> 2) + 8 * (part_of >> 1), column_of = 2 * (from_of & 3) + (part_of & 1);
  float early = 1.f, early2 = 1.f, early_residual[HALVES];
  auto ask = [&](int step) {
    if (!EARLY || group_of >= GROUPS) return;
    int n = first_row(step, GATED ? 2 * group_of : group_of) + row_of;
    if (RAGGED_N) n = min(n, N - 1);
    if (column_of >= rows) return;
    if (extra.factors) {
      early = load_now(extra.factors + n);
      if (GATED) early2 = load_now(extra.factors + n + INNER);
    }
    if (!GATED && extra.residual)
#pragma unroll
      for (int h = 0; h < HALVES; ++h)
        if (h * 8 + column_of < rows)
          early_residual[h] = number(__ldcg((const u16*)extra.residual + (size_t)(h * 8 + column_of) * N + n));
  };
  auto finish = [&](int step) {
    float* buffer = sums + (BUFFERS == 2 ? (step & 1) : 0) * WARPS * HALVES * TILES * 128;
#pragma unroll
    for (int r = 0; r < TILES; ++r)
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        *(float4*)(buffer + ((warp * HALVES + h) * TILES + r) * 128 + lane * 4) =
            make_float4(acc[r][h][0], acc[r][h][1], acc[r][h][2], acc[r][h][3]);
        acc[r][h][0] = acc[r][h][1] = acc[r][h][2] = acc[r][h][3] = 0.f;
      }
    __syncthreads();
    // The 128 sums of a tile belong to 128 threads; gate and up of a pair of tiles meet in one.
    for (int o = tid; o < GROUPS * 128; o += THREADS) {
      int group = o >> 7, e = o & 127, from = e >> 2, part = e & 3;
      int row = (from >> 2) + 8 * (part >> 1), column = 2 * (from & 3) + (part & 1);
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        int m = h * 8 + column;
        if (EXPERTS ? m == 0 : m < rows) {
          float s = 0.f, s2 = 0.f;
#pragma unroll
          for (int j = 0; j < WARPS; ++j) {
            const float* from_warp = buffer + (j * HALVES + h) * TILES * 128 + e;
            s += from_warp[(GATED ? 2 * group : group) * 128];
            if (GATED) s2 += from_warp[(2 * group + 1) * 128];
          }
          float f = NORM ? F::undo() * norms[m] : F::undo();
          int n = first_row(step, GATED ? 2 * group : group) + row;
          if (!RAGGED_N || n < N) {
            float fs = 1.f, fs2 = 1.f;
            if (extra.factors) {
              if (EARLY) fs = early, fs2 = early2;
              else if (EXPERTS) fs = fs2 = __ldg(extra.factors + expert_of(step));
              else {
                fs = __ldg(extra.factors + n);
                if (GATED) fs2 = __ldg(extra.factors + n + INNER);
              }
            }
            s = times(s, f * fs);
            if (GATED) s2 = times(s2, f * fs2);
            if (extra.bias) {
              s += number(__ldg((const u16*)extra.bias + n));
              if (GATED) s2 += number(__ldg((const u16*)extra.bias + n + INNER));
            }
            size_t line = EXPERTS ? (size_t)pair_of(step) : (size_t)m;
            if (GATED) {
              out[line * INNER + n] = __float2bfloat16(activate<ACTIVATION>(s) * s2);
            } else {
              if (extra.residual)
                s += EARLY ? early_residual[h] : number(__ldcg((const u16*)extra.residual + line * N + n));
              out[line * N + n] = __float2bfloat16(s);
            }
          }
        }
      }
    }
    if (BUFFERS == 1 && step + 1 < mine) __syncthreads();
  };
#pragma unroll 1
  for (int step = 0; step < mine; ++step) {
    ask(step);
#pragma unroll 1
    for (int c0 = 0; c0 < SHARE; c0 += DEPTH) {
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) decode_unit(d, step, c0 + d);
    }
    finish(step);
  }
}

}  // namespace arriero
