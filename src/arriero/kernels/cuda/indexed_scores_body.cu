// Index keys of up to 8 rows of any strides: `[keys, W]` each, or BY_QUERY the cache `[1, 1, tokens, W]` that they are in.
{
  using namespace arriero;
#if BY_QUERY
#define SIDE(x) {(const bf16*)x, 0, (long)x##_strides[2], (long)x##_strides[3]}
#else
#define SIDE(x) {(const bf16*)x, 0, (long)x##_strides[0], (long)x##_strides[1]}
#endif
#if BUFFERED_ROWS == 1
  // k0_strides
  const Side keys_[] = {SIDE(k0)};
#else
  // k1_strides k2_strides k3_strides k4_strides k5_strides k6_strides k7_strides
  const Side keys_[] = {SIDE(k0), SIDE(k1), SIDE(k2), SIDE(k3), SIDE(k4), SIDE(k5), SIDE(k6), SIDE(k7)};
#endif
#undef SIDE
#if BY_QUERY
  // One query a group, numbered from the launch's first line; its row's keys lie between the rows of a cache.
  const Query query_ = ((const Query*)groups)[blockIdx.y];
  const Queries of_ = {query_.line, 1, query_.row, (query_.here + 1) / BLOCK_};
  const bf16* lines_ = (const bf16*)q + (size_t)query_.query * H_ * W_;
  Side k_ = keys_[of_.row];
  k_.at += (BLOCK_ - 1) * k_.key;
  k_.key *= BLOCK_;
#else
  const Queries of_ = ((const Queries*)groups)[blockIdx.y];
  const bf16* lines_ = (const bf16*)q + (size_t)of_.first * H_ * W_;
  const Side k_ = keys_[of_.row];
#endif
  const float scale_ = __int_as_float(SCALE_BITS);
  if (k_.plain()) score<W_, H_, GROUPS, KEYS, true>(lines_, k_, of_, scores, scale_);
  else score<W_, H_, GROUPS, KEYS, false>(lines_, k_, of_, scores, scale_);
}
