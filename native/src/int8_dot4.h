// The micro-kernel over products of four bytes: c[R][kCols] += the groups' dot products. Included after `Ints`,
// `spread`, `codes_at`, `to_float` and either `dot` or `dot_pairs` and `settle` are defined.
//
// Without a four-byte product (kDirect false) two sums of pairs are added in 16 bits, for which codes up to 64 leave
// room. Longer runs were slower.
template <int R, int MOST>
static inline void micro_int8(const int8_t* a, size_t lda, const float* xs, const float* xq, size_t lds,
                              const uint8_t* b, const float* sw, const float* bw, int groups, int group, float* c) {
  static_assert(kDirect || 2 * 2 * 127 * MOST <= 32767);
  constexpr int run = kDirect ? 4 : 2;
  const int k4 = group / 4;
  for (int h = 0; h < kCols; h += kBlock * L) {
    V t[R][kBlock];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int n = 0; n < kBlock; n++) t[r][n] = load<F32>(c + r * kCols + h, n * L);
    const uint8_t* bh = b + h * 4;
    const int8_t* ag = a;
    for (int g = 0; g < groups; g++, ag += group) {
      Ints acc[R][kBlock];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int n = 0; n < kBlock; n++) acc[r][n] = no_ints();
      for (int k = 0; k < k4; k += run) {
        Ints part[R][kBlock];
#pragma GCC unroll 8
        for (int u = 0; u < run; u++, bh += kCols * 4) {
          Ints w[kBlock];
#pragma GCC unroll 2
          for (int n = 0; n < kBlock; n++) w[n] = codes_at(bh + n * L * 4);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) {
            int v;
            std::memcpy(&v, ag + r * lda + 4 * (k + u), 4);
            const Ints x = spread(v);
#pragma GCC unroll 2
            for (int n = 0; n < kBlock; n++) {
              if constexpr (kDirect) acc[r][n] = dot(acc[r][n], w[n], x);
              else part[r][n] = u == 0 ? dot_pairs(w[n], x) : add16(part[r][n], dot_pairs(w[n], x));
            }
          }
        }
        if constexpr (!kDirect)
#pragma GCC unroll 8
          for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int n = 0; n < kBlock; n++) acc[r][n] = settle(acc[r][n], part[r][n]);
      }
#pragma GCC unroll 2
      for (int n = 0; n < kBlock; n++) {
        const V s0 = load<F32>(sw + g * kCols + h, n * L), z0 = load<F32>(bw + g * kCols + h, n * L);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const V s = splat(xs[r * lds + g]), q = splat(xq[r * lds + g]);
          t[r][n] = fma(ints_to_float(acc[r][n]), mul(s, s0), t[r][n]);
          t[r][n] = fma(q, z0, t[r][n]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int n = 0; n < kBlock; n++) store<F32>(c + r * kCols + h, n * L, t[r][n]);
  }
}
