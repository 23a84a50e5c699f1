// Rows of x [count, K] in the order of prompt_product.cu: [K / 64, padded, 64], zeros behind the last row. Numbers that a
// thread multiplies with a decoded block are 8 contiguous ones of a row; a step of 16 numbers has 4 of each of four
// threads, in the order of fragments. 16 bytes at place p of row r lie at p ^ (r & 7).
{
  using namespace arriero;
  constexpr int BLOCKS = UNIT / 32, EACH = 4;  // blocks of 8 numbers of a thread in a unit; rows of a thread here
  const int count = x_shape[0], K = x_shape[1], padded = gridDim.y * EACH, first = blockIdx.y * EACH;
  const int at = blockIdx.x * THREADS + threadIdx.x, unit = at / (4 * BLOCKS), block = at % BLOCKS, t = at / BLOCKS & 3;
  uint4 rows[EACH];
#pragma unroll
  for (int r = 0; r < EACH; ++r) {
    rows[r] = make_uint4(0, 0, 0, 0);
    if (first + r < count && at < K / 8) rows[r] = __ldg((const uint4*)x + (size_t)(first + r) * (K / 8) + at);
  }
  const bool odd = t & 1, upper = t & 2;
#pragma unroll
  for (int r = 0; r < EACH; ++r) {
    // Four threads, each with a word for each of four, exchange them.
    uint4 v = pairs_of<UNIT>(rows[r]);
    u32 one = __shfl_xor_sync(~0u, odd ? v.x : v.y, BLOCKS), two = __shfl_xor_sync(~0u, odd ? v.z : v.w, BLOCKS);
    if (odd) v.x = one, v.z = two;
    else v.y = one, v.w = two;
    one = __shfl_xor_sync(~0u, upper ? v.x : v.z, 2 * BLOCKS), two = __shfl_xor_sync(~0u, upper ? v.y : v.w, 2 * BLOCKS);
    if (upper) v.x = one, v.y = two;
    else v.z = one, v.w = two;
    const int stage = unit * (UNIT / 64) + block / 2, row = first + r;
    if (at < K / 8) ((uint4*)out)[((size_t)stage * padded + row) * 8 + ((block % 2 * 4 + t) ^ (row & 7))] = v;
  }
}
