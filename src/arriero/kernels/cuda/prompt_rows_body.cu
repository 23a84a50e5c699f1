// Rows of x [count, K] in the order of prompt_product.cu, zeros behind the last one.
{
  using namespace arriero;
  const int K = x_shape[1], row = blockIdx.y, at = blockIdx.x * THREADS + threadIdx.x;
  uint4 v = make_uint4(0, 0, 0, 0);
  if (row < x_shape[0] && at < K / 8) v = __ldg((const uint4*)x + (size_t)row * (K / 8) + at);
  v = exchange<UNIT>(v, at);
  if (at < K / 8) ((uint4*)out)[place<UNIT>(at, row, gridDim.y)] = v;
}
