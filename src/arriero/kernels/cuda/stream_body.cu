// The arguments that a kernel has not are defined as null in front of this.
extern __shared__ char shared_[];
{
  using namespace arriero;
  Extras extra_ = {BRANCH, SUM, GAIN, FACTORS, BIAS, RESIDUAL};
  Ring<PLACES> ring_(shared_);
  Pieces<N_, K_, TILES, ACTIVATION != PLAIN> own_(w, scales);
  NoPieces none_;
  stream<N_, K_, TILES, ACTIVATION != PLAIN, ROWS, STAGED, SUMS, ACTIVATION, NORM, WIDE_GAIN>(
      (const bf16*)x, own_, none_, extra_, (bf16*)out, x_shape[0], __int_as_float(EPS_BITS), ring_,
      shared_ + THREADS / 32 * PLACES * Piece::BYTES, Written());
}
