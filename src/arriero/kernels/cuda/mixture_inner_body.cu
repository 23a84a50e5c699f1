// activation(gate) · up · weight for each pair of token and expert.
extern __shared__ char shared_[];
{
  using namespace arriero;
  struct More {
    float gate, gate_bias, up, up_bias, weight;
  };
  const Bank banks_[4] = {{G_W, G_S, G_B, G_F, G_BIAS, G_ROWS, 0, STRIDE},
                          {U_W, U_S, U_B, U_F, U_BIAS, G_ROWS, U_FROM, STRIDE},
                          {OG_W, OG_S, OG_B, OG_F, nullptr, 0, 0, 1},
                          {OU_W, OU_S, OU_B, OU_F, nullptr, 0, OU_FROM, 1}};
  const float *downs_ = D_F, *one_down_ = OD_F;
  mixture<MODE, GROUP, K_, N_, 1, EXPERTS_, 2, DEPTH>(
      banks_, [&](int i) { return __ldg(chosen + i); }, [] {}, x_shape[0] * PER, shared_,
      [&](int line, int) { return (const bf16*)x + (size_t)(line / PER) * K_; },
      [&](int line, int row) -> More {
        const u32 expert = __ldg(chosen + line);
        const bool one = expert == EXPERTS_;
        const float* of = one ? one_down_ : downs_;
        const float down = of ? __ldg(of + (one ? 0u : expert)) : 1.f;
        const Bank gate = either(one, banks_[0], banks_[2]), up = either(one, banks_[1], banks_[3]);
        return {factor_of(gate, one, expert, row), bias_of(gate, one, expert, row), factor_of(up, one, expert, row),
                bias_of(up, one, expert, row), down * __ldg(weights + line)};
      },
      [&](int line, int row, const float* s, const More& f) {
        const float gate = s[0] * f.gate + f.gate_bias, up = s[1] * f.up + f.up_bias;
        const float made = CLAMPED ? clamped(gate, up, __int_as_float(ALPHA_BITS), __int_as_float(LIMIT_BITS))
                                   : activate<ACTIVATION>(gate) * up;
        ((bf16*)out)[(size_t)line * N_ + row] = __float2bfloat16(made * f.weight);
      });
}
