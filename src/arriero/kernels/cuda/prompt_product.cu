// y = x Wᵀ for many rows of x and a packed W on GPUs with warpgroups: W is decoded in registers, where the tensor cores
// take it from, so that nothing of it is written and each block decodes its rows once for all of its columns.
//
// Rows of W are rows of A, rows of x the columns of B. A block is GROUPS warpgroups of TILES times 64 rows of W each, and
// COLUMNS rows of x, which other warps copy into shared memory, 64 numbers of each at a time (a stage). The blocks of a
// cluster have the same rows of x: each copies its part of them to all, so that the L2 cache is read once for a cluster.
// The numbers of x are in another order (ordered.cu), since a thread decodes 16 contiguous bytes, as in product.cu.
//
// With an activation W's rows are those of gate and of up: a warpgroup has 64 of each, and y is activation(gate) · up, of
// both as they would be kept. With ORDERED y is made for the next such product, whose units are of as many weights.
namespace arriero {

constexpr int STAGE = 64;  // numbers of a row of x

// One unit of 2 · TILES rows of W, of which a thread holds a quarter.
template <class F, int TILES>
struct Packed {
  uint4 codes[TILES][2];
  typename F::Scale scales[TILES][2];
};

// DEPTH units of each row are on their way to a thread.
template <int MODE, int GROUP, int TILES, int COLUMNS, int GROUPS, int STAGES, int DEPTH, int ACTIVATION,
          int ORDERED>
__device__ __forceinline__ void prompt_product(const char* x, const void* w, const void* scales, const void* biases,
                                               const float* factors, const void* bias, bf16* out, int N, int K, int count,
                                               int padded, char* shared) {
  typedef Format<MODE, GROUP> F;
  typedef Packed<F, TILES> P;
  constexpr bool GATED = ACTIVATION != PLAIN;
  constexpr int OUT_TILES = GATED ? TILES / 2 : TILES;  // of results
  constexpr int WARPS = GROUPS * 4, ROWS = GROUPS * OUT_TILES * 64, BYTES = COLUMNS * STAGE * 2, PITCH = ROWS * 2 + 16;
  static_assert(!GATED || TILES == 2, "one tile of gate and one of up");
  static_assert(COLUMNS * PITCH <= STAGES * BYTES, "results take the place of x");
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, gid = lane >> 2, t = lane & 3;
  const int width = GATED ? N / 2 : N, first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
  u64* full = (u64*)shared;
  u64* empty = full + STAGES;
  char* tiles = shared + 1024;
  if (tid == 0) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s) barrier_begin(full + s, 1), barrier_begin(empty + s, WARPS * CLUSTER);
    barriers_begun();
  }
  cluster_meets();

  // Of 384 threads each may have 168 registers; sums of two tiles alone are 128.
  constexpr bool MANY = THREADS == 384;
  if (warp >= WARPS) {
    if (MANY) registers_keep<24>();
    if (warp == WARPS && lane == 0) {
      constexpr int PART = BYTES / CLUSTER;
      const int own = block_of_cluster() * PART, stages = K / STAGE;
      const char* from = x + (size_t)first_column * STAGE * 2 + own;
      int slot = 0;
      u32 parity = 1;
#pragma unroll 1
      for (int s = 0; s < stages; ++s) {
        if (s >= STAGES) barrier_wait(empty + slot, parity);
        barrier_announce(full + slot, BYTES);
        char* to = tiles + slot * BYTES + own;
        if (CLUSTER == 1) copy_tile(to, from, PART, full + slot);
        else copy_tile(to, from, PART, full + slot, (1 << CLUSTER) - 1);
        from += (size_t)padded * STAGE * 2;
        if (++slot == STAGES) slot = 0, parity ^= 1;
      }
    }
    __syncwarp();
    cluster_meets();
    __syncthreads();
    return;
  }

  if (MANY) registers_take<240>();
  float c[TILES][COLUMNS / 2];
  const int units = K / F::UNIT;
  const size_t row_bytes = (size_t)units * 64;
  const int below = (warp >> 2) * OUT_TILES * 64 + (warp & 3) * 16 + gid;  // of the block's first row
  int row[TILES][2];
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int e = 0; e < 2; ++e) row[m][e] = GATED ? m * width + min(first_row + below + e * 8, width - 1) : min(first_row + below + m * 64 + e * 8, N - 1);
  auto load = [&](P& p, int u) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        p.codes[m][e] = __ldg((const uint4*)((const char*)w + row[m][e] * row_bytes + u * 64 + t * 16));
        p.scales[m][e] = F::load(scales, biases, row[m][e], K, u, t);
      }
  };
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int e = 0; e < COLUMNS / 2; ++e) c[m][e] = 0.f;
  P ring[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) load(ring[d], min(d, units - 1));
  const u64 described = describe(shared_at(tiles));
  u32 a[2][TILES][2][4];
  int slot = 0, before = 0;
  u32 parity = 0;
  auto multiply = [&](const P& now, bool first) {
    typename F::Factor f[TILES][2];
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int e = 0; e < 2; ++e) f[m][e] = F::factor(now.scales[m][e]);
    // A block is two steps of 16 numbers. While one is multiplied, the next is decoded.
#pragma unroll
    for (int i = 0; i < F::BLOCKS; ++i) {
#pragma unroll
      for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int e = 0; e < 2; ++e) F::decode((const u32*)&now.codes[m][e], i, f[m][e], a[i & 1][m][e]);
      if ((i & 1) == 0) barrier_wait(full + slot, parity);
      warpgroup_begin();
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
          u32(*own)[4] = a[i & 1][m];
          warpgroup_mma(c[m], own[0][2 * h], own[1][2 * h], own[0][2 * h + 1], own[1][2 * h + 1],
                        described + ((slot * BYTES + ((i & 1) * 2 + h) * 32) >> 4));
        }
      warpgroup_close();
      warpgroup_wait<1>();
      if (i & 1) {
        before = slot;
        if (++slot == STAGES) slot = 0, parity ^= 1;
      } else if (i > 0 || !first) {
        // The stage before is read. Each block of a cluster waits for all before it copies there again.
        if (CLUSTER == 1) {
          if (lane == 0) barrier_arrive(empty + before);
        } else if (lane < CLUSTER) {
          barrier_arrive(empty + before, lane);
        }
      }
    }
  };
#pragma unroll 1
  for (int u = 0; u < units; u += DEPTH) {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (d > 0 && u + d >= units) break;
      multiply(ring[d], u + d == 0);
      if (u + d + DEPTH < units) load(ring[d], u + d + DEPTH);
    }
  }
  warpgroup_wait<0>();
#pragma unroll
  for (int m = 0; m < TILES; ++m) warpgroup_settled(c[m]);
  cluster_meets();

  // The results by rows of x, where x was.
  float times[TILES][2], plus[TILES][2];
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      times[m][e] = factors ? F::undo() * __ldg(factors + row[m][e]) : F::undo();
      plus[m][e] = bias ? number(__ldg((const u16*)bias + row[m][e])) : 0.f;
    }
  auto two = [&](int m, int at, int e) {
    return pair(c[m][at] * times[m][e] + plus[m][e], c[m][at + 1] * times[m][e] + plus[m][e]);
  };
#pragma unroll
  for (int m = 0; m < OUT_TILES; ++m) {
    char* to = tiles + ((lane >> 4) * 8 + (lane & 7)) * PITCH + (below - gid + m * 64 + ((lane >> 3) & 1) * 8) * 2;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j += 2) {
      u32 v[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = (j + (e >> 1)) * 4 + (e & 1) * 2;
        v[e] = two(m, at, e & 1);
        if (GATED) {
          const u32 up = two(TILES - 1, at, e & 1);
          v[e] = pair(activate<ACTIVATION>(low(v[e])) * low(up), activate<ACTIVATION>(high(v[e])) * high(up));
        }
      }
      store_columns(to + j * 8 * PITCH, v[0], v[1], v[2], v[3]);
    }
  }
  __syncthreads();
  if (ORDERED) {
    constexpr int UNIT = ORDERED ? ORDERED : 128, BLOCKS = UNIT / 32, PIECES = ROWS / 32;
    for (int i = tid; i < COLUMNS * PIECES; i += WARPS * 32) {
      const int line = i / PIECES, unit = i % PIECES / BLOCKS, block = i % BLOCKS;
      if (first_row + unit * UNIT >= width) continue;
      u32 words[4][4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const uint4 v = pairs_of<UNIT>(*(const uint4*)(tiles + line * PITCH + (unit * UNIT + q * (UNIT / 4) + block * 8) * 2));
        words[q][0] = v.x, words[q][1] = v.y, words[q][2] = v.z, words[q][3] = v.w;
      }
#pragma unroll
      for (int q = 0; q < 4; ++q)
        ((uint4*)out)[place<UNIT>(first_row / UNIT + unit, block, q, first_column + line, padded)] =
            make_uint4(words[0][q], words[1][q], words[2][q], words[3][q]);
    }
    return;
  }
  constexpr int PIECES = ROWS / 8;
  for (int i = tid; i < COLUMNS * PIECES; i += WARPS * 32) {
    const int column = first_column + i / PIECES, at = first_row + i % PIECES * 8;
    if (column < count && at < width)
      *(uint4*)(out + (size_t)column * width + at) = *(const uint4*)(tiles + i / PIECES * PITCH + i % PIECES * 16);
  }
}

}  // namespace arriero
