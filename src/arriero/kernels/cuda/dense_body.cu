// Few rows times a dense matrix in bfloat16, with the norm before it and what is added behind it.
extern __shared__ char shared_[];
{
  using namespace arriero;
  Dense dense_ = {};
  dense_.x = (const bf16*)x;
  dense_.gain = GAIN;
  dense_.w = (const bf16*)w;
  dense_.rows = x_shape[0];
  dense_.eps = __int_as_float(EPS_BITS);
  const u16* bias_ = (const u16*)BIAS;
  dense<N_, K_, ROWS, WIDE_GAIN>(dense_, shared_, [&](int m, int n, float sum) {
    ((bf16*)out)[(size_t)m * N_ + n] = __float2bfloat16(bias_ ? sum + number(__ldg(bias_ + n)) : sum);
  });
}
