// Eight float lanes in two NEON registers. Included inside the instruction set's anonymous namespace; every
// multiply-add is spelled out (the build forbids contraction). Orders of addition are those of simd_8.h.
struct V {
  float32x4_t a, b;
};
struct VI {
  int32x4_t a, b;
};
constexpr int L = 8;
#define ARRIERO_NEON

static inline V zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
static inline V splat(float f) { return {vdupq_n_f32(f), vdupq_n_f32(f)}; }
static inline V fma(V a, V b, V c) { return {vfmaq_f32(c.a, a.a, b.a), vfmaq_f32(c.b, a.b, b.b)}; }
static inline V add(V a, V b) { return {vaddq_f32(a.a, b.a), vaddq_f32(a.b, b.b)}; }
static inline V sub(V a, V b) { return {vsubq_f32(a.a, b.a), vsubq_f32(a.b, b.b)}; }
static inline V mul(V a, V b) { return {vmulq_f32(a.a, b.a), vmulq_f32(a.b, b.b)}; }
static inline V div(V a, V b) { return {vdivq_f32(a.a, b.a), vdivq_f32(a.b, b.b)}; }
static inline V pick(uint32x4_t ma, uint32x4_t mb, V a, V b) {
  return {vbslq_f32(ma, a.a, b.a), vbslq_f32(mb, a.b, b.b)};
}
// Where either is NaN the second comes out, as with the x86 instruction.
static inline V max(V a, V b) { return pick(vcgtq_f32(a.a, b.a), vcgtq_f32(a.b, b.b), a, b); }
static inline V min(V a, V b) { return pick(vcltq_f32(a.a, b.a), vcltq_f32(a.b, b.b), a, b); }
static inline VI to_int(V a) { return {vcvtnq_s32_f32(a.a), vcvtnq_s32_f32(a.b)}; }
static inline V round_even(V a) { return {vrndnq_f32(a.a), vrndnq_f32(a.b)}; }
static inline float32x4_t power(int32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
static inline V exp2i(V n) {
  const VI i = to_int(n);
  return {power(i.a), power(i.b)};
}
static inline V where_less(V a, V limit, V b, V c) {
  return pick(vcltq_f32(a.a, limit.a), vcltq_f32(a.b, limit.b), b, c);
}
static inline bool any_above(V a, V limit) {
  return vmaxvq_u32(vorrq_u32(vcgtq_f32(a.a, limit.a), vcgtq_f32(a.b, limit.b))) != 0;
}

template <class T>
static inline T read(const void* p) {
  T t;
  std::memcpy(&t, p, sizeof t);
  return t;
}
static inline V widen_bf16(uint16x8_t h) {
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(h, 16))};
}
static inline uint16x4_t narrow_bf16(float32x4_t f) {
  const uint32x4_t u = vreinterpretq_u32_f32(f), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  const uint32x4_t r = vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), odd), nan = vorrq_u32(u, vdupq_n_u32(64 << 16));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(f, f), r, nan), 16);
}
template <int T>
static inline V load(const void* p, size_t i) {
  if constexpr (T == F32) {
    const float* f = (const float*)p + i;
    return {read<float32x4_t>(f), read<float32x4_t>(f + 4)};
  }
  const uint16x8_t h = read<uint16x8_t>((const char*)p + 2 * i);
  if constexpr (T == BF16) return widen_bf16(h);
  const float16x8_t f = vreinterpretq_f16_u16(h);
  return {vcvt_f32_f16(vget_low_f16(f)), vcvt_high_f32_f16(f)};
}
template <int T>
static inline V load_part(const void* p, size_t i, int n) {
  if (n >= 8) return load<T>(p, i);
  unsigned char t[32] = {};
  std::memcpy(t, (const char*)p + i * bytes_of(T), (size_t)n * bytes_of(T));
  return load<T>(t, 0);
}
template <int T>
static inline void store(void* p, size_t i, V v) {
  if constexpr (T == F32) {
    std::memcpy((float*)p + i, &v.a, 16);
    std::memcpy((float*)p + i + 4, &v.b, 16);
    return;
  }
  uint16x8_t h;
  if constexpr (T == BF16) h = vcombine_u16(narrow_bf16(v.a), narrow_bf16(v.b));
  else h = vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(v.a), v.b));
  std::memcpy((char*)p + 2 * i, &h, 16);
}
template <int T>
static inline void store_part(void* p, size_t i, V v, int n) {
  if (n >= 8) return store<T>(p, i, v);
  unsigned char t[32];
  store<T>(t, 0, v);
  std::memcpy((char*)p + i * bytes_of(T), t, (size_t)n * bytes_of(T));
}

// The sums of four vectors' lanes; sum() adds in the same order.
static inline void sum4(V a, V b, V c, V d, float* out) {
  const float32x4_t ab = vpaddq_f32(vaddq_f32(a.a, a.b), vaddq_f32(b.a, b.b));
  const float32x4_t cd = vpaddq_f32(vaddq_f32(c.a, c.b), vaddq_f32(d.a, d.b));
  const float32x4_t r = vpaddq_f32(ab, cd);
  std::memcpy(out, &r, 16);
}
static inline float sum(V v) {
  const float32x4_t q = vaddq_f32(v.a, v.b), p = vpaddq_f32(q, q);
  return vgetq_lane_f32(vpaddq_f32(p, p), 0);
}
static inline float top(V v) {
  float f[8];
  store<F32>(f, 0, v);
  float m = f[0];
  for (int i = 1; i < 8; i++) m = f[i] > m ? f[i] : m;
  return m;
}
static inline void prefetch(const void* p) { __builtin_prefetch(p); }
static inline void split_pairs(V a, V b, V& even, V& odd) {
  even = {vuzp1q_f32(a.a, a.b), vuzp1q_f32(b.a, b.b)};
  odd = {vuzp2q_f32(a.a, a.b), vuzp2q_f32(b.a, b.b)};
}
static inline void join_pairs(V even, V odd, V& a, V& b) {
  a = {vzip1q_f32(even.a, odd.a), vzip2q_f32(even.a, odd.a)};
  b = {vzip1q_f32(even.b, odd.b), vzip2q_f32(even.b, odd.b)};
}

// ---- fp8 weights as floats
struct Ctx {
  V a;
};
// step gives the 32 weights whose codes start at w.
struct Fp8 {
  // through f16, whose exponent bias is 8 larger
  inline Ctx group(float scale) const { return {splat(scale * 256.f)}; }
  inline void step(const Ctx& c, const uint8_t* w, V (&v)[4]) const {
    for (int j = 0; j < 4; j++) {
      const uint16x8_t q = vmovl_u8(read<uint8x8_t>(w + j * 8));
      const uint16x8_t low = vshlq_n_u16(vandq_u16(q, vdupq_n_u16(0x7f)), 7);
      const uint16x8_t h = vorrq_u16(low, vshlq_n_u16(vandq_u16(q, vdupq_n_u16(0x80)), 8));
      v[j] = mul(load<F16>(&h, 0), c.a);
    }
  }
};
constexpr int kMR = 3;        // three rows of x, four of w: 24 of 32 registers accumulate
constexpr int kWideRows = 2;  // rows of w at once for three or four rows of x
