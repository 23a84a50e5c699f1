extern __shared__ char shared_[];
{
  using namespace arriero;
  // Patterns of 1,024 bytes want to be aligned to as many.
  char* aligned_ = shared_ + ((1024 - (shared_at(shared_) & 1023)) & 1023);
  prompt_product<MODE, GROUP, COLUMNS, GROUPS, STAGES, DEPTH, BATCH>((const char*)x, w, scales, BIASES, FACTORS, BIAS, RESIDUAL,
                                                              (bf16*)out, w_shape[0], x_shape[0] * STAGE, counted_shape[0],
                                                              x_shape[1], aligned_);
}
