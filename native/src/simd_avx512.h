// Sixteen float lanes. Included inside the instruction set's own anonymous namespace; every multiply-add is spelled
// out (the build forbids contraction), so one source line means one rounding wherever it is instantiated.
using V = __m512;
constexpr int L = 16;

static inline V zero() { return _mm512_setzero_ps(); }
static inline V splat(float a) { return _mm512_set1_ps(a); }
static inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
static inline V add(V a, V b) { return _mm512_add_ps(a, b); }
static inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
static inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
static inline V div(V a, V b) { return _mm512_div_ps(a, b); }
// Where either is NaN the second comes out.
static inline V max(V a, V b) { return _mm512_max_ps(a, b); }
static inline V min(V a, V b) { return _mm512_min_ps(a, b); }
static inline V round_even(V a) { return _mm512_roundscale_ps(a, 8); }
static inline V exp2i(V n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
// b where a < limit, else c
static inline V where_less(V a, V limit, V b, V c) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, limit, _CMP_LT_OQ), c, b);
}
static inline bool any_above(V a, V limit) { return _mm512_cmp_ps_mask(a, limit, _CMP_GT_OQ) != 0; }

static inline V widen_bf16(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
static inline __m256i narrow_bf16(V f) {
  const __m512i u = _mm512_castps_si512(f);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, _mm512_srli_epi32(u, 16), _mm512_set1_epi32(64));
  return _mm512_cvtepi32_epi16(r);
}
template <int T>
static inline V load(const void* p, size_t i) {
  if constexpr (T == F32) return _mm512_loadu_ps((const float*)p + i);
  const __m256i v = _mm256_loadu_si256((const __m256i*)((const uint16_t*)p + i));
  if constexpr (T == BF16) return widen_bf16(v);
  return _mm512_cvtph_ps(v);
}
static inline __mmask16 first(int n) { return (__mmask16)((1u << n) - 1); }
// The first n lanes, the others zero.
template <int T>
static inline V load_part(const void* p, size_t i, int n) {
  if constexpr (T == F32) return _mm512_maskz_loadu_ps(first(n), (const float*)p + i);
  const __m256i v = _mm256_maskz_loadu_epi16(first(n), (const uint16_t*)p + i);
  if constexpr (T == BF16) return widen_bf16(v);
  return _mm512_cvtph_ps(v);
}
template <int T>
static inline void store_part(void* p, size_t i, V v, int n) {
  const __mmask16 m = n >= 16 ? 0xffff : first(n);
  if constexpr (T == F32) _mm512_mask_storeu_ps((float*)p + i, m, v);
  else _mm256_mask_storeu_epi16((uint16_t*)p + i, m, T == BF16 ? narrow_bf16(v) : _mm512_cvtps_ph(v, 0));
}
template <int T>
static inline void store(void* p, size_t i, V v) {
  if constexpr (T == F32) _mm512_storeu_ps((float*)p + i, v);
  else _mm256_storeu_si256((__m256i*)((uint16_t*)p + i), T == BF16 ? narrow_bf16(v) : _mm512_cvtps_ph(v, 0));
}

// The sums of four vectors' lanes; sum() adds in the same order.
static inline void sum4(V a, V b, V c, V d, float* out) {
  const V x = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const V y = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const V z = add(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xee));
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(z), _mm512_extractf32x8_ps(z, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
}
static inline float sum(V a) {
  float t[4];
  sum4(a, a, a, a, t);
  return t[0];
}
static inline float top(V a) { return _mm512_reduce_max_ps(a); }

// Into the second level: what waits for memory in the first level's few places keeps loads out of them.
static inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
// the lower 16 lanes' even and odd elements of 32 consecutive ones
static inline void split_pairs(V a, V b, V& even, V& odd) {
  const __m512i e = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  even = _mm512_permutex2var_ps(a, e, b);
  odd = _mm512_permutex2var_ps(a, _mm512_add_epi32(e, _mm512_set1_epi32(1)), b);
}
static inline void join_pairs(V even, V odd, V& a, V& b) {
  const __m512i lo = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  a = _mm512_permutex2var_ps(even, lo, odd);
  b = _mm512_permutex2var_ps(even, _mm512_add_epi32(lo, _mm512_set1_epi32(8)), odd);
}

// ---- fp8 weights as floats
struct Ctx {
  V a;
};
// step gives the 32 weights whose codes start at w.
struct Fp8 {
  // through f16, whose exponent bias is 8 larger
  inline Ctx group(float scale) const { return {splat(scale * 256.f)}; }
  inline void step(const Ctx& c, const uint8_t* w, V (&v)[2]) const {
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      const __m256i q = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(w + j * 16)));
      const __m256i h = _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(q, _mm256_set1_epi16(0x7f)), 7),
                                        _mm256_slli_epi16(_mm256_and_si256(q, _mm256_set1_epi16(0x80)), 8));
      v[j] = mul(_mm512_cvtph_ps(h), c.a);
    }
  }
};
constexpr int kMR = 6;  // rows of x in the micro-kernel: with four rows of w, 24 of 32 registers accumulate
constexpr int kWideRows = 4;  // rows of w at once for three or four rows of x
