// Rows of a cache that others hold: of any strides, whole pieces of 8 where they allow it.
namespace arriero {

// One query, numbered as attention.cu's groups of one token.
struct Query {
  int query;       // on the packed axis
  int count;       // 1
  int here;        // where it stands
  int fresh;       // first token of its row that is new, on the packed axis
  int fresh_here;  // where that one stands
  int capacity;    // places of the row's buffers
  int row;         // whose buffers
  int line;        // of the result
};

// Keys or values `[key heads, keys, D]` of one row.
struct Side {
  const bf16* at;
  long head, key, one;

  // Whether 8 numbers side by side can be read at once.
  __device__ __forceinline__ bool plain() const {
    return one == 1 && (head & 7) == 0 && (key & 7) == 0 && ((size_t)at & 15) == 0;
  }
};

template <bool PLAIN>
__device__ __forceinline__ uint4 eight(const Side& side, const bf16* row, int d) {
  if (PLAIN) return *(const uint4*)(row + d);
  u32 w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u16* p = (const u16*)(row + (d + 2 * i) * side.one);
    w[i] = p[0] | ((u32)p[side.one] << 16);
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

}  // namespace arriero
