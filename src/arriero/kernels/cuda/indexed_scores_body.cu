// Index keys of up to 8 rows, each `[keys, W]` of any strides.
{
  using namespace arriero;
#define SIDE(x) {(const bf16*)x, 0, (long)x##_strides[0], (long)x##_strides[1]}
#if BUFFERED_ROWS == 1
  // k0_strides
  const Side keys_[] = {SIDE(k0)};
#else
  // k1_strides k2_strides k3_strides k4_strides k5_strides k6_strides k7_strides
  const Side keys_[] = {SIDE(k0), SIDE(k1), SIDE(k2), SIDE(k3), SIDE(k4), SIDE(k5), SIDE(k6), SIDE(k7)};
#endif
#undef SIDE
  const Queries of_ = ((const Queries*)groups)[blockIdx.y];
  const bf16* lines_ = (const bf16*)q + (size_t)of_.first * H_ * W_;
  const Side k_ = keys_[of_.row];
  const float scale_ = __int_as_float(SCALE_BITS);
  if (k_.plain()) score<W_, H_, GROUPS, KEYS, true>(lines_, k_, of_, (float*)TARGET, scale_);
  else score<W_, H_, GROUPS, KEYS, false>(lines_, k_, of_, (float*)TARGET, scale_);
}
