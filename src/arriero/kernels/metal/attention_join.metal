// Attention of which several threadgroups did a part each: their sums, brought to one largest score.
//
// parts [rows, dims[0], DV + 2] of float as attention.metal writes them; out [rows, DV].
// Template: T, DV. Grid (DV, rows, 1), threadgroup (DV, 1, 1).
//: inputs parts dims
//: outputs out
//: body
  const int count = dims[0];
  const size_t d = thread_position_in_grid.x, row = thread_position_in_grid.y;
  const size_t from = row * count * (DV + 2);
  float all = Limits<float>::finite_min;
  for (int n = 0; n < count; ++n) all = metal::max(all, parts[from + n * (DV + 2) + DV]);
  float made = 0.0f, weights = 0.0f;
  for (int n = 0; n < count; ++n) {
    const size_t at = from + n * (DV + 2);
    const float share = metal::exp(parts[at + DV] - all);
    made += share * parts[at + d];
    weights += share * parts[at + DV + 1];
  }
  out[row * DV + d] = T(weights == 0.0f ? 0.0f : made / weights);
