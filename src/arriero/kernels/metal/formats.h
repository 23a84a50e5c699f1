// Numbers of packed matrices. FORMAT 0: affine, scale * value + bias. 1: mxfp4, e2m1 with an e8m0 scale. 2: mxfp8, e4m3
// with an e8m0 scale. 3: nvfp4, e2m1 with an e4m3 scale.
//
// 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives: the exponent and the fraction of a half, brought up.
inline float e2m1(uint code) {
  const float value = float(as_type<half>(ushort((code & 7u) << 9))) * 16384.0f;
  return (code & 8u) ? -value : value;
}
inline float e4m3(uint code) {
  const float value = float(as_type<half>(ushort((code & 127u) << 7))) * 256.0f;
  return (code & 128u) ? -value : value;
}
inline float e8m0(uint code) { return as_type<float>(code == 0u ? 0x00400000u : code << 23); }
template <int FORMAT, typename S> inline float scale_of(S code) {
  return FORMAT == 0 ? float(code) : FORMAT == 3 ? e4m3(uint(float(code))) : e8m0(uint(float(code)));
}
template <int FORMAT> inline float value_of(uint code) {
  return FORMAT == 0 ? float(code) : FORMAT == 2 ? e4m3(code) : e2m1(code);
}
// Eight values of a row from word `at` on.
template <int FORMAT, int BITS, typename WORDS> inline void decode(WORDS words, size_t at, thread float* value) {
  constexpr int EACH = 32 / BITS;
  for (int n = 0; n < 8 / EACH; ++n) {
    const uint word = words[at + n];
    for (int i = 0; i < EACH; ++i) value[n * EACH + i] = value_of<FORMAT>((word >> (BITS * i)) & ((1u << BITS) - 1u));
  }
}
