// Rows of x [count, K] as tiles for prompt_product.cu: [K / 64, padded, 64], zeros behind the last row. Numbers that a
// thread multiplies with a decoded block are 8 contiguous ones; steps of 16 numbers have 4 of each of the 4 threads of a
// row, in the order of fragments. 16 bytes at place p of row r lie at p ^ (r & 7).
{
  using namespace arriero;
  const int count = x_shape[0], K = x_shape[1], padded = gridDim.y, row = blockIdx.y;
  const int at = blockIdx.x * THREADS + threadIdx.x;
  constexpr int BLOCKS = UNIT / 32;  // of 8 numbers that a thread of the product has in a unit
  const int unit = at / (4 * BLOCKS), block = at % BLOCKS, t = at / BLOCKS & 3;
  uint4 v = make_uint4(0, 0, 0, 0);
  if (row < count && at < K / 8) v = __ldg((const uint4*)x + (size_t)row * (K / 8) + at);
  v = pairs_of<UNIT>(v);
  // Four threads, each with a word for each of four, exchange them.
  const bool odd = t & 1, upper = t & 2;
  u32 one = __shfl_xor_sync(~0u, odd ? v.x : v.y, BLOCKS), two = __shfl_xor_sync(~0u, odd ? v.z : v.w, BLOCKS);
  if (odd) v.x = one, v.z = two;
  else v.y = one, v.w = two;
  one = __shfl_xor_sync(~0u, upper ? v.x : v.z, 2 * BLOCKS), two = __shfl_xor_sync(~0u, upper ? v.y : v.w, 2 * BLOCKS);
  if (upper) v.x = one, v.y = two;
  else v.z = one, v.w = two;
  const int stage = unit * (UNIT / 64) + block / 2;
  if (at < K / 8) ((uint4*)out)[((size_t)stage * padded + row) * 8 + ((block % 2 * 4 + t) ^ (row & 7))] = v;
}
