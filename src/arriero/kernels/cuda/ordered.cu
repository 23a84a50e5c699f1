// Rows of activations in the order that prompt_product.cu multiplies them in: tiles [K / 64, padded rows, 64]. Numbers that
// a thread multiplies with a decoded block are 8 contiguous ones of a row; a step of 16 numbers has 4 of each of four
// threads, in the order of fragments. 16 bytes at place p of row r lie at p ^ (r & 7).
namespace arriero {

// Of 8 numbers a thread, contiguous in a row from lane to lane, those that it writes; all lanes of the warp take part.
template <int UNIT>
__device__ __forceinline__ uint4 exchange(uint4 v, int at) {
  constexpr int BLOCKS = UNIT / 32;  // of 8 numbers that a thread of the product has in a unit
  const int t = at / BLOCKS & 3;
  v = pairs_of<UNIT>(v);
  // Four threads, each with a word for each of four.
  const bool odd = t & 1, upper = t & 2;
  u32 one = __shfl_xor_sync(~0u, odd ? v.x : v.y, BLOCKS), two = __shfl_xor_sync(~0u, odd ? v.z : v.w, BLOCKS);
  if (odd) v.x = one, v.z = two;
  else v.y = one, v.w = two;
  one = __shfl_xor_sync(~0u, upper ? v.x : v.z, 2 * BLOCKS), two = __shfl_xor_sync(~0u, upper ? v.y : v.w, 2 * BLOCKS);
  if (upper) v.x = one, v.y = two;
  else v.z = one, v.w = two;
  return v;
}

// Where 16 bytes go, counted in 16 bytes: those of thread t of a block of a unit.
template <int UNIT>
__device__ __forceinline__ size_t place(int unit, int block, int t, int row, int padded) {
  const int stage = unit * (UNIT / 64) + block / 2;
  return ((size_t)stage * padded + row) * 8 + ((block % 2 * 4 + t) ^ (row & 7));
}
template <int UNIT>
__device__ __forceinline__ size_t place(int at, int row, int padded) {
  constexpr int BLOCKS = UNIT / 32;
  return place<UNIT>(at / (4 * BLOCKS), at % BLOCKS, at / BLOCKS & 3, row, padded);
}

}  // namespace arriero
