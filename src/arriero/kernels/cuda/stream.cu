// y = x Wᵀ for up to 8 rows of x and packed matrices in NVFP4, whose weights pass through shared memory: copies run ahead of the
// decoding by as much as it holds, and on into the matrices behind, so that memory has no rest while blocks wait for one
// another. The sums are those of product.cu, bit by bit.
//
// A piece is what one warp decodes of a tile at once: 2 units, 128 bytes, of 16 rows, and 16 bytes of scales of each. Each
// warp has a ring of pieces of its own, and copies itself what it decodes.
namespace arriero {

struct Piece {
  static constexpr int UNITS = 2, WEIGHTS = 16 * 128, BYTES = WEIGHTS + 16 * 16;
};

// The pieces of one matrix that a warp decodes, in order. Each of a block's steps is TILES tiles of 16 rows.
template <int N, int K, int TILES, bool GATED>
struct Pieces {
  static constexpr int WARPS = THREADS / 32, PAIRS = K / 128 / Piece::UNITS / WARPS, ROW_BYTES = K / 2;
  static constexpr int ROW_TILES = N / 16, STEPS = (ROW_TILES + TILES - 1) / TILES;
  static_assert(PAIRS * WARPS * Piece::UNITS * 128 == K, "warps share out the columns evenly");
  const char *weights, *scales;  // of this lane in the warp's first piece of row 0
  int steps;                     // of this block
  int step, pair, tile;          // of the next piece
  int made;

  __device__ __forceinline__ Pieces(const void* w, const void* s) : step(0), pair(0), tile(0), made(0) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    steps = (STEPS - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    weights = (const char*)w + (long)(lane >> 3) * ROW_BYTES + warp * PAIRS * 128 + (lane & 7) * 16;
    scales = (const char*)s + (long)(lane & 15) * (K / 16) + warp * PAIRS * 16;
  }
  static __device__ __forceinline__ int row_of(int step, int tile) {
    const int s = (int)blockIdx.x + step * (int)gridDim.x;
    const int row = GATED ? (tile & 1) * (N / 2) + (s * (TILES / 2) + (tile >> 1)) * 16 : (s * TILES + tile) * 16;
    return !GATED && ROW_TILES % TILES ? min(row, N - 16) : row;
  }
  // Starts the next piece on its way to `slot`; false where none is left.
  __device__ __forceinline__ bool start(char* slot, u64 policy) {
    if (step >= steps) return false;
    const int lane = threadIdx.x & 31, line = lane >> 3;
    const long row = row_of(step, tile);
    const char* from = weights + row * ROW_BYTES + pair * 128;
    // Odd rows stand with their halves exchanged, so that the 8 lanes that read at once meet different banks.
    char* to = slot + line * 128 + (((lane & 7) ^ ((line & 1) * 4)) * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) copy_stream(to + i * 4 * 128, from + i * 4 * ROW_BYTES, policy);
    if (lane < 16) copy_through(slot + Piece::WEIGHTS + lane * 16, scales + row * (K / 16) + pair * 16);
    ++made;
    if (++tile == TILES) {
      tile = 0;
      if (++pair == PAIRS) pair = 0, ++step;
    }
    return true;
  }
};

// What follows the last matrix.
struct NoPieces {
  int made = 0;
  __device__ __forceinline__ bool start(char*, u64) { return false; }
};

// A warp's pieces on their way or there. Each place that is left or stays empty closes a group of copies, so that how
// many groups may be open says which pieces are there.
template <int PLACES>
struct Ring {
  char* base;
  int first, held;
  u64 policy;
  __device__ __forceinline__ Ring(char* shared)
      : base(shared + (threadIdx.x >> 5) * PLACES * Piece::BYTES), first(0), held(0), policy(stream_policy()) {}
  __device__ __forceinline__ char* at(int i) const {
    const int place = first + i;
    return base + (place >= PLACES ? place - PLACES : place) * Piece::BYTES;
  }
  template <class Own, class Next>
  __device__ __forceinline__ void start(Own& own, Next& next) {
    char* slot = at(held);
    if (own.start(slot, policy) || next.start(slot, policy)) ++held;
    close_copies();
  }
  template <class Own, class Next>
  __device__ __forceinline__ void fill(Own& own, Next& next) {
#pragma unroll 1
    for (int i = held; i < PLACES; ++i) start(own, next);
  }
  // The first piece's place is free once the whole warp has read it.
  template <class Own, class Next>
  __device__ __forceinline__ void leave(Own& own, Next& next) {
    first = first + 1 == PLACES ? 0 : first + 1;
    --held;
    start(own, next);
  }
};

// What a thread holds of x before it goes to shared memory: 8 columns of every row, in rounds.
template <int K, int ROWS, bool NORM, bool WIDE_GAIN, class Input>
__device__ __forceinline__ void stage(const bf16* x, const Extras& extra, int rows, float eps, uint4* xs, float* norms,
                                      const Input& input) {
  typedef Format<NVFP4, 16> F;
  constexpr int WARPS = THREADS / 32, ROUNDS = (K / 8 + THREADS - 1) / THREADS, CROSS = ROWS >= 8 ? 8 / F::BLOCKS : 0;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  uint4 v[ROUNDS][ROWS];
  float gain[NORM ? ROUNDS : 1][8], squares[ROWS];
  auto load = [&](const bf16* from, int k8, int m) {
    return k8 < K / 8 && (ROWS == 1 || m < rows) ? __ldcg((const uint4*)(from + (size_t)m * K) + k8) : make_uint4(0, 0, 0, 0);
  };
  // What no other block writes is on its way before the wait.
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int k8 = i * THREADS + tid;
    if (extra.branch) {
#pragma unroll
      for (int m = 0; m < ROWS; ++m) v[i][m] = load(x, k8, m);
    }
    if (NORM && k8 < K / 8) {
      if (WIDE_GAIN) {
#pragma unroll
        for (int e = 0; e < 8; ++e) gain[i][e] = ((const float*)extra.gain)[k8 * 8 + e];
      } else {
        uint4 g = *(const uint4*)((const bf16*)extra.gain + k8 * 8);
        const u32* c = (const u32*)&g;
#pragma unroll
        for (int e = 0; e < 4; ++e) gain[i][2 * e] = low(c[e]), gain[i][2 * e + 1] = high(c[e]);
      }
    }
  }
  input.wait();
  if (!extra.branch) {
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i)
#pragma unroll
      for (int m = 0; m < ROWS; ++m) v[i][m] = load(x, i * THREADS + tid, m);
  }
#pragma unroll
  for (int m = 0; m < ROWS; ++m) squares[m] = 0.f;
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int k8 = i * THREADS + tid, u = k8 / (4 * F::BLOCKS), tt = (k8 / F::BLOCKS) & 3, j = k8 % F::BLOCKS;
    if (extra.branch) {
      uint4 o[ROWS];
#pragma unroll
      for (int m = 0; m < ROWS; ++m) o[m] = load((const bf16*)extra.branch, k8, m);
#pragma unroll
      for (int m = 0; m < ROWS; ++m) {
        u32* a = (u32*)&v[i][m];
        const u32* c = (const u32*)&o[m];
#pragma unroll
        for (int e = 0; e < 4; ++e) a[e] = pair(low(a[e]) + low(c[e]), high(a[e]) + high(c[e]));
        if (k8 < K / 8 && (ROWS == 1 || m < rows) && k8 % gridDim.x == blockIdx.x)
          *(uint4*)((bf16*)extra.sum + (size_t)m * K + k8 * 8) = v[i][m];
      }
    }
    if (k8 >= K / 8) continue;
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
      if (NORM) {
        u32* a = (u32*)&v[i][m];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float l = low(a[e]), h = high(a[e]);
          squares[m] += l * l + h * h;
          a[e] = pair(l * gain[i][2 * e], h * gain[i][2 * e + 1]);
        }
      }
      xs[(u * F::BLOCKS + j) * (4 * ROWS) + ((m * 4 + tt) ^ (j * CROSS))] = pairs_of<F::UNIT>(v[i][m]);
    }
  }
  if (NORM) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
      float s = warp_sum(squares[m]);
      if (lane == 0) norms[16 + m * WARPS + warp] = s;
    }
  }
  __syncthreads();
  if (NORM) {  // read only behind the step's barrier
    for (int m = warp; m < ROWS; m += WARPS) {
      float s = warp_sum(lane < WARPS ? norms[16 + m * WARPS + lane] : 0.f);
      if (lane == 0) norms[m] = rsqrtf(s / K + eps);
    }
  }
}

// Where sums of a step stand in shared memory: in two places in turn, in one, or where x stood, if there is one step.
enum { IN_TURN = 2, IN_ONE = 1, OVER_X = 0 };

// Shared memory behind the ring is x where it is STAGED, the sums, and the sums of squares.
template <int N, int K, int TILES, bool GATED, int ROWS, bool STAGED, int SUMS, int ACTIVATION, bool NORM, bool WIDE_GAIN,
          int PLACES, class Next, class Input>
__device__ __forceinline__ void stream(const bf16* x, Pieces<N, K, TILES, GATED>& own, Next& next, const Extras& extra,
                                       bf16* out, int rows, float eps, Ring<PLACES>& ring, char* shared,
                                       const Input& input) {
  typedef Format<NVFP4, 16> F;
  typedef Pieces<N, K, TILES, GATED> P;
  constexpr int WARPS = THREADS / 32, PAIRS = P::PAIRS, INNER = N / 2, CROSS = ROWS >= 8 ? 8 / F::BLOCKS : 0;
  // A thread adds up a row of W for one row x of many: of one x only the first column is kept.
  constexpr int LINES = ROWS == 1 ? 16 : 128, KEPT = TILES * LINES;
  constexpr int SUMMED = ROWS > 1 && GATED ? KEPT / 2 : KEPT, READERS = (SUMMED + 31) / 32;
  static_assert(STAGED || !NORM, "a norm is taken of x in shared memory");
  static_assert(READERS <= WARPS && (WARPS & (WARPS - 1)) == 0, "threads take turns in adding up");
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, gid = lane >> 2, t = lane & 3;
  uint4* xs = (uint4*)shared;
  float* sums = (float*)(shared + (STAGED && SUMS != OVER_X ? (size_t)ROWS * K * 2 : 0));
  float* norms = (float*)(shared + (STAGED ? (size_t)ROWS * K * 2 : 0)) + (SUMS == OVER_X && STAGED ? 0 : max(SUMS, 1) * WARPS * KEPT);
  ring.fill(own, next);
  if (STAGED) stage<K, ROWS, NORM, WIDE_GAIN>(x, extra, rows, eps, xs, norms, input);
  else input.wait();

  const uint4* xb = xs + warp * PAIRS * Piece::UNITS * F::BLOCKS * (4 * ROWS);
  // x as it lies in memory: 64 bytes of one row for a lane, a unit ahead.
  const uint4* xg = (const uint4*)(x + (size_t)gid * K + warp * PAIRS * Piece::UNITS * 128 + t * 32);
  const bool has_row = gid < rows;
  uint4 coming[F::BLOCKS];
  auto bring = [&](int unit) {
#pragma unroll
    for (int i = 0; i < F::BLOCKS; ++i) coming[i] = has_row ? __ldcg(xg + unit * 16 + i) : make_uint4(0, 0, 0, 0);
  };
  const int line = gid * 128, turned = (gid & 1) * 4;
#pragma unroll 1
  for (int step = 0; step < own.steps; ++step) {
    // Other warps each step add up the sums; what they multiply them with and add is on its way from here.
    const int mine = (tid - step * READERS * 32) & (THREADS - 1);
    const int part = mine & 3, from = (mine & 127) >> 2;
    const int tile = ROWS == 1 ? mine >> 4 : (GATED ? 2 : 1) * (mine >> 7);
    const int row = ROWS == 1 ? mine & 15 : (from >> 2) + 8 * (part >> 1), m = ROWS == 1 ? 0 : 2 * (from & 3) + (part & 1);
    const bool reads = mine < SUMMED && m < rows;
    const bool ours = P::ROW_TILES % TILES == 0 || GATED ||
                      ((int)blockIdx.x + step * (int)gridDim.x) * TILES + tile < P::ROW_TILES;
    const int n = reads ? P::row_of(step, tile) + row : 0;
    float factor = 1.f, factor2 = 1.f, bias = 0.f, bias2 = 0.f, residual = 0.f;
    if (reads) {
      if (extra.factors) {
        factor = load_now(extra.factors + n);
        if (GATED && ROWS > 1) factor2 = load_now(extra.factors + n + INNER);
      }
      if (extra.bias) {
        bias = number(__ldg((const u16*)extra.bias + n));
        if (GATED && ROWS > 1) bias2 = number(__ldg((const u16*)extra.bias + n + INNER));
      }
      if (!GATED && extra.residual) residual = number(__ldcg((const u16*)extra.residual + (size_t)m * N + n));
    }
    float acc[TILES][4];
#pragma unroll
    for (int r = 0; r < TILES; ++r) acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = 0.f;
    if (!STAGED) bring(0);
#pragma unroll 1
    for (int pair = 0; pair < PAIRS; ++pair) {
      wait_copies<PLACES - TILES>();
      __syncwarp();
#pragma unroll
      for (int c = 0; c < Piece::UNITS; ++c) {
        uint4 wa[TILES], wb[TILES], b[F::BLOCKS];
        F::Factor fa[TILES], fb[TILES];
        if (!STAGED) {
#pragma unroll
          for (int i = 0; i < F::BLOCKS; ++i) b[i] = pairs_of<F::UNIT>(coming[i]);
          if (pair * Piece::UNITS + c + 1 < PAIRS * Piece::UNITS) bring(pair * Piece::UNITS + c + 1);
        }
#pragma unroll
        for (int r = 0; r < TILES; ++r) {
          const char* slot = ring.at(r);
          const char* q = slot + line + (((c * 4 + t) ^ turned) * 16);
          const char* s = slot + Piece::WEIGHTS + gid * 16 + c * 8 + t * 2;
          F::Scale sa, sb;
          wa[r] = *(const uint4*)q;
          wb[r] = *(const uint4*)(q + 8 * 128);
          sa.v = *(const u16*)s;
          sb.v = *(const u16*)(s + 8 * 16);
          fa[r] = F::factor(sa);
          fb[r] = F::factor(sb);
        }
#pragma unroll
        for (int i = 0; i < F::BLOCKS; ++i) {
          if (STAGED) {
            b[i] = make_uint4(0, 0, 0, 0);
            if (gid < ROWS)
              b[i] = xb[((pair * Piece::UNITS + c) * F::BLOCKS + i) * (4 * ROWS) + ((gid * 4 + t) ^ (i * CROSS))];
          }
#pragma unroll
          for (int r = 0; r < TILES; ++r) {
            u32 a[4], e[4];
            F::decode((const u32*)&wa[r], i, fa[r], a);
            F::decode((const u32*)&wb[r], i, fb[r], e);
            mma(acc[r], a[0], e[0], a[1], e[1], b[i].x, b[i].y);
            mma(acc[r], a[2], e[2], a[3], e[3], b[i].z, b[i].w);
          }
        }
      }
      __syncwarp();
#pragma unroll
      for (int r = 0; r < TILES; ++r) ring.leave(own, next);
    }
    float* buffer = sums + (SUMS == IN_TURN ? (step & 1) : 0) * WARPS * KEPT;
    if (SUMS == OVER_X && STAGED) __syncthreads();
#pragma unroll
    for (int r = 0; r < TILES; ++r) {
      float* to = buffer + warp * KEPT + r * LINES;
      if (ROWS > 1) *(float4*)(to + lane * 4) = make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
      else if (t == 0) to[gid] = acc[r][0], to[gid + 8] = acc[r][2];
    }
    __syncthreads();
    if (mine < READERS * 32) {
      float s = 0.f, s2 = 0.f;
      if (reads) {
        const float* of_warp = buffer + (ROWS == 1 ? mine : tile * 128 + (mine & 127));
#pragma unroll
        for (int j = 0; j < WARPS; ++j) {
          s += of_warp[j * KEPT];
          if (GATED && ROWS > 1) s2 += of_warp[j * KEPT + 128];
        }
        float f = NORM ? F::undo() * norms[m] : F::undo();
        s = times(s, f * factor);
        if (GATED && ROWS > 1) s2 = times(s2, f * factor2);
        if (extra.bias) {
          s += bias;
          if (GATED && ROWS > 1) s2 += bias2;
        }
      }
      if (GATED) {
        if (ROWS == 1) s2 = __shfl_xor_sync(~0u, s, 16);
        if (reads && (ROWS > 1 || !(mine & 16))) out[(size_t)m * INNER + n] = __float2bfloat16(activate<ACTIVATION>(s) * s2);
      } else if (reads && ours) {
        if (extra.residual) s += residual;
        out[(size_t)m * N + n] = __float2bfloat16(s);
      }
    }
    if (SUMS == IN_ONE && step + 1 < own.steps) __syncthreads();
  }
}

}  // namespace arriero
