// Eight float lanes: AVX2 intrinsics, or the compiler's own vectors where there is no AVX2. Included inside the
// instruction set's anonymous namespace; every multiply-add is spelled out (the build forbids contraction).
typedef float V __attribute__((vector_size(32)));
typedef int32_t VI __attribute__((vector_size(32)));
constexpr int L = 8;

static inline V zero() { return V{}; }
static inline V splat(float a) { return V{a, a, a, a, a, a, a, a}; }
static inline V add(V a, V b) { return a + b; }
static inline V sub(V a, V b) { return a - b; }
static inline V mul(V a, V b) { return a * b; }
static inline V div(V a, V b) { return a / b; }
#if defined(__AVX2__)
static inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
static inline V max(V a, V b) { return _mm256_max_ps(a, b); }
static inline V min(V a, V b) { return _mm256_min_ps(a, b); }
static inline VI to_int(V a) { return (VI)_mm256_cvtps_epi32(a); }
static inline V to_float(VI a) { return _mm256_cvtepi32_ps((__m256i)a); }
static inline V round_even(V a) { return _mm256_round_ps(a, 8); }
#else
#if defined(__aarch64__)
static inline V fma(V a, V b, V c) {
  V r;
  for (int i = 0; i < 8; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
}
#else
static inline V fma(V a, V b, V c) { return a * b + c; }
#endif
static inline V max(V a, V b) { return a > b ? a : b; }  // NaN: the second, as the x86 instruction
static inline V min(V a, V b) { return a < b ? a : b; }
// by the magic number 1.5 * 2^23, for |a| < 2^22
static inline V round_even(V a) { return (a + splat(12582912.f)) - splat(12582912.f); }
static inline VI to_int(V a) { return __builtin_convertvector(a, VI); }
static inline V to_float(VI a) { return __builtin_convertvector(a, V); }
#endif
static inline V exp2i(V n) { return (V)((to_int(n) + 127) << 23); }
static inline V where_less(V a, V limit, V b, V c) { return a < limit ? b : c; }
static inline bool any_above(V a, V limit) {
  const VI m = a > limit;
  int32_t r = 0;
  for (int i = 0; i < 8; i++) r |= m[i];
  return r != 0;
}

#if defined(__aarch64__)
typedef __fp16 Half;
#else
typedef _Float16 Half;
#endif
static inline float half_to_float(uint16_t h) {
  Half x;
  std::memcpy(&x, &h, 2);
  return (float)x;
}
static inline uint16_t float_to_half(float f) {
  const Half x = (Half)f;
  uint16_t h;
  std::memcpy(&h, &x, 2);
  return h;
}
template <int T>
static inline V load(const void* p, size_t i) {
  V r;
  if constexpr (T == F32) {
    std::memcpy(&r, (const float*)p + i, 32);
    return r;
  }
  const uint16_t* h = (const uint16_t*)p + i;
#if defined(__AVX2__)
  const __m128i v = _mm_loadu_si128((const __m128i*)h);
  if constexpr (T == BF16) return (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16);
  return _mm256_cvtph_ps(v);
#else
  if constexpr (T == BF16) {
    typedef uint16_t H __attribute__((vector_size(16)));
    typedef uint32_t U __attribute__((vector_size(32)));
    H v;
    std::memcpy(&v, h, 16);
    return (V)(__builtin_convertvector(v, U) << 16);
  }
#if defined(__aarch64__)
  for (int j = 0; j < 8; j++) r[j] = half_to_float(h[j]);
  return r;
#else  // the compiler's conversion is a library call
  typedef uint16_t H __attribute__((vector_size(16)));
  H v;
  std::memcpy(&v, h, 16);
  const VI u = __builtin_convertvector(v, VI), magnitude = u & 0x7fff;
  const VI f = (VI)((V)(magnitude << 13) * splat(0x1p112f)) | (magnitude > 0x7bff ? VI{} + 0x7f800000 : VI{});
  return (V)(f | ((u & 0x8000) << 16));
#endif
#endif
}
template <int T>
static inline V load_part(const void* p, size_t i, int n) {
  alignas(32) unsigned char t[32] = {};
  std::memcpy(t, (const char*)p + i * bytes_of(T), (size_t)n * bytes_of(T));
  return load<T>(t, 0);
}
template <int T>
static inline void store(void* p, size_t i, V v) {
  if constexpr (T == F32) {
    std::memcpy((float*)p + i, &v, 32);
    return;
  }
  uint16_t* h = (uint16_t*)p + i;
  if constexpr (T == BF16) {
    typedef uint32_t U __attribute__((vector_size(32)));
    typedef uint16_t H __attribute__((vector_size(16)));
    const U u = (U)v;
    const U r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    const H o = __builtin_convertvector(v == v ? r : ((u >> 16) | 64), H);
    std::memcpy(h, &o, 16);
  } else {
#if defined(__AVX2__)
    _mm_storeu_si128((__m128i*)h, _mm256_cvtps_ph(v, 0));
#else
    for (int j = 0; j < 8; j++) h[j] = float_to_half(v[j]);
#endif
  }
}
template <int T>
static inline void store_part(void* p, size_t i, V v, int n) {
  if (n >= 8) return store<T>(p, i, v);
  unsigned char t[32];
  store<T>(t, 0, v);
  std::memcpy((char*)p + i * bytes_of(T), t, (size_t)n * bytes_of(T));
}

static inline float sum(V a) {
  const float q0 = a[0] + a[4], q1 = a[1] + a[5], q2 = a[2] + a[6], q3 = a[3] + a[7];
  return (q0 + q1) + (q2 + q3);
}
// The sums of four vectors' lanes; sum() adds in the same order.
static inline void sum4(V a, V b, V c, V d, float* out) {
#if defined(__AVX2__)
  const auto fold = [](V v) { return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); };
  _mm_storeu_ps(out, _mm_hadd_ps(_mm_hadd_ps(fold(a), fold(b)), _mm_hadd_ps(fold(c), fold(d))));
#else
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
#endif
}
static inline float top(V a) {
  float m = a[0];
  for (int i = 1; i < 8; i++) m = a[i] > m ? a[i] : m;
  return m;
}
// Into the second level, as simd_avx512.h says.
static inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
static inline void split_pairs(V a, V b, V& even, V& odd) {
  even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
  odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
}
static inline void join_pairs(V even, V odd, V& a, V& b) {
  a = __builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11);
  b = __builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15);
}

// ---- fp8 weights as floats
struct Ctx {
  V a, b;
};
// eight bytes, widened
static inline VI bytes_to_int(const uint8_t* w) {
#if defined(__AVX2__)
  return (VI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)w));
#elif defined(__SSE2__)  // where the compiler's own conversion goes through scalars
  const __m128i z = _mm_setzero_si128(), h = _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i*)w), z);
  const __m128i part[2] = {_mm_unpacklo_epi16(h, z), _mm_unpackhi_epi16(h, z)};
  VI r;
  std::memcpy(&r, part, 32);
  return r;
#else
  typedef uint8_t B __attribute__((vector_size(8)));
  B b;
  std::memcpy(&b, w, 8);
  return __builtin_convertvector(b, VI);
#endif
}
// step gives the 32 weights whose codes start at w.
struct Fp8 {
#if defined(__AVX2__)
  const __m256i top_bytes = _mm256_set_epi8(7, -1, -1, -1, 6, -1, -1, -1, 5, -1, -1, -1, 4, -1, -1, -1, 3, -1, -1, -1,
                                            2, -1, -1, -1, 1, -1, -1, -1, 0, -1, -1, -1);
#endif
  // The code's seven low bits, moved to the top of the float's mantissa and exponent, lack 2^120.
  inline Ctx group(float scale) const { return {splat(scale), splat(0x1p120f)}; }
  inline void step(const Ctx& c, const uint8_t* w, V (&v)[4]) const {
    for (int j = 0; j < 4; j++) {
#if defined(__AVX2__)
      long long t;
      std::memcpy(&t, w + j * 8, 8);
      // each code in the top byte of its lane; the arithmetic shift leaves the sign where a float has it
      const __m256i q = _mm256_shuffle_epi8(_mm256_set1_epi64x(t), top_bytes);
      const V f = (V)_mm256_and_si256(_mm256_srai_epi32(q, 4), _mm256_set1_epi32((int)0x87f00000));
#else
      const VI q = bytes_to_int(w + j * 8);
      const V f = (V)(((q & 0x7f) << 20) | ((q & 0x80) << 24));
#endif
      v[j] = mul(mul(f, c.b), c.a);
    }
  }
};
#if defined(__AVX2__)
constexpr int kMR = 3;  // three rows of x, four of w: 12 of 16 registers accumulate
#else
constexpr int kMR = 2;
#endif
constexpr int kWideRows = 2;  // rows of w at once for three or four rows of x
