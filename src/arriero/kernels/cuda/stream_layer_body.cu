// layer_body.cu for matrices in NVFP4: the weights of what follows are on their way all the time.
extern __shared__ char shared_[];
{
  using namespace arriero;
  Gathering all_((void*)gathered, 1 + WITH_OUT + WITH_QKV);
  Ring<PLACES> ring_(shared_);
  const int rows_ = h_shape[0];
  char* rest_ = shared_ + THREADS / 32 * PLACES * Piece::BYTES;
  Pieces<GU_N, GU_K, GU_TILES, true> gu_(gu_w, gu_scales);
  Pieces<D_N, D_K, D_TILES, false> d_(d_w, d_scales);
#if WITH_QKV
  Pieces<Q_N, Q_K, Q_TILES, false> q_(q_w, q_scales);
#else
  NoPieces q_;
#endif
  NoPieces none_;
#if WITH_OUT
  if (phase(0)) {
    Pieces<O_N, O_K, O_TILES, false> o_(o_w, o_scales);
    Extras extra_ = {nullptr, nullptr, nullptr, O_FACTORS, O_BIAS};
    stream<O_N, O_K, O_TILES, false, ROWS, O_STAGED, O_SUMS, PLAIN, false, false>(
        (const bf16*)y, o_, gu_, extra_, (bf16*)branch, rows_, 0.f, ring_, rest_, Written());
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
    stream<GU_N, GU_K, GU_TILES, true, ROWS, GU_STAGED, GU_SUMS, ACTIVATION, true, WIDE_GAIN>(
        (const bf16*)h, gu_, d_, extra_, (bf16*)inner, rows_, __int_as_float(EPS_BITS), ring_, rest_, first_);
  }
  all_.arrive();
  if (phase(2)) {
    Extras extra_ = {nullptr, nullptr, nullptr, D_FACTORS, D_BIAS, total};
    stream<D_N, D_K, D_TILES, false, ROWS, D_STAGED, D_SUMS, PLAIN, false, false>(
        (const bf16*)inner, d_, q_, extra_, (bf16*)next, rows_, 0.f, ring_, rest_, all_);
  }
#if WITH_QKV
  all_.arrive();
  if (phase(3)) {
    Extras extra_ = {nullptr, nullptr, q_gain, Q_FACTORS, Q_BIAS};
    stream<Q_N, Q_K, Q_TILES, false, ROWS, Q_STAGED, Q_SUMS, PLAIN, true, WIDE_GAIN>(
        (const bf16*)next, q_, none_, extra_, (bf16*)qkv, rows_, __int_as_float(Q_EPS_BITS), ring_, rest_, all_);
  }
#endif
}
