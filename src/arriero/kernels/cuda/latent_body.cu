// The buffers of up to 8 rows; MLX does not see that they are written.
extern __shared__ char shared_[];
{
  using namespace arriero;
  bf16* const keys_[] = {EACH(bf16, k)};
  const Latent in_ = {(const bf16*)absorbed, absorbed_shape[1], (const bf16*)queries, (const bf16*)FRESH, angles,
                      gain, __int_as_float(EPS_BITS), __int_as_float(SCALE_BITS)};
  const int split_ = blockIdx.x % SPLITS, place_ = blockIdx.x / SPLITS, line0_ = place_ % BLOCKS * LINES;
  const Group group_ = ((const Group*)groups)[place_ / BLOCKS];
  float* mine_ = parts + (size_t)place_ * SPLITS * LINES * (RANK + 4);
  Gathering all_((void*)gathered, 1);
  if (phase(0))
    attend_latent<HEADS, RANK, ROTATED, NOPE, QUERY_WIDTH, FRESH_WIDTH, FRESH_FROM, SPLITS, BUFFERS, INTERLEAVED, WIDE_GAIN>(
        in_, group_, keys_[group_.row], mine_, split_, line0_, shared_);
  if (SPLITS > 1) all_.arrive();
  if (phase(1)) {
    if (SPLITS > 1) all_.wait();
    else __syncthreads();
    combine_latent<HEADS, RANK, SPLITS>(group_, mine_, (bf16*)out, split_, line0_, shared_);
  }
}
