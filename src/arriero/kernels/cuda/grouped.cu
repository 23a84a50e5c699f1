// Products of many rows with matrices of their own out of a bank in NVFP4: rows are sorted by expert, and a block of four
// warps takes up to 64 rows of one expert and 32 columns a warp. Weights are decoded in registers, each once a block;
// rows lie in shared memory, the next 128 numbers of each on their way while these are multiplied.
namespace arriero {

// One block's rows.
struct Rows {
  int expert;
  int first;  // of the sorted rows
  int count;
  int unused;
};

constexpr int MOST_ROWS = 64, STEP = 128, ROW_BYTES = STEP * 2 + 16;

__device__ __forceinline__ void begin_copy(void* to, const void* from) {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
#else
  *(uint4*)to = *(const uint4*)from;
#endif
}
__device__ __forceinline__ void end_copies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// 32 weights of one row, which a lane decodes: 16 bytes and two scales.
struct Piece {
  uint4 codes;
  u32 scales;
};

__device__ __forceinline__ Piece piece_of(const u8* codes, const u8* scales, size_t row, int K, int step, int t) {
  Piece p;
  p.codes = __ldg((const uint4*)(codes + row * (K / 2) + step * (STEP / 2) + t * 16));
  p.scales = __ldg((const u16*)(scales + row * (K / 16) + step * (STEP / 16) + t * 2));
  return p;
}

// GATED: the columns of a warp are 16 of gate and the same of up, and silu(gate) · up is what comes out.
// SPREAD: row i is row order[i] / SPREAD of x and comes out at i; else it is row i of x and comes out at order[i].
template <int K, int COLUMNS, bool GATED, int SPREAD>
__device__ __forceinline__ void group(const bf16* x, const u32* order, Rows of, const u8* w, const u8* scales, const u8* up,
                                      const u8* up_scales, float factor, float up_factor, bf16* out, char* shared) {
  typedef Format<NVFP4, 16> F;
  constexpr int STEPS = K / STEP, WIDE = GATED ? 64 : 128;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, gid = lane >> 2, t = lane & 3;
  const int column = blockIdx.x * WIDE + warp * (WIDE / 4);
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
#pragma unroll
    for (int j = 0; j < MOST_ROWS / 8; ++j) begin_copy(to + 8 * j * ROW_BYTES, from[j] + step * STEP);
  };
  Piece now[4], next[4];
  auto load = [&](int step, Piece* to) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const bool second = GATED && n > 1;
      const size_t row = (size_t)of.expert * COLUMNS + column + (GATED ? n & 1 : n) * 8 + gid;
      to[n] = piece_of(second ? up : w, second ? up_scales : scales, row, K, step, t);
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
        const u32 scale = F::widen(now[n].scales >> (8 * part));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          u32 p[4];
          const u32 code = part ? (half ? now[n].codes.w : now[n].codes.z) : (half ? now[n].codes.y : now[n].codes.x);
          e2m1(code, scale, p);
          b[n][4 * half] = permute(p[0], p[1], 0x5410), b[n][4 * half + 1] = permute(p[2], p[3], 0x5410);
          b[n][4 * half + 2] = permute(p[0], p[1], 0x7632), b[n][4 * half + 3] = permute(p[2], p[3], 0x7632);
        }
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
  const float one = F::undo() * factor, two = F::undo() * up_factor;
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
        u32 v = pair(c[m][n][2 * half] * one, c[m][n][2 * half + 1] * one);
        if (GATED) {
          const u32 u = pair(c[m][n + 2][2 * half] * two, c[m][n + 2][2 * half + 1] * two);
          v = pair(low(v) / (1.f + __expf(-low(v))) * low(u), high(v) / (1.f + __expf(-high(v))) * high(u));
        }
        *(u32*)(to + 8 * n) = v;
      }
    }
}

}  // namespace arriero
