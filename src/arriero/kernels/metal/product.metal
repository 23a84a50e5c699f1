// y = norm(x + branch) @ Wᵀ for a few rows of x and a quantised matrix in MLX's layout, and what may follow at once.
//
// x [rows, depth] and y [rows, columns] of T; dims = rows, columns, depth, and how many pairs share a row of x.
// w [columns, depth * BITS / 32] holds values from the low bits up; scales, and biases of FORMAT 0, hold one number for
// GROUP values (formats.h).
// BRANCH: branch [rows, depth] is added to x first, and the sum is also written to total [rows, depth].
// NORM 1, 2: x times gain [depth] (of T, of float), divided by its root mean square; knobs = what is added to the mean.
// FACTOR multiplies the result: 0 none, 1 one for all, 2 one for each row of W, 3 one for each expert.
// BIAS: plus bias, one for each row of W.
// ACT 1, 2: W [2 * columns, depth] holds the rows of gate, then those of up, and y = silu(gate) * up, gelu_tanh(gate) * up.
// RESIDUAL: plus residual [rows, columns].
// EXPERTS: W is one of several: y [pairs, columns], of pair p with row p / dims[3] of x and matrix chosen[p].
//
// A simdgroup makes OUT columns of ROWS rows: a lane decodes eight values of a column once for all of these rows. Every
// simdgroup reads all of x, so it sums the squares of a norm on the way.
// Template: T, FORMAT, BITS, GROUP, FACTOR, ROWS, OUT, NSG, NORM, ACT, BRANCH, BIAS, RESIDUAL, EXPERTS.
// Grid (32 * NSG, ceil(columns / (OUT * NSG)), ceil(rows / ROWS) or pairs), threadgroup (32 * NSG, 1, 1).
//: inputs x w scales biases factors branch gain bias residual chosen dims knobs
//: outputs y total
//: include formats.h gates.h
//: body
  constexpr int WORDS = BITS / 4, PARTS = ACT == 0 ? 1 : 2, SUMS = OUT * PARTS;
  const int lane = thread_index_in_simdgroup;
  const int rows = dims[0], columns = dims[1], depth = dims[2];
  const int first = (threadgroup_position_in_grid.y * NSG + simdgroup_index_in_threadgroup) * OUT;
  const int turn = threadgroup_position_in_grid.z;
  const int top = EXPERTS ? turn / dims[3] : turn * ROWS;
  if (first >= columns) return;  // a whole simdgroup
  const int expert = EXPERTS ? int(chosen[turn]) : 0;
  const size_t words = size_t(depth / 8) * WORDS, groups = depth / GROUP, bank = size_t(expert) * columns * PARTS;
  if (!BRANCH && first == 0 && turn == 0 && lane == 0) total[0] = T(0.0f);

  float sum[ROWS][SUMS], squares[ROWS];
  for (int m = 0; m < ROWS; ++m) {
    squares[m] = 0.0f;
    for (int r = 0; r < SUMS; ++r) sum[m][r] = 0.0f;
  }

  for (int k = lane * 8; k < depth; k += 256) {
    float given[ROWS][8], whole[ROWS];
    for (int m = 0; m < ROWS; ++m) {
      const size_t from = size_t(metal::min(top + m, rows - 1)) * depth + k;
      whole[m] = 0.0f;
      for (int i = 0; i < 8; ++i) {
        given[m][i] = float(x[from + i]);
        if (BRANCH) {
          const T both = T(given[m][i] + float(branch[from + i]));
          if (first == 0) total[from + i] = both;
          given[m][i] = float(both);
        }
        if (NORM) {
          squares[m] = metal::fma(given[m][i], given[m][i], squares[m]);
          given[m][i] *= float(gain[k + i]);
        }
        whole[m] += given[m][i];
      }
    }
    for (int r = 0; r < SUMS; ++r) {
      const size_t column = metal::min(first + r / PARTS, columns - 1);
      const size_t row = bank + (r % PARTS) * columns + column;
      float weight[8];
      decode<FORMAT, BITS>(w, row * words + size_t(k / 8) * WORDS, weight);
      const size_t place = row * groups + k / GROUP;
      const float scale = scale_of<FORMAT>(scales[place]);
      const float offset = FORMAT == 0 ? float(biases[place]) : 0.0f;
      for (int m = 0; m < ROWS; ++m) {
        float dot = 0.0f;
        for (int i = 0; i < 8; ++i) dot = metal::fma(given[m][i], weight[i], dot);
        sum[m][r] = metal::fma(scale, dot, sum[m][r]);
        if (FORMAT == 0) sum[m][r] = metal::fma(offset, whole[m], sum[m][r]);
      }
    }
  }

  for (int m = 0; m < ROWS; ++m) {
    const float length = NORM ? metal::rsqrt(simd_sum(squares[m]) / float(depth) + knobs[0]) : 1.0f;
    for (int r = 0; r < OUT; ++r) {
      const int column = first + r;
      float made[PARTS];
      for (int p = 0; p < PARTS; ++p) {
        const size_t row = p * columns + metal::min(column, columns - 1);
        const size_t at = FACTOR == 1 ? size_t(0) : FACTOR == 2 ? row : size_t(expert);
        made[p] = simd_sum(sum[m][r * PARTS + p]) * length;
        if (FACTOR) made[p] *= float(factors[at]);
        if (BIAS) made[p] += float(bias[row]);
      }
      if (lane > 0 || column >= columns || (!EXPERTS && top + m >= rows)) continue;
      const size_t to = size_t(EXPERTS ? turn : top + m) * columns + column;
      float one = ACT == 1 ? silu(made[0]) : ACT == 2 ? gelu_tanh(made[0]) : made[0];
      if (ACT) one *= made[PARTS - 1];
      if (RESIDUAL) one += float(residual[to]);
      y[to] = T(one);
    }
  }
