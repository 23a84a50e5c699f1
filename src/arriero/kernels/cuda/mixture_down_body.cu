// The sum over a token's experts of their down matrices times what they have made of it, and what it is added to.
extern __shared__ char shared_[];
{
  using namespace arriero;
  const Bank banks_[2] = {{D_W, D_S, D_B, nullptr, D_BIAS, N_, 0, 1}, {OD_W, OD_S, OD_B, nullptr, nullptr, 0, 0, 1}};
  const void* residual_ = RESIDUAL;
  const float* weights_ = WEIGHTS;
  mixture<MODE, GROUP, K_, N_, PER, EXPERTS_, 1, DEPTH>(
      banks_, [&](int i) { return __ldg(chosen + i); }, [] {}, x_shape[0], shared_,
      [&](int line, int segment) { return (const bf16*)x + (size_t)(line * PER + segment) * K_; },
      [&](int line, int row) -> float {
        float more = residual_ ? number(__ldcg((const u16*)residual_ + (size_t)line * N_ + row)) : 0.f;
        if (weights_) {
#pragma unroll
          for (int i = 0; i < PER; ++i) {
            const u32 expert = __ldg(chosen + line * PER + i);
            if (expert != EXPERTS_) more += __ldg(weights_ + line * PER + i) * bias_of(banks_[0], false, expert, row);
          }
        }
        return more;
      },
      [&](int line, int row, const float* s, float more) {
        ((bf16*)out)[(size_t)line * N_ + row] = __float2bfloat16(s[0] + more);
      });
}
