// A mixture of experts of a few tokens with all that goes with it, in one launch whose blocks wait for one another between
// its parts: the sum and the norm before it, the router; the choice, which every block makes for itself, and gate, up and
// activation; down, whose first weights are on their way while the blocks wait. What may be missing is null.
extern __shared__ char shared_[];
{
  using namespace arriero;
  constexpr int ALL = EXPERTS_ + (ONE_ == GATED), PER = TOP + (ONE_ != NO_ONE);
  struct More {
    float gate, gate_bias, up, up_bias, weight;
  };
  __shared__ u32 chosen_[ROWS * PER];
  __shared__ float weights_[ROWS * PER];
  Gathering all_((void*)gathered, 2);
  const int rows_ = x_shape[0];
  const u16* bias_ = (const u16*)BIAS;
  if (phase(0)) {
    Dense dense_ = {};
    dense_.x = (const bf16*)x;
    dense_.branch = (const bf16*)BRANCH;
    dense_.gain = GAIN;
    dense_.w = (const bf16*)w;
    dense_.more = (const bf16*)MORE;
    dense_.sum = (bf16*)SUM;
    dense_.normed = (bf16*)NORMED;
    dense_.rows = rows_;
    dense_.eps = __int_as_float(EPS_BITS);
    dense<ALL, HIDDEN, ROWS, WIDE_GAIN>(dense_, shared_, [&](int m, int n, float sum) {
      __stcg(scores + m * ALL + n, bias_ && n < EXPERTS_ ? sum + number(__ldg(bias_ + n)) : sum);
    });
  }
  all_.arrive();
  const Bank gates_[4] = {{G_W, G_S, G_B, G_F, G_BIAS, G_ROWS, 0, STRIDE},
                          {U_W, U_S, U_B, U_F, U_BIAS, G_ROWS, U_FROM, STRIDE},
                          {OG_W, OG_S, OG_B, OG_F, nullptr, 0, 0, 1},
                          {OU_W, OU_S, OU_B, OU_F, nullptr, 0, OU_FROM, 1}};
  const Bank downs_[2] = {{D_W, D_S, D_B, D_F, D_BIAS, HIDDEN, 0, 1}, {OD_W, OD_S, OD_B, OD_F, nullptr, 0, 0, 1}};
  auto expert_of_ = [&](int i) { return chosen_[i]; };
  if (phase(1)) {
    all_.wait();
    for (int m = threadIdx.x / 32; m < rows_; m += THREADS / 32)
      choose<EXPERTS_, TOP, ONE_, NORMALISE, SIGMOID, GROUPS, TOP_GROUPS>(
          scores + m * ALL, (const float*)CORRECTION, __int_as_float(SCALE_BITS), [&](int k, u32 expert, float weight) {
            chosen_[m * PER + k] = expert;
            weights_[m * PER + k] = weight;
          });
    __syncthreads();
    const bf16* taken_ = (const bf16*)TAKEN;
    mixture<MODE, GROUP, HIDDEN, INNER, 1, EXPERTS_, 2, INNER_DEPTH>(
        gates_, expert_of_, [] {}, rows_ * PER, shared_,
        [&](int line, int) { return taken_ + (size_t)(line / PER) * HIDDEN; },
        [&](int line, int row) -> More {
          const u32 expert = chosen_[line];
          const bool one = expert == EXPERTS_;
          const float* of = one ? downs_[1].factors : downs_[0].factors;
          const float down = of ? __ldg(of + (one ? 0u : expert)) : 1.f;
          const Bank gate = either(one, gates_[0], gates_[2]), up = either(one, gates_[1], gates_[3]);
          return {factor_of(gate, one, expert, row), bias_of(gate, one, expert, row), factor_of(up, one, expert, row),
                  bias_of(up, one, expert, row), down * weights_[line]};
        },
        [&](int line, int row, const float* s, const More& f) {
          const float gate = s[0] * f.gate + f.gate_bias, up = s[1] * f.up + f.up_bias;
          const float made = CLAMPED ? clamped(gate, up, __int_as_float(ALPHA_BITS), __int_as_float(LIMIT_BITS))
                                     : activate<ACTIVATION>(gate) * up;
          ((bf16*)inner)[(size_t)line * INNER + row] = __float2bfloat16(made * f.weight);
        });
  }
  all_.arrive();
  if (phase(2)) {
    const bf16* residual_ = (const bf16*)SUM;
    mixture<MODE, GROUP, INNER, HIDDEN, PER, EXPERTS_, 1, DOWN_DEPTH>(
        downs_, expert_of_, [&] { all_.wait(); }, rows_, shared_,
        [&](int line, int segment) { return (const bf16*)inner + (size_t)(line * PER + segment) * INNER; },
        [&](int line, int row) -> float {
          float more = residual_ ? number(__ldcg((const u16*)residual_ + (size_t)line * HIDDEN + row)) : 0.f;
          if (downs_[0].bias) {
#pragma unroll
            for (int i = 0; i < PER; ++i) {
              const u32 expert = chosen_[line * PER + i];
              if (expert != EXPERTS_) more += weights_[line * PER + i] * bias_of(downs_[0], false, expert, row);
            }
          }
          return more;
        },
        [&](int line, int row, const float* s, float more) {
          ((bf16*)out)[(size_t)line * HIDDEN + row] = __float2bfloat16(s[0] + more);
        });
  }
}
