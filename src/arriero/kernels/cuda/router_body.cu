// The sum and the norm in front of a mixture of experts, its router, the experts of each token and their weights: the
// last block to arrive chooses. `more` is the row of the gate of what every token takes, whose weight is its sigmoid.
extern __shared__ char shared_[];
{
  using namespace arriero;
  constexpr int ALL = EXPERTS_ + (ONE_ == GATED), PER = TOP + (ONE_ != NO_ONE);
  __shared__ bool last_;
  const int rows = x_shape[0];
  Dense dense_ = {};
  dense_.x = (const bf16*)x;
  dense_.branch = (const bf16*)BRANCH;
  dense_.gain = GAIN;
  dense_.w = (const bf16*)w;
  dense_.more = (const bf16*)MORE;
  dense_.sum = (bf16*)SUM;
  dense_.normed = (bf16*)NORMED;
  dense_.rows = rows;
  dense_.eps = __int_as_float(EPS_BITS);
  const u16* bias_ = (const u16*)BIAS;
  dense<ALL, K_, ROWS, WIDE_GAIN>(dense_, shared_, [&](int m, int n, float sum) {
    __stcg(scores + m * ALL + n, bias_ && n < EXPERTS_ ? sum + number(__ldg(bias_ + n)) : sum);
  });
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last_ = atomicAdd((u32*)arrived, 1u) == gridDim.x - 1;
  __syncthreads();
  if (last_) {
    __threadfence();
    for (int m = threadIdx.x >> 5; m < rows; m += THREADS / 32) {
      choose<EXPERTS_, TOP, ONE_, NORMALISE, SIGMOID, GROUPS, TOP_GROUPS>(
          scores + m * ALL, (const float*)CORRECTION, __int_as_float(SCALE_BITS), [&](int k, u32 expert, float weight) {
            chosen[m * PER + k] = expert;
            weights[m * PER + k] = weight;
          });
    }
    if (threadIdx.x == 0) *(u32*)arrived = 0;
  }
}
