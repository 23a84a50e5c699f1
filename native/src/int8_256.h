// Integer products of AVX2, with AVX-VNNI or without. Included after simd_8.h.
constexpr int kCols = 32, kDepth = 4, kInt8Rows = 4, kBlock = 2;
constexpr bool kSigned = false;
using Ints = __m256i;
static inline Ints no_ints() { return _mm256_setzero_si256(); }
static inline Ints spread(int v) { return _mm256_set1_epi32(v); }
static inline Ints codes_at(const uint8_t* b) { return _mm256_loadu_si256((const __m256i*)b); }
static inline V ints_to_float(Ints a) { return _mm256_cvtepi32_ps(a); }
#if defined(__AVXVNNI__)
constexpr bool kDirect = true, kBytes = true;
static inline Ints dot(Ints acc, Ints codes, Ints x) { return _mm256_dpbusd_avx_epi32(acc, codes, x); }
#else
constexpr bool kDirect = false, kBytes = false;  // two products of eight-bit codes would not fit 16 bits
static inline Ints dot(Ints acc, Ints, Ints) { return acc; }  // never called
#endif
static inline Ints dot_pairs(Ints codes, Ints x) { return _mm256_maddubs_epi16(codes, x); }
static inline Ints add16(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
static inline Ints settle(Ints acc, Ints pairs) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
static inline void store_int8(int8_t* q, V whole) {
  const __m256i i = _mm256_cvtps_epi32(whole);
  const __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
  _mm_storel_epi64((__m128i*)q, _mm_packs_epi16(h, h));
}
template <int BITS>
static inline void unpack32(const Bits<BITS>& bits, const uint8_t* w, uint8_t* out) {
  const __m256i a = (__m256i)bits.template codes<0>(w), b = (__m256i)bits.template codes<1>(w);
  const __m256i c = (__m256i)bits.template codes<2>(w), d = (__m256i)bits.template codes<3>(w);
  const __m256i v = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i*)out, _mm256_permutevar8x32_epi32(v, order));
}
template <bool FP4>
static inline void nibbles(const uint8_t* w, uint8_t* out, int n) {
  const __m128i m = _mm_set1_epi8(15), lut = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  for (int k = 0; k < n; k += 16, w += 8) {
    const __m128i v = _mm_loadl_epi64((const __m128i*)w);
    __m128i c = _mm_unpacklo_epi8(_mm_and_si128(v, m), _mm_and_si128(_mm_srli_epi16(v, 4), m));
    if constexpr (FP4) c = _mm_shuffle_epi8(lut, c);
    _mm_storeu_si128((__m128i*)(out + k), c);
  }
}
// Eight rows of 32 bytes to eight columns: dword d of row r goes to out + 128 d + 4 r.
static inline void transpose_dwords(const uint8_t* in, size_t ld, uint8_t* out) {
  __m256i a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_si256((const __m256i*)(in + i * ld));
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {  // a[i + j]: dword j of both 128-bit parts, rows i .. i + 3
    a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    _mm256_storeu_si256((__m256i*)(out + 128 * j), _mm256_permute2x128_si256(a[j], a[4 + j], 0x20));
    _mm256_storeu_si256((__m256i*)(out + 128 * (4 + j)), _mm256_permute2x128_si256(a[j], a[4 + j], 0x31));
  }
}
// Fills as much of a tile as it can; returns the number of dwords done.
static inline int transposed(const uint8_t* codes, size_t kb, int n, uint8_t* tile) {
  int d = 0;
  for (; d + 8 <= n / 4; d += 8)
    for (int r = 0; r < kCols; r += 8) transpose_dwords(codes + r * kb + d * 4, kb, tile + d * 128 + r * 4);
  return d;
}
#include "int8_dot4.h"
