// The buffers of up to 8 rows; MLX does not see that they are written.
extern __shared__ char shared_[];
{
  using arriero::bf16;
#if BUFFERED_ROWS == 1
  bf16* const keys_[] = {(bf16*)k0};
  bf16* const values_[] = {(bf16*)v0};
#else
  bf16* const keys_[] = {(bf16*)k0, (bf16*)k1, (bf16*)k2, (bf16*)k3, (bf16*)k4, (bf16*)k5, (bf16*)k6, (bf16*)k7};
  bf16* const values_[] = {(bf16*)v0, (bf16*)v1, (bf16*)v2, (bf16*)v3, (bf16*)v4, (bf16*)v5, (bf16*)v6, (bf16*)v7};
#endif
  arriero::attend<D_, HEADS, PER_HEAD, TOKENS, SPLITS, WINDOW, CAPPED, NORM_Q, NORM_K, WIDE_GAIN, ROTATE, ALL_NEW>(
      (const bf16*)qkv, ANGLES, (const arriero::Group*)groups, Q_GAIN, K_GAIN, SINKS, keys_, values_,
      (arriero::u32*)arrived, parts, (bf16*)out, __int_as_float(SCALE_BITS), __int_as_float(CAP_BITS), __int_as_float(Q_EPS_BITS),
      __int_as_float(K_EPS_BITS), shared_);
}
