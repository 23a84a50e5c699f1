extern __shared__ char shared_[];
{
  arriero::Dense dense_ = {};
  dense_.x = (const arriero::bf16*)x;
  dense_.gain = GAIN;
  dense_.w = (const arriero::bf16*)w;
  dense_.rows = x_shape[0];
  dense_.eps = __int_as_float(EPS_BITS);
  arriero::dense<N_, K_, ROWS, WIDE_GAIN>(dense_, shared_, [&](int m, int n, float sum) {
    ((arriero::bf16*)out)[m * N_ + n] = __float2bfloat16(sum);
  });
}
