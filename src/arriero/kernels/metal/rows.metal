// Rows of a packed table, decoded: out[i] = factor * row ids[i] of w.
//
// w [rows, width * BITS / 32] holds values from the low bits up; scales, and biases of FORMAT 0, hold one number for GROUP
// values (formats.h); GROUP 0: the values have no scales. out [n, width] of O; ids of I, which may name rows twice.
// FACTOR: factors of float, 0 none, 1 one for all, 2 one for each row of the table. dims = width.
//
// A thread decodes eight values. Template: O, I, FORMAT, BITS, GROUP, FACTOR.
// Grid (width / 8, n, 1), threadgroup (up to 256, 1, 1).
//: inputs w scales biases ids factors dims
//: outputs out
//: include formats.h
//: body
  const int width = dims[0];
  const size_t part = thread_position_in_grid.x, line = thread_position_in_grid.y;
  const size_t row = I(ids[line]);
  float value[8];
  decode<FORMAT, BITS>(w, (row * (width / 8) + part) * (BITS / 4), value);
  float scale = 1.0f, offset = 0.0f;
  if (GROUP > 0) {
    const size_t place = row * (width / metal::max(GROUP, 1)) + part * 8 / metal::max(GROUP, 1);
    scale = scale_of<FORMAT>(scales[place]);
    if (FORMAT == 0) offset = float(biases[place]);
  }
  const float factor = FACTOR == 0 ? 1.0f : float(factors[FACTOR == 1 ? size_t(0) : row]);
  for (int i = 0; i < 8; ++i) out[line * width + part * 8 + i] = O((scale * value[i] + offset) * factor);
