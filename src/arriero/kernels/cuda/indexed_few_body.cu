// Keys and values of up to 8 rows, each the whole buffer `[1, HEADS, capacity, D_]` of a cache; results are gated.
extern __shared__ char shared_[];
{
  using namespace arriero;
#if BUFFERED_ROWS == 1
  const bf16* const keys_[] = {(const bf16*)k0};
  const bf16* const values_[] = {(const bf16*)v0};
#else
  const bf16* const keys_[] = {(const bf16*)k0, (const bf16*)k1, (const bf16*)k2, (const bf16*)k3,
                               (const bf16*)k4, (const bf16*)k5, (const bf16*)k6, (const bf16*)k7};
  const bf16* const values_[] = {(const bf16*)v0, (const bf16*)v1, (const bf16*)v2, (const bf16*)v3,
                                 (const bf16*)v4, (const bf16*)v5, (const bf16*)v6, (const bf16*)v7};
#endif
  const Query query_ = ((const Query*)queries)[blockIdx.z];
  const long head_ = (long)query_.capacity * D_;
  const Side k_ = {keys_[query_.row], head_, D_, 1}, v_ = {values_[query_.row], head_, D_, 1};
  read_listed<D_, HEADS, PER_HEAD, SPLITS, BLOCK_, WIDTH, GATES_, true>(
      (const bf16*)q, k_, v_, blocks, query_, (const bf16*)gates, parts, (u32*)arrived, (bf16*)out,
      __int_as_float(SCALE_BITS), shared_);
}
