// Integer products of NEON: of four bytes (dotprod), or of two rows and two columns of eight bytes (i8mm). Included
// after simd_neon.h.
constexpr int kCols = 32, kInt8Rows = 4;
constexpr bool kBytes = true;

static inline void store_int8(int8_t* q, V whole) {
  const VI i = to_int(whole);
  const int8x8_t n = vqmovn_s16(vcombine_s16(vqmovn_s32(i.a), vqmovn_s32(i.b)));
  std::memcpy(q, &n, 8);
}
template <int BITS>
static inline void unpack32(const Bits<BITS>& bits, const uint8_t* w, uint8_t* out) {
  const uint8x16_t lo = vcombine_u8(vmovn_u16(bits.template codes<0>(w)), vmovn_u16(bits.template codes<1>(w)));
  const uint8x16_t hi = vcombine_u8(vmovn_u16(bits.template codes<2>(w)), vmovn_u16(bits.template codes<3>(w)));
  std::memcpy(out, &lo, 16);
  std::memcpy(out + 16, &hi, 16);
}
template <bool FP4>
static inline void nibbles(const uint8_t* w, uint8_t* out, int n) {
  const uint8x16_t lut = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  for (int k = 0; k < n; k += 16, w += 8) {
    const uint8x8_t v = read<uint8x8_t>(w), lo = vand_u8(v, vdup_n_u8(15)), hi = vshr_n_u8(v, 4);
    uint8x16_t c = vcombine_u8(vzip1_u8(lo, hi), vzip2_u8(lo, hi));
    if constexpr (FP4) c = vqtbl1q_u8(lut, c);
    std::memcpy(out + k, &c, 16);
  }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kDepth = 8;
constexpr bool kSigned = false;
// Two rows of 16 bytes to two columns of eight; returns the number of columns done.
static inline int transposed(const uint8_t* codes, size_t kb, int n, uint8_t* tile) {
  for (int d = 0; d < n / 8; d += 2)
    for (int r = 0; r < kCols; r += 2) {
      const uint64x2_t a = read<uint64x2_t>(codes + r * kb + d * 8), b = read<uint64x2_t>(codes + (r + 1) * kb + d * 8);
      const uint64x2_t lo = vzip1q_u64(a, b), hi = vzip2q_u64(a, b);
      std::memcpy(tile + ((size_t)d * kCols + r) * 8, &lo, 16);
      std::memcpy(tile + ((size_t)(d + 1) * kCols + r) * 8, &hi, 16);
    }
  return n / 8;
}
// c[R][kCols] += the groups' dot products, eight columns at a time; rows go in pairs, an odd last one twice.
template <int R, int MOST>
static inline void micro_int8(const int8_t* a, size_t lda, const float* xs, const float* xq, size_t lds,
                              const uint8_t* b, const float* sw, const float* bw, int groups, int group, float* c) {
  constexpr int pairs = (R + 1) / 2;
  for (int h = 0; h < kCols; h += 8) {
    V t[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) t[r] = load<F32>(c + r * kCols, h);
    const uint8_t* bh = b + h * 8;
    const int8_t* ag = a;
    for (int g = 0; g < groups; g++, ag += group) {
      int32x4_t acc[pairs][4];  // (column, row): 00 01 10 11
#pragma GCC unroll 2
      for (int p = 0; p < pairs; p++)
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) acc[p][n] = vdupq_n_s32(0);
      for (int k = 0; k < group; k += 8, bh += kCols * 8) {
        uint8x16_t w[4];
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) w[n] = read<uint8x16_t>(bh + n * 16);
#pragma GCC unroll 2
        for (int p = 0; p < pairs; p++) {
          const int second = 2 * p + 1 < R ? 2 * p + 1 : R - 1;
          const int8x16_t x = vcombine_s8(read<int8x8_t>(ag + 2 * p * lda + k), read<int8x8_t>(ag + second * lda + k));
#pragma GCC unroll 4
          for (int n = 0; n < 4; n++) acc[p][n] = vusmmlaq_s32(acc[p][n], w[n], x);
        }
      }
      const V s0 = load<F32>(sw + g * kCols, h), z0 = load<F32>(bw + g * kCols, h);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const int32x4_t* q = acc[r / 2];
        const int32x4_t lo = r % 2 ? vuzp2q_s32(q[0], q[1]) : vuzp1q_s32(q[0], q[1]);
        const int32x4_t hi = r % 2 ? vuzp2q_s32(q[2], q[3]) : vuzp1q_s32(q[2], q[3]);
        t[r] = fma(V{vcvtq_f32_s32(lo), vcvtq_f32_s32(hi)}, mul(splat(xs[r * lds + g]), s0), t[r]);
        t[r] = fma(splat(xq[r * lds + g]), z0, t[r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) store<F32>(c + r * kCols, h, t[r]);
  }
}
#else
constexpr int kDepth = 4, kBlock = 2;
constexpr bool kDirect = true, kSigned = true;
using Ints = VI;
static inline Ints no_ints() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
static inline Ints spread(int v) { return {vdupq_n_s32(v), vdupq_n_s32(v)}; }
static inline Ints codes_at(const uint8_t* b) { return {read<int32x4_t>(b), read<int32x4_t>(b + 16)}; }
static inline V ints_to_float(Ints a) { return {vcvtq_f32_s32(a.a), vcvtq_f32_s32(a.b)}; }
static inline int32x4_t dot(int32x4_t acc, int32x4_t codes, int32x4_t x) {
  return vdotq_s32(acc, vreinterpretq_s8_s32(codes), vreinterpretq_s8_s32(x));
}
static inline Ints dot(Ints acc, Ints codes, Ints x) { return {dot(acc.a, codes.a, x.a), dot(acc.b, codes.b, x.b)}; }
static inline Ints dot_pairs(Ints codes, Ints) { return codes; }  // never called
// Four rows of 16 bytes to four columns of four; returns the number of columns done.
static inline int transposed(const uint8_t* codes, size_t kb, int n, uint8_t* tile) {
  for (int d = 0; d < n / 4; d += 4)
    for (int r = 0; r < kCols; r += 4) {
      uint32x4_t q[4];
      for (int i = 0; i < 4; i++) q[i] = read<uint32x4_t>(codes + (r + i) * kb + d * 4);
      const uint64x2_t a = vreinterpretq_u64_u32(vzip1q_u32(q[0], q[1]));
      const uint64x2_t b = vreinterpretq_u64_u32(vzip1q_u32(q[2], q[3]));
      const uint64x2_t e = vreinterpretq_u64_u32(vzip2q_u32(q[0], q[1]));
      const uint64x2_t f = vreinterpretq_u64_u32(vzip2q_u32(q[2], q[3]));
      const uint64x2_t columns[4] = {vzip1q_u64(a, b), vzip2q_u64(a, b), vzip1q_u64(e, f), vzip2q_u64(e, f)};
      for (int i = 0; i < 4; i++) std::memcpy(tile + ((size_t)(d + i) * kCols + r) * 4, &columns[i], 16);
    }
  return n / 4;
}
#include "int8_dot4.h"
#endif
