// The gated delta rule over spans of equal length, token by token, with their states after some of the tokens.
//
// For each value head with state S [DV, DK] and key head head / (HV / HK): S <- exp(g) S, S <- S + beta (v - S k) kᵀ,
// y = S q, where k is divided by its length, q by its length and by sqrt(DK), g = -rate * softplus(a + bias) and
// beta = sigmoid(b). q, k [spans * L, HK, DK], v and y [spans * L, HV, DV], a, b [spans * L, HV], rate, bias [HV],
// states [spans, HV, DV, DK], kept [dims[1], spans, HV, DV, DK]: states after stops[i] tokens, which rise.
// dims = L, stops. knobs: what is added to a sum of squares.
//
// A simdgroup keeps one row of one state, a 32nd of it in each lane, and goes through the span's tokens.
// Template: T, DK, DV, HK, HV. Grid (32, DV, spans * HV), threadgroup (32, 4, 1).
//: inputs q k v a b rate bias states stops dims knobs
//: outputs y kept
//: include gates.h
//: header
inline float softplus(float x) {
  // log(1 + e) by its quotient with what was added indeed, which keeps it exact where e is small.
  const float e = metal::exp(-metal::abs(x)), one = 1.0f + e;
  return metal::max(x, 0.0f) + (one == 1.0f ? e : metal::log(one) * e / (one - 1.0f));
}
//: body
  constexpr int PER = (DK + 31) / 32;
  const int lane = thread_index_in_simdgroup;
  const int row = thread_position_in_grid.y;
  const int head = threadgroup_position_in_grid.z % HV, span = threadgroup_position_in_grid.z / HV;
  const int spans = threadgroups_per_grid.z / HV;
  const int key_head = head / (HV / HK);
  const int tokens = dims[0];
  // Where 32 does not divide DK, the last lanes hold less.
  const int own = metal::clamp(DK - lane * PER, 0, PER);
  const size_t place = (size_t(span * HV + head) * DV + row) * DK + lane * PER;
  const size_t whole = size_t(spans) * HV * DV * DK;

  float state[PER];
  for (int i = 0; i < PER; ++i) state[i] = i < own ? float(states[place + i]) : 0.0f;

  int next = 0;
  for (int t = 0; t < tokens; ++t) {
    const int token = span * tokens + t;
    const size_t from = (size_t(token) * HK + key_head) * DK + lane * PER;
    float query[PER], key[PER], query_length = 0.0f, key_length = 0.0f;
    for (int i = 0; i < PER; ++i) {
      query[i] = i < own ? float(q[from + i]) : 0.0f;
      key[i] = i < own ? float(k[from + i]) : 0.0f;
      query_length += query[i] * query[i];
      key_length += key[i] * key[i];
    }
    const float query_scale = metal::rsqrt(simd_sum(query_length) + knobs[0]) * metal::rsqrt(float(DK));
    const float key_scale = metal::rsqrt(simd_sum(key_length) + knobs[0]);
    const int gate = token * HV + head;
    const float decay = metal::exp(-float(rate[head]) * softplus(float(a[gate]) + float(bias[head])));

    float read = 0.0f;
    for (int i = 0; i < PER; ++i) {
      key[i] *= key_scale;
      state[i] *= decay;
      read += state[i] * key[i];
    }
    const size_t at = size_t(gate) * DV + row;
    const float change = sigmoid(float(b[gate])) * (float(v[at]) - simd_sum(read));
    float made = 0.0f;
    for (int i = 0; i < PER; ++i) {
      state[i] += change * key[i];
      made += state[i] * (query[i] * query_scale);
    }
    made = simd_sum(made);
    if (lane == 0) y[at] = T(made);
    if (next < dims[1] && t + 1 == stops[next]) {
      for (int i = 0; i < own; ++i) kept[next * whole + place + i] = state[i];
      ++next;
    }
  }
