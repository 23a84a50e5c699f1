// Heads, each divided by its root mean square and then rotated.
//
// x [tokens, heads, D] of T and any strides, y the same, contiguous. NORM: gain [D] of G; knobs = what is added to the
// mean of the squares. TURNED numbers of a head are rotated, 0 for none: table [tokens, TURNED / 2, 2] of float holds
// cosines and sines, and i goes with i + TURNED / 2, or 2 i with 2 i + 1 if INTERLEAVED. Rounded once, at the end.
//
// A simdgroup takes a head. Template: T, G, D, NORM, TURNED, INTERLEAVED.
// Grid (32, heads, tokens), threadgroup (32, up to 8, 1).
//: inputs x gain table knobs
//: outputs y
//: option ensure_row_contiguous=false
//: body
  const int lane = thread_index_in_simdgroup;
  const int head = thread_position_in_grid.y, token = thread_position_in_grid.z;
  const size_t from = token * x_strides[0] + head * x_strides[1];
  float length = 1.0f;
  if (NORM) {
    float squares = 0.0f;
    for (int d = lane; d < D; d += 32) {
      const float one = float(x[from + d * x_strides[2]]);
      squares = metal::fma(one, one, squares);
    }
    length = metal::rsqrt(simd_sum(squares) / float(D) + knobs[0]);
  }
  const size_t to = (size_t(token) * threads_per_grid.y + head) * D;
  for (int d = lane; d < D; d += 32) {
    float one = float(x[from + d * x_strides[2]]) * length;
    if (NORM) one *= float(G(gain[d]));
    if (d < TURNED) {
      constexpr int HALF = TURNED / 2;
      const bool low = INTERLEAVED ? d % 2 == 0 : d < HALF;
      const int other = INTERLEAVED ? (d ^ 1) : low ? d + HALF : d - HALF;
      const size_t turn = (size_t(token) * HALF + (INTERLEAVED ? d / 2 : low ? d : other)) * 2;
      float two = float(x[from + other * x_strides[2]]) * length;
      if (NORM) two *= float(G(gain[other]));
      one = low ? one * table[turn] - two * table[turn + 1] : one * table[turn] + two * table[turn + 1];
    }
    y[to + d] = T(one);
  }
