// y = x Wᵀ for many rows of x and a packed W on GPUs with warpgroups: W is decoded in registers, where the tensor cores
// take it from, so that nothing of it is written and each block decodes its rows once for all of its columns.
//
// Rows of W are rows of A, rows of x the columns of B. A block is GROUPS warpgroups of 64 rows of W each, and COLUMNS rows
// of x, which other warps copy into shared memory, 64 numbers of each at a time (a stage). The blocks of a cluster have
// the same rows of x: each copies its part of them to all. The numbers of x are in another order, prepared by
// prompt_rows_body.cu: a thread decodes 16 contiguous bytes, as in product.cu.
namespace arriero {

constexpr int STAGE = 64;  // numbers of a row of x

// One unit of two rows of W, of which a thread holds a quarter.
template <class F>
struct Packed {
  uint4 codes[2];
  typename F::Scale scales[2];
};

__device__ __forceinline__ u32 sum_of_pairs(u32 a, u32 b) { return pair(low(a) + low(b), high(a) + high(b)); }

// DEPTH units of each row are on their way to a thread; it decodes BATCH blocks while as many are multiplied.
template <int MODE, int GROUP, int COLUMNS, int GROUPS, int STAGES, int DEPTH, int BATCH>
__device__ __forceinline__ void prompt_product(const char* x, const void* w, const void* scales, const void* biases,
                                               const float* factors, const void* bias, const void* residual, bf16* out, int N,
                                               int K, int count, int padded, char* shared) {
  typedef Format<MODE, GROUP> F;
  constexpr int WARPS = GROUPS * 4, ROWS = GROUPS * 64, BYTES = COLUMNS * STAGE * 2, PITCH = ROWS * 2 + 16;
  static_assert(COLUMNS * PITCH <= STAGES * BYTES, "results take the place of x");
  const int tid = threadIdx.x, warp = warp_of_block(), lane = tid & 31, gid = lane >> 2, t = lane & 3;
  const int first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
  u64* full = (u64*)shared;
  u64* empty = full + STAGES;
  char* tiles = shared + 1024;
  if (tid == 0) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s) barrier_begin(full + s, 1), barrier_begin(empty + s, WARPS * CLUSTER);
    barriers_begun();
  }
  cluster_meets();

  // Of 384 threads each may have 168 registers, of 512 128; 256 columns alone are 128.
  constexpr bool MANY = GROUPS > 1;
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

  if (MANY) registers_take<GROUPS == 2 ? 240 : 160>();
  const int units = K / F::UNIT;
  const size_t row_bytes = (size_t)units * 64;
  const int below = (warp >> 2) * 64 + (warp & 3) * 16;  // of the block's first row
  int row[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) row[e] = min(first_row + below + gid + e * 8, N - 1);
  Packed<F> ring[DEPTH];
  auto load = [&](Packed<F>& p, int u) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      p.codes[e] = __ldg((const uint4*)((const char*)w + row[e] * row_bytes + u * 64 + t * 16));
      p.scales[e] = F::load(scales, biases, row[e], K, u, t);
    }
  };
  static_assert(DEPTH * F::BLOCKS % (2 * BATCH) == 0, "two places for decoded blocks take turns");
  u32 a[2][BATCH][2][4];
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) load(ring[d], min(d, units - 1));
  float c[COLUMNS / 2];
#pragma unroll
  for (int e = 0; e < COLUMNS / 2; ++e) c[e] = 0.f;
  const u64 described = describe(shared_at(tiles));
  int slot = 0, before = 0;
  u32 parity = 0;
#pragma unroll 1
  for (int u = 0; u < units; u += DEPTH) {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (d > 0 && d * F::BLOCKS % (2 * BATCH) == 0 && u + d >= units) break;
      Packed<F>& now = ring[d];
      const typename F::Factor f[2] = {F::factor(now.scales[0]), F::factor(now.scales[1])};
      // A block is two steps of 16 numbers, two are a stage.
#pragma unroll
      for (int i = 0; i < F::BLOCKS; i += BATCH) {
        u32(*own)[2][4] = a[(d * F::BLOCKS + i) / BATCH & 1];
#pragma unroll
        for (int j = 0; j < BATCH; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) F::decode((const u32*)&now.codes[e], i + j, f[e], own[j][e]);
        if ((i & 1) == 0) barrier_wait(full + slot, parity);
        warpgroup_begin();
#pragma unroll
        for (int j = 0; j < BATCH; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            warpgroup_mma(c, own[j][0][2 * h], own[j][1][2 * h], own[j][0][2 * h + 1], own[j][1][2 * h + 1],
                          described + ((slot * BYTES + (((i + j) & 1) * 2 + h) * 32) >> 4));
        warpgroup_close();
        if (i + BATCH == F::BLOCKS) load(now, min(u + d + DEPTH, units - 1));
        // What is decoded before a wait would have the compiler put the products one behind another.
        warpgroup_wait<1>();
        if ((i & 1) == 0 && u + d + i > 0) {
          // The stage before is read. Each block of a cluster waits for all before it copies there again.
          if (CLUSTER == 1) {
            if (lane == 0) barrier_arrive(empty + before);
          } else if (lane < CLUSTER) {
            barrier_arrive(empty + before, lane);
          }
        }
        if (((i + BATCH) & 1) == 0) {
          before = slot;
          if (++slot == STAGES) slot = 0, parity ^= 1;
        }
      }
    }
  }
  warpgroup_wait<0>();
  warpgroup_settled(c);
  cluster_meets();

  // The results by rows of x, where x was.
  float times[2], plus[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    times[e] = factors ? F::undo() * __ldg(factors + row[e]) : F::undo();
    plus[e] = bias ? number(__ldg((const u16*)bias + row[e])) : 0.f;
  }
  char* to = tiles + ((lane >> 4) * 8 + (lane & 7)) * PITCH + (below + ((lane >> 3) & 1) * 8) * 2;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j += 2) {
    u32 v[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* from = &c[(j + (e >> 1)) * 4 + (e & 1) * 2];
      v[e] = pair(from[0] * times[e & 1] + plus[e & 1], from[1] * times[e & 1] + plus[e & 1]);
    }
    store_columns(to + j * 8 * PITCH, v[0], v[1], v[2], v[3]);
  }
  __syncthreads();
  constexpr int PIECES = ROWS / 8;
  for (int i = tid; i < COLUMNS * PIECES; i += WARPS * 32) {
    const int column = first_column + i / PIECES, at = first_row + i % PIECES * 8;
    if (column >= count || at >= N) continue;
    const size_t place = (size_t)column * N + at;
    uint4 y = *(const uint4*)(tiles + i / PIECES * PITCH + i % PIECES * 16);
    if (residual) {
      const uint4 r = __ldg((const uint4*)((const bf16*)residual + place));
      y = make_uint4(sum_of_pairs(y.x, r.x), sum_of_pairs(y.y, r.y), sum_of_pairs(y.z, r.z), sum_of_pairs(y.w, r.w));
    }
    *(uint4*)(out + place) = y;
  }
}

}  // namespace arriero
