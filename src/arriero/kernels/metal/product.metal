// y = x @ Wᵀ for a few rows of x and a quantised matrix in MLX's layout, times `factors`.
//
// x [rows, depth] and y [rows, columns] of T, dims = rows, columns, depth. w [columns, depth * BITS / 32] holds values
// from the low bits up; scales, and biases of FORMAT 0, hold one number for GROUP values.
// FORMAT 0: affine, scale * value + bias. 1: mxfp4, e2m1 with an e8m0 scale. 2: mxfp8, e4m3 with an e8m0 scale.
// 3: nvfp4, e2m1 with an e4m3 scale. FACTOR 0: no factor. 1: one for all. 2: one for each column.
//
// A simdgroup makes OUT columns of ROWS rows: a lane decodes eight values of a column once for all of these rows.
// Template: T, FORMAT, BITS, GROUP, FACTOR, ROWS, OUT, NSG.
// Grid (32 * NSG, ceil(columns / (OUT * NSG)), ceil(rows / ROWS)), threadgroup (32 * NSG, 1, 1).
//: inputs x w scales biases factors dims
//: outputs y
//: header
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
//: body
  constexpr int WORDS = BITS / 4;
  const int lane = thread_index_in_simdgroup;
  const int rows = dims[0], columns = dims[1], depth = dims[2];
  const int first = (threadgroup_position_in_grid.y * NSG + simdgroup_index_in_threadgroup) * OUT;
  const int top = threadgroup_position_in_grid.z * ROWS;
  if (first >= columns) return;  // a whole simdgroup
  const size_t words = size_t(depth / 8) * WORDS, groups = depth / GROUP;

  float sum[ROWS][OUT];
  for (int m = 0; m < ROWS; ++m)
    for (int r = 0; r < OUT; ++r) sum[m][r] = 0.0f;

  for (int k = lane * 8; k < depth; k += 256) {
    float given[ROWS][8], whole[ROWS];
    for (int m = 0; m < ROWS; ++m) {
      const size_t from = size_t(metal::min(top + m, rows - 1)) * depth + k;
      whole[m] = 0.0f;
      for (int i = 0; i < 8; ++i) {
        given[m][i] = float(x[from + i]);
        whole[m] += given[m][i];
      }
    }
    for (int r = 0; r < OUT; ++r) {
      const size_t column = metal::min(first + r, columns - 1);
      const size_t at = column * words + size_t(k / 8) * WORDS;
      float weight[8];
      for (int n = 0; n < WORDS; ++n) {
        const uint word = w[at + n];
        for (int i = 0; i < 32 / BITS; ++i) {
          const uint code = (word >> (BITS * i)) & ((1u << BITS) - 1u);
          weight[n * (32 / BITS) + i] = FORMAT == 0 ? float(code) : FORMAT == 2 ? e4m3(code) : e2m1(code);
        }
      }
      const size_t place = column * groups + k / GROUP;
      const float scale = scale_of<FORMAT>(scales[place]);
      const float bias = FORMAT == 0 ? float(biases[place]) : 0.0f;
      for (int m = 0; m < ROWS; ++m) {
        float dot = 0.0f;
        for (int i = 0; i < 8; ++i) dot = metal::fma(given[m][i], weight[i], dot);
        sum[m][r] = metal::fma(scale, dot, sum[m][r]);
        if (FORMAT == 0) sum[m][r] = metal::fma(bias, whole[m], sum[m][r]);
      }
    }
  }

  for (int r = 0; r < OUT; ++r) {
    const int column = first + r;
    const float factor = FACTOR == 0 ? 1.0f : float(factors[FACTOR == 1 ? 0 : metal::min(column, columns - 1)]);
    for (int m = 0; m < ROWS; ++m) {
      const float made = simd_sum(sum[m][r]);
      if (lane == 0 && column < columns && top + m < rows) y[size_t(top + m) * columns + column] = T(made * factor);
    }
  }
