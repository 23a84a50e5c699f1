// The buffers of up to 8 rows; MLX does not see that they are written.
extern __shared__ char shared_[];
{
  using arriero::bf16;
  bf16* const keys_[] = {EACH(bf16, k)};
  const arriero::Latent in_ = {(const bf16*)absorbed, absorbed_shape[1], (const bf16*)queries, (const bf16*)FRESH, angles,
                               gain, __int_as_float(EPS_BITS), __int_as_float(SCALE_BITS)};
  arriero::attend_latent<HEADS, RANK, ROTATED, NOPE, QUERY_WIDTH, FRESH_WIDTH, FRESH_FROM, SPLITS, INTERLEAVED, WIDE_GAIN>(
      in_, (const arriero::Group*)groups, keys_, (arriero::u32*)arrived, parts, (bf16*)out, shared_);
}
