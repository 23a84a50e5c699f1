// A block of rows of `tiles`, and the columns of blockIdx.x. Banks: `w` [experts, COLUMNS_, K_ / 2]; gate's rows lie before
// up's in one bank, or UP is a bank of its own.
extern __shared__ char shared_[];
{
  using namespace arriero;
  const Rows of_ = ((const Rows*)tiles)[blockIdx.y];
  if (of_.count <= 0) return;
  const u8 *up_ = (const u8*)UP, *up_scales_ = (const u8*)UP_SCALES;
  if (JOINED) up_ = (const u8*)w + (size_t)COLUMNS_OUT * (K_ / 2), up_scales_ = (const u8*)scales + (size_t)COLUMNS_OUT * (K_ / 16);
  const float factor_ = ((const float*)FACTORS) ? ((const float*)FACTORS)[of_.expert] : 1.f;
  const float up_factor_ = JOINED ? factor_ : ((const float*)UP_FACTORS) ? ((const float*)UP_FACTORS)[of_.expert] : 1.f;
  group<K_, COLUMNS_, GATED, SPREAD>((const bf16*)x, order, of_, (const u8*)w, scales, up_, up_scales_, factor_, up_factor_,
                                     (bf16*)out, shared_);
}
