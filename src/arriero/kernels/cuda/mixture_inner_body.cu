// activation(gate) · up · weight for each pair of token and expert.
extern __shared__ char shared_[];
{
  using namespace arriero;
  const Bank banks_[4] = {{G_W, G_S, G_B, G_F, G_ROWS, 0},
                          {U_W, U_S, U_B, U_F, G_ROWS, U_FROM},
                          {OG_W, OG_S, OG_B, OG_F, 0, 0},
                          {OU_W, OU_S, OU_B, OU_F, 0, OU_FROM}};
  const float *downs_ = D_F, *one_down_ = OD_F;
  mixture<MODE, GROUP, K_, N_, 1, EXPERTS_, 2, DEPTH>(
      banks_, chosen, x_shape[0] * PER, shared_,
      [&](int line, int) { return (const bf16*)x + (size_t)(line / PER) * K_; },
      [&](int line, int row) -> float2 {
        const u32 expert = __ldg(chosen + line);
        const bool one = expert == EXPERTS_;
        const float* of = one ? one_down_ : downs_;
        const float down = of ? __ldg(of + (one ? 0u : expert)) : 1.f;
        const float gate = factor_of(banks_[one ? 2 : 0], one, expert, row);
        return make_float2(gate, factor_of(banks_[one ? 3 : 1], one, expert, row) * down * __ldg(weights + line));
      },
      [&](int line, int row, const float* s, float2 f) {
        ((bf16*)out)[(size_t)line * N_ + row] = __float2bfloat16(activate<ACTIVATION>(s[0] * f.x) * s[1] * f.y);
      });
}
