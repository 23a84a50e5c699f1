// Four-byte integer lanes, as many as V has float lanes, for codes of packed strips. Included inside the instruction
// set's anonymous namespace, after its simd_*.h.
typedef int32_t I __attribute__((vector_size(4 * L)));
typedef uint16_t Words __attribute__((vector_size(4 * L)));

static inline I read_codes(const uint8_t* p) {
  I v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
static inline I spread(int32_t v) { return I{} + v; }
static inline I spread_words(uint16_t v) { return (I)(Words{} + v); }
// Both halves of each lane shifted right, or left where n is negative.
template <int n>
static inline I shift_words(I v) {
  if constexpr (n > 0) return (I)((Words)v >> n);
  else if constexpr (n < 0) return (I)((Words)v << -n);
  else return v;
}
static inline V ints_to_float(I v) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps((__m512i)v);
#elif defined(__AVX2__)
  return (V)_mm256_cvtepi32_ps((__m256i)v);
#else
  V f;
  typedef float Floats __attribute__((vector_size(4 * L)));
  const Floats t = __builtin_convertvector(v, Floats);
  std::memcpy(&f, &t, sizeof f);
  return f;
#endif
}
static inline V bits_to_float(I v) {
  V f;
  std::memcpy(&f, &v, sizeof f);
  return f;
}
static inline I nearest(V v) {  // ties to even
#if defined(__AVX512F__)
  return (I)_mm512_cvtps_epi32(v);
#elif defined(__AVX2__)
  return (I)_mm256_cvtps_epi32(v);
#else
  typedef float Floats __attribute__((vector_size(4 * L)));
  const V whole = round_even(v);
  Floats t;
  std::memcpy(&t, &whole, sizeof t);
  return __builtin_convertvector(t, I);
#endif
}
// The bits of the lanes' magnitudes: as integers in the magnitudes' order, above them what is infinite or no number.
static inline I magnitudes(V v) {
  I bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits & 0x7fffffff;
}
static inline I larger(I a, I b) {
#if defined(__AVX512F__)
  return (I)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (I)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
  return a > b ? a : b;
#endif
}
static inline int32_t largest_of(I v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t t[L];
  std::memcpy(t, &v, sizeof t);
  for (int i = 1; i < L; i++) t[0] = t[i] > t[0] ? t[i] : t[0];
  return t[0];
#endif
}
static inline int32_t whole_sum(I v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t t[L], a = 0;
  std::memcpy(t, &v, sizeof t);
  for (int i = 0; i < L; i++) a += t[i];
  return a;
#endif
}
// Products are added one by one: g++ would gather a group's first, add them as a tree, and run out of registers.
static inline I added(I acc, I products) {
  acc += products;
#if defined(__AVX512F__) && defined(__GNUC__)
  asm volatile("" : "+v"(acc));
#elif defined(__AVX2__) && defined(__GNUC__)
  asm volatile("" : "+x"(acc));
#endif
  return acc;
}
// acc + w.low * x.low + w.high * x.high, w below 256, x signed
static inline I dot_words(I acc, I w, I x) {
#if defined(__AVX512VNNI__)
  return (I)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__AVX512F__)
  return added(acc, (I)_mm512_madd_epi16((__m512i)w, (__m512i)x));
#elif defined(__AVXVNNI__)
  return (I)_mm256_dpwssd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x);
#elif defined(__AVX2__)
  return added(acc, (I)_mm256_madd_epi16((__m256i)w, (__m256i)x));
#elif defined(__SSE2__)
  __m128i a[2], b[2];
  std::memcpy(a, &w, sizeof a);
  std::memcpy(b, &x, sizeof b);
  const __m128i c[2] = {_mm_madd_epi16(a[0], b[0]), _mm_madd_epi16(a[1], b[1])};
  I r;
  std::memcpy(&r, c, sizeof r);
  return acc + r;
#else
  return acc + (w & 0xffff) * ((x << 16) >> 16) + (w >> 16) * (x >> 16);
#endif
}
// Products of four unsigned and four signed bytes.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kBytes = true;
static inline I dot_bytes(I acc, I w, I x) {
  int32x4_t a[2];
  uint8x16_t b[2];
  int8x16_t c[2];
  std::memcpy(a, &acc, sizeof a);
  std::memcpy(b, &w, sizeof b);
  std::memcpy(c, &x, sizeof c);
  for (int i = 0; i < 2; i++) a[i] = vusdotq_s32(a[i], b[i], c[i]);
  std::memcpy(&acc, a, sizeof a);
  return acc;
}
#elif defined(__AVX512VNNI__)
constexpr bool kBytes = true;
static inline I dot_bytes(I acc, I w, I x) { return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x); }
#elif defined(__AVXVNNI__)
constexpr bool kBytes = true;
static inline I dot_bytes(I acc, I w, I x) { return (I)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x); }
#else
constexpr bool kBytes = false;
static inline I dot_bytes(I acc, I, I) { return acc; }  // never called
#endif
// Where bytes can be multiplied and words cannot, x's numbers are cut in two: 256 high + low, high signed, low not.
#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool kHalves = true;
constexpr bool kLifts = !kBytes;  // codes of 8 bits are taken as signed ones, 128 less, against the high halves
static inline I dot_high(I acc, I w, I x) {  // w below 128, or lifted
  if constexpr (kBytes) return dot_bytes(acc, w, x);
  int32x4_t a[2];
  int8x16_t b[2], c[2];
  std::memcpy(a, &acc, sizeof a);
  std::memcpy(b, &w, sizeof b);
  std::memcpy(c, &x, sizeof c);
  for (int i = 0; i < 2; i++) a[i] = vdotq_s32(a[i], b[i], c[i]);
  std::memcpy(&acc, a, sizeof a);
  return acc;
}
static inline I dot_low(I acc, I w, I x) {
  uint32x4_t a[2];
  uint8x16_t b[2], c[2];
  std::memcpy(a, &acc, sizeof a);
  std::memcpy(b, &w, sizeof b);
  std::memcpy(c, &x, sizeof c);
  for (int i = 0; i < 2; i++) a[i] = vdotq_u32(a[i], b[i], c[i]);
  std::memcpy(&acc, a, sizeof a);
  return acc;
}
#else
constexpr bool kHalves = false, kLifts = false;
static inline I dot_high(I acc, I, I) { return acc; }  // never called, like the next
static inline I dot_low(I acc, I, I) { return acc; }
#endif
// fp4 codes, one in each byte, to 2 w + 12
static inline I fp4_bytes(I codes) {
#if defined(__AVX512F__)
  const __m128i t = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return (I)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), (__m512i)codes);
#elif defined(__AVX2__)
  const __m128i t = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return (I)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), (__m256i)codes);
#elif defined(ARRIERO_NEON)
  static const uint8_t t[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  uint8x16_t b[2];
  std::memcpy(b, &codes, sizeof b);
  for (uint8x16_t& c : b) c = vqtbl1q_u8(vld1q_u8(t), c);
  std::memcpy(&codes, b, sizeof b);
  return codes;
#else
  static const uint8_t t[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  uint8_t b[4 * L];
  std::memcpy(b, &codes, sizeof b);
  for (uint8_t& c : b) c = t[c];
  return read_codes(b);
#endif
}
// The low halves of the lanes of a pair of quads each: q0 q2, q1 q3, for every four lanes.
static inline void store_pairs(uint32_t* to, I q) {
#if defined(__AVX512F__)
  const __m256i w = _mm512_cvtepi32_epi16((__m512i)q);
  const __m256i swap = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7,
                                        8, 9, 12, 13, 10, 11, 14, 15);
  _mm256_storeu_si256((__m256i*)to, _mm256_shuffle_epi8(w, swap));
#else
  for (int i = 0; i < L; i += 4) {
    to[i / 2] = (uint32_t)(uint16_t)q[i] | (uint32_t)q[i + 2] << 16;
    to[i / 2 + 1] = (uint32_t)(uint16_t)q[i + 1] | (uint32_t)q[i + 3] << 16;
  }
#endif
}
static inline void store_quads(uint32_t* to, I q) {
#if defined(__AVX512F__)
  const __m128i b = _mm512_cvtepi32_epi8((__m512i)q);
  _mm_storeu_si128((__m128i*)to, b);
#else
  for (int i = 0; i < L; i += 4)
    to[i / 4] = (uint32_t)(uint8_t)q[i] | (uint32_t)(uint8_t)q[i + 1] << 8 | (uint32_t)(uint8_t)q[i + 2] << 16 |
                (uint32_t)q[i + 3] << 24;
#endif
}
// The high bytes of each quad, then the low ones.
static inline void store_halves(uint32_t* to, I q) {
  const I high = q >> 8;
  for (int i = 0; i < L; i += 4, to += 2) {
    to[0] = to[1] = 0;
    for (int b = 0; b < 4; b++) {
      to[0] |= (uint32_t)(uint8_t)high[i + b] << (8 * b);
      to[1] |= (uint32_t)(uint8_t)q[i + b] << (8 * b);
    }
  }
}
