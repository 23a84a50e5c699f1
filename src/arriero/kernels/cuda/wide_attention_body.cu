// The buffers of up to 8 rows; MLX does not see that they are written.
extern __shared__ char shared_[];
{
  using arriero::bf16;
  bf16* const keys_[] = {EACH(bf16, k)};
  bf16* const values_[] = {EACH(bf16, v)};
  arriero::attend_wide<D_, HEADS, PER_HEAD, TOKENS, SPLITS>((const bf16*)qkv, (const arriero::Group*)groups, keys_,
                                                           values_, (arriero::u32*)arrived, parts, (bf16*)out,
                                                           __int_as_float(SCALE_BITS), shared_);
}
