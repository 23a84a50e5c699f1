// Products that follow one another in a layer, in one launch whose blocks wait for one another between them: attention's
// output, gate and up, down, and the next layer's queries, keys and values. The first weights of each are on their way
// while the blocks wait. The arguments that a kernel has not are defined as null in front of this.
extern __shared__ char shared_[];
{
  using namespace arriero;
  Gathering all_((void*)gathered, 1 + WITH_OUT + WITH_QKV);
  const int rows_ = h_shape[0];
#if WITH_OUT
  if (phase(0)) {
    Extras extra_ = {nullptr, nullptr, nullptr, O_FACTORS, O_BIAS};
    product<O_MODE, O_GROUP, O_N, O_K, ROWS, PLAIN, O_DEPTH, O_TILES, O_BUFFERS, false, false, false, 1>(
        (const bf16*)y, o_w, o_scales, O_BIASES, extra_, (bf16*)branch, rows_, 0.f, shared_, Written());
  }
  all_.arrive();
  typedef Gathering First_;
  const First_& first_ = all_;
#else
  typedef Written First_;
  const First_ first_;
#endif
  if (phase(1)) {
    Extras extra_ = {branch, total, gain, GU_FACTORS, GU_BIAS};
    product<GU_MODE, GU_GROUP, GU_N, GU_K, ROWS, ACTIVATION, GU_DEPTH, GU_TILES, GU_BUFFERS, true, WIDE_GAIN, false, 1>(
        (const bf16*)h, gu_w, gu_scales, GU_BIASES, extra_, (bf16*)inner, rows_,
                      __int_as_float(EPS_BITS), shared_, first_);
  }
  all_.arrive();
  if (phase(2)) {
    Extras extra_ = {nullptr, nullptr, nullptr, D_FACTORS, D_BIAS, total};
    product<D_MODE, D_GROUP, D_N, D_K, ROWS, PLAIN, D_DEPTH, D_TILES, D_BUFFERS, false, false, false, 1>(
        (const bf16*)inner, d_w, d_scales, D_BIASES, extra_, (bf16*)next, rows_, 0.f, shared_, all_);
  }
#if WITH_QKV
  all_.arrive();
  if (phase(3)) {
    Extras extra_ = {nullptr, nullptr, q_gain, Q_FACTORS, Q_BIAS};
    product<Q_MODE, Q_GROUP, Q_N, Q_K, ROWS, PLAIN, Q_DEPTH, Q_TILES, Q_BUFFERS, true, WIDE_GAIN, false, 1>(
        (const bf16*)next, q_w, q_scales, Q_BIASES, extra_, (bf16*)qkv, rows_, __int_as_float(Q_EPS_BITS), shared_, all_);
  }
#endif
}
