// The states of up to 8 spans.
extern __shared__ char shared_[];
{
  const arriero::Span span_ = ((const arriero::Span*)table)[blockIdx.z];
  const float* const states_[] = {EACH(const float, s)};
  float* const ends_[] = {EACH(float, s_end)};
  arriero::Selective of_ = {};
  of_.x = x;
  of_.dt = (const char*)dt + DT_AT * (WIDE ? 4 : 2);
  of_.rate = rate;
  of_.bias = bias;
  of_.skip = skip;
  of_.y = y;
  of_.stops = (const int*)table;
  of_.state = states_[blockIdx.z];
  of_.state_end = ends_[blockIdx.z];
#ifdef STOPS
  float* const kept_[] = {EACH(float, s_kept)};
  of_.state_kept = kept_[blockIdx.z];
#endif
  of_.low = __int_as_float(LOW_BITS);
  of_.high = __int_as_float(HIGH_BITS);
  arriero::selective<P_, N_, H_, G_, ROWS, TILE, DT_WIDTH, WIDE>(of_, span_, shared_);
}
