// The states and tails of up to 8 spans. What a launch has not is a null pointer, or the first span's.
extern __shared__ char shared_[];
{
  using arriero::bf16;
  const arriero::Span span_ = ((const arriero::Span*)table)[blockIdx.z];
  const float* const states_[] = {EACH(const float, s)};
  float* const ends_[] = {EACH(float, s_end)};
  arriero::Delta delta_ = {};
  delta_.x = x;
#ifdef GATES
  delta_.b = (const char*)gates + B_AT * (WIDE ? 4 : 2);
  delta_.a = (const char*)gates + A_AT * (WIDE ? 4 : 2);
#else
  delta_.hidden = (const bf16*)hidden;
  delta_.hidden_gain = HIDDEN_GAIN;
  delta_.hidden_eps = __int_as_float(HIDDEN_EPS_BITS);
  delta_.w = (const bf16*)w;
#endif
  delta_.rate = rate;
  delta_.bias = bias;
  delta_.y = y;
  delta_.stops = (const int*)table;
  delta_.state = states_[blockIdx.z];
  delta_.state_end = ends_[blockIdx.z];
  delta_.eps = __int_as_float(EPS_BITS);
#ifdef TAILS
  const bf16* const tails_[] = {EACH(const bf16, t)};
  bf16* const tail_ends_[] = {EACH(bf16, t_end)};
  delta_.z = (const bf16*)x + Z_AT;
  delta_.taps = (const bf16*)taps;
  delta_.gain = gain;
  delta_.tail = tails_[blockIdx.z];
  delta_.tail_end = tail_ends_[blockIdx.z];
  delta_.norm_eps = __int_as_float(NORM_EPS_BITS);
#endif
#ifdef STOPS
  float* const kept_[] = {EACH(float, s_kept)};
  delta_.state_kept = kept_[blockIdx.z];
#ifdef TAILS
  bf16* const tails_kept_[] = {EACH(bf16, t_kept)};
  delta_.tail_kept = tails_kept_[blockIdx.z];
#endif
#endif
  arriero::delta<DK, DV, HK, HV, ROWS, TILE, TAPS, X_WIDTH, GATE_WIDTH, HIDDEN, WIDE_GAIN, READY, WIDE, SILU>(
      delta_, span_, shared_);
}
