// Integer products of AVX-512, with VNNI or without. Included after simd_avx512.h.
constexpr int kCols = 32, kDepth = 4, kInt8Rows = 6, kBlock = 2;
constexpr bool kSigned = false;
using Ints = __m512i;
static inline Ints no_ints() { return _mm512_setzero_si512(); }
static inline Ints spread(int v) { return _mm512_set1_epi32(v); }
static inline Ints codes_at(const uint8_t* b) { return _mm512_loadu_si512(b); }
static inline V ints_to_float(Ints a) { return _mm512_cvtepi32_ps(a); }
#if defined(__AVX512VNNI__)
constexpr bool kDirect = true, kBytes = true;
static inline Ints dot(Ints acc, Ints codes, Ints x) { return _mm512_dpbusd_epi32(acc, codes, x); }
#else
constexpr bool kDirect = false, kBytes = false;  // two products of eight-bit codes would not fit 16 bits
static inline Ints dot(Ints acc, Ints, Ints) { return acc; }  // never called
#endif
static inline Ints dot_pairs(Ints codes, Ints x) { return _mm512_maddubs_epi16(codes, x); }
static inline Ints add16(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
static inline Ints settle(Ints acc, Ints pairs) {
  return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
static inline void store_int8(int8_t* q, V whole) {
  _mm_storeu_si128((__m128i*)q, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(whole)));
}
template <int BITS>
static inline void unpack32(const Bits<BITS>& bits, const uint8_t* w, uint8_t* out) {
  for (int j = 0; j < 2; j++, w += 2 * BITS)
    _mm_storeu_si128((__m128i*)(out + 16 * j), _mm512_cvtepi32_epi8(_mm512_and_si512(bits.codes(w), bits.mask)));
}
template <bool FP4>
static inline void nibbles(const uint8_t* w, uint8_t* out, int n) {
  const __m128i m = _mm_set1_epi8(15), lut = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  int k = 0;
  for (; k + 64 <= n; k += 64, w += 32) {
    const __m512i v = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)w));
    __m512i c = _mm512_and_si512(_mm512_or_si512(v, _mm512_slli_epi16(v, 4)), _mm512_set1_epi16(0x0f0f));
    if constexpr (FP4) c = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(lut), c);
    _mm512_storeu_si512(out + k, c);
  }
  for (; k < n; k += 16, w += 8) {
    const __m128i v = _mm_loadl_epi64((const __m128i*)w);
    __m128i c = _mm_unpacklo_epi8(_mm_and_si128(v, m), _mm_and_si128(_mm_srli_epi16(v, 4), m));
    if constexpr (FP4) c = _mm_shuffle_epi8(lut, c);
    _mm_storeu_si128((__m128i*)(out + k), c);
  }
}
// Sixteen rows of 64 bytes to sixteen columns: dword d of row r goes to out + 128 d + 4 r.
static inline void transpose_dwords(const uint8_t* in, size_t ld, uint8_t* out) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(in + i * ld);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // a[i + j]: dword j of each 128-bit part, rows i .. i + 3
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const __m512i p = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x44), q = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xee);
    const __m512i r = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x44);
    const __m512i s = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xee);
    _mm512_store_si512(out + 128 * j, _mm512_shuffle_i32x4(p, r, 0x88));
    _mm512_store_si512(out + 128 * (4 + j), _mm512_shuffle_i32x4(p, r, 0xdd));
    _mm512_store_si512(out + 128 * (8 + j), _mm512_shuffle_i32x4(q, s, 0x88));
    _mm512_store_si512(out + 128 * (12 + j), _mm512_shuffle_i32x4(q, s, 0xdd));
  }
}
// Fills as much of a tile as it can; returns the number of dwords done.
static inline int transposed(const uint8_t* codes, size_t kb, int n, uint8_t* tile) {
  int d = 0;
  for (; d + 16 <= n / 4; d += 16) {
    transpose_dwords(codes + d * 4, kb, tile + d * 128);
    transpose_dwords(codes + 16 * kb + d * 4, kb, tile + d * 128 + 64);
  }
  return d;
}
#include "int8_dot4.h"
