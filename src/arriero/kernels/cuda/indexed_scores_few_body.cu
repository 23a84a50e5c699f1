// One query a group. Index keys of up to 8 rows lie in their caches, whole buffers `[1, 1, capacity, W]`: the key of a block
// is the row of its last token.
{
  using namespace arriero;
#if BUFFERED_ROWS == 1
  const bf16* const keys_[] = {(const bf16*)k0};
#else
  const bf16* const keys_[] = {(const bf16*)k0, (const bf16*)k1, (const bf16*)k2, (const bf16*)k3,
                               (const bf16*)k4, (const bf16*)k5, (const bf16*)k6, (const bf16*)k7};
#endif
  const Query query_ = ((const Query*)groups)[blockIdx.y];
  const Queries of_ = {query_.line, 1, query_.row, (query_.here + 1) / BLOCK_};
  const Side k_ = {keys_[query_.row] + (BLOCK_ - 1) * W_, 0, BLOCK_ * W_, 1};
  score<W_, H_, GROUPS, KEYS, true>((const bf16*)q + (size_t)query_.query * H_ * W_, k_, of_, (float*)TARGET,
                                    __int_as_float(SCALE_BITS));
}
