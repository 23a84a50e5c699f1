// A block of rows of `tiles`, and the columns of blockIdx.x. The rows of gate and up are in one bank or two.
extern __shared__ char shared_[];
{
  using namespace arriero;
  const Rows of_ = ((const Rows*)tiles)[blockIdx.y];
  if (of_.count <= 0) return;
  const Matrices first_ = {(const u8*)W_W, W_S, W_B, W_F, W_BIAS, 0, STRIDE};
  const Matrices second_ = {(const u8*)U_W, U_S, U_B, U_F, U_BIAS, U_FROM, STRIDE};
  group<MODE, GROUP, K_, COLUMNS_, COLUMNS_OUT, GATED, SPREAD>(
      (const bf16*)x, order, of_, first_, second_, (bf16*)out, shared_, [](float gate, float up) {
        return CLAMPED ? clamped(gate, up, __int_as_float(ALPHA_BITS), __int_as_float(LIMIT_BITS))
                       : activate<ACTIVATION>(gate) * up;
      });
}
