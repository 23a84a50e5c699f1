// Keys and values of up to 8 rows, each `[1, key heads, keys, D]` of any strides.
extern __shared__ char shared_[];
{
  using namespace arriero;
#define SIDE(x) {(const bf16*)x, (long)x##_strides[1], (long)x##_strides[2], (long)x##_strides[3]}
#if BUFFERED_ROWS == 1
  // k0_strides v0_strides
  const Side keys_[] = {SIDE(k0)};
  const Side values_[] = {SIDE(v0)};
#else
  // k1_strides v1_strides k2_strides v2_strides k3_strides v3_strides k4_strides v4_strides
  // k5_strides v5_strides k6_strides v6_strides k7_strides v7_strides
  const Side keys_[] = {SIDE(k0), SIDE(k1), SIDE(k2), SIDE(k3), SIDE(k4), SIDE(k5), SIDE(k6), SIDE(k7)};
  const Side values_[] = {SIDE(v0), SIDE(v1), SIDE(v2), SIDE(v3), SIDE(v4), SIDE(v5), SIDE(v6), SIDE(v7)};
#endif
#undef SIDE
  const Query query_ = ((const Query*)queries)[blockIdx.z];
  const Side k_ = keys_[query_.row], v_ = values_[query_.row];
  const float scale_ = __int_as_float(SCALE_BITS);
#define READ(plain)                                                                                  \
  read_listed<D_, HEADS, PER_HEAD, SPLITS, BLOCK_, WIDTH, 0, plain>(                                 \
      (const bf16*)q, k_, v_, blocks, query_, nullptr, parts, (u32*)arrived, (bf16*)out, scale_, shared_)
  if (k_.plain() && v_.plain()) READ(true);
  else READ(false);
#undef READ
}
