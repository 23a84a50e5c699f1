// y = W x for one row x and packed matrices in NVFP4, whose weights pass through shared memory: copies run ahead of the
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

// Bytes of shared memory behind the ring: x, sums of two steps, sums of squares and what the norm multiplies with.
template <int N, int K, int TILES, bool GATED, int ACTIVATION, bool NORM, bool WIDE_GAIN, int PLACES, class Next, class Input>
__device__ __forceinline__ void stream(const bf16* x, Pieces<N, K, TILES, GATED>& own, Next& next, const Extras& extra,
                                       bf16* out, float eps, Ring<PLACES>& ring, char* shared, const Input& input) {
  typedef Format<NVFP4, 16> F;
  typedef Pieces<N, K, TILES, GATED> P;
  constexpr int WARPS = THREADS / 32, PAIRS = P::PAIRS, INNER = N / 2, ROWS = TILES * 16, READERS = (ROWS + 31) / 32;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, gid = lane >> 2, t = lane & 3;
  uint4* xs = (uint4*)shared;
  float* sums = (float*)(shared + K * 2);
  float* norms = sums + 2 * WARPS * ROWS;
  ring.fill(own, next);

  // What no other block writes is on its way before the wait.
  constexpr int ROUNDS = (K / 8 + THREADS - 1) / THREADS;
  uint4 v[ROUNDS], o[ROUNDS];
  float gain[NORM ? ROUNDS : 1][8];
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int k8 = i * THREADS + tid;
    v[i] = make_uint4(0, 0, 0, 0);
    if (k8 >= K / 8) continue;
    if (extra.branch) v[i] = __ldcg((const uint4*)x + k8);
    if (NORM) {
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
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int k8 = i * THREADS + tid;
    if (k8 < K / 8) o[i] = __ldcg((extra.branch ? (const uint4*)extra.branch : (const uint4*)x) + k8);
  }
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int k8 = i * THREADS + tid, u = k8 / (4 * F::BLOCKS), tt = (k8 / F::BLOCKS) & 3, j = k8 % F::BLOCKS;
    if (k8 >= K / 8) continue;
    if (extra.branch) {
      u32* a = (u32*)&v[i];
      const u32* c = (const u32*)&o[i];
#pragma unroll
      for (int e = 0; e < 4; ++e) a[e] = pair(low(a[e]) + low(c[e]), high(a[e]) + high(c[e]));
      if (k8 % gridDim.x == blockIdx.x) *(uint4*)((bf16*)extra.sum + k8 * 8) = v[i];
    } else {
      v[i] = o[i];
    }
    if (NORM) {
      u32* a = (u32*)&v[i];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float l = low(a[e]), h = high(a[e]);
        squares += l * l + h * h;
        a[e] = pair(l * gain[i][2 * e], h * gain[i][2 * e + 1]);
      }
    }
    xs[(u * F::BLOCKS + j) * 4 + tt] = pairs_of<F::UNIT>(v[i]);
  }
  if (NORM) {
    float s = warp_sum(squares);
    if (lane == 0) norms[1 + warp] = s;
  }
  __syncthreads();
  if (NORM && warp == 0) {  // read only after the step's barrier below
    float s = warp_sum(lane < WARPS ? norms[1 + lane] : 0.f);
    if (lane == 0) norms[0] = rsqrtf(s / K + eps);
  }

  const uint4* xb = xs + warp * PAIRS * Piece::UNITS * F::BLOCKS * 4 + t;
  const int line = gid * 128, turned = (gid & 1) * 4;
#pragma unroll 1
  for (int step = 0; step < own.steps; ++step) {
    // Another warp each step adds up the sums; what it multiplies them with and adds is on its way from here.
    const int reader = (warp - step * READERS) & (WARPS - 1), mine = reader * 32 + lane;
    const bool reads = reader < READERS && mine < ROWS;
    const int n = reads ? P::row_of(step, mine >> 4) + (mine & 15) : 0;
    const int to = GATED ? (n < INNER ? n : n - INNER) : n;
    float factor = 1.f, bias = 0.f, residual = 0.f;
    if (reads) {
      if (extra.factors) factor = load_now(extra.factors + n);
      if (extra.bias) bias = number(__ldg((const u16*)extra.bias + n));
      if (!GATED && extra.residual) residual = number(__ldcg((const u16*)extra.residual + n));
    }
    float acc[TILES][4];
#pragma unroll
    for (int r = 0; r < TILES; ++r) acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = 0.f;
#pragma unroll 1
    for (int pair = 0; pair < PAIRS; ++pair) {
      wait_copies<PLACES - TILES>();
      __syncwarp();
#pragma unroll
      for (int c = 0; c < Piece::UNITS; ++c) {
        uint4 wa[TILES], wb[TILES];
        F::Factor fa[TILES], fb[TILES];
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
          uint4 b = make_uint4(0, 0, 0, 0);
          if (gid == 0) b = xb[((pair * Piece::UNITS + c) * F::BLOCKS + i) * 4];
#pragma unroll
          for (int r = 0; r < TILES; ++r) {
            u32 a[4], e[4];
            F::decode((const u32*)&wa[r], i, fa[r], a);
            F::decode((const u32*)&wb[r], i, fb[r], e);
            mma(acc[r], a[0], e[0], a[1], e[1], b.x, b.y);
            mma(acc[r], a[2], e[2], a[3], e[3], b.z, b.w);
          }
        }
      }
      __syncwarp();
#pragma unroll
      for (int r = 0; r < TILES; ++r) ring.leave(own, next);
    }
    float* buffer = sums + (step & 1) * WARPS * ROWS;
    if (t == 0) {
#pragma unroll
      for (int r = 0; r < TILES; ++r) {
        buffer[warp * ROWS + r * 16 + gid] = acc[r][0];
        buffer[warp * ROWS + r * 16 + gid + 8] = acc[r][2];
      }
    }
    __syncthreads();
    if (reader < READERS) {
      float s = 0.f;
      if (reads) {
#pragma unroll
        for (int j = 0; j < WARPS; ++j) s += buffer[j * ROWS + mine];
        s *= (NORM ? F::undo() * norms[0] : F::undo()) * factor;
        if (extra.bias) s += bias;
      }
      if (GATED) {
        const float up = __shfl_xor_sync(~0u, s, 16);
        if (reads && !(mine & 16)) out[to] = __float2bfloat16(activate<ACTIVATION>(s) * up);
      } else if (reads && (P::ROW_TILES % TILES == 0 || (int)(blockIdx.x + step * gridDim.x) * TILES + (mine >> 4) < P::ROW_TILES)) {
        if (extra.residual) s += residual;
        out[n] = __float2bfloat16(s);
      }
    }
  }
}

}  // namespace arriero
