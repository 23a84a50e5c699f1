// The best of a row: a threshold found digit by digit, then what passes it, sorted. One block of threads a row.
namespace arriero {

constexpr int DIGIT = 11, BINS = 1 << DIGIT;
constexpr u32 NAN_KEY = 0xFFFFFDu;

// Keys in the order of numbers, as kernels/topk.py makes them: -0 is 0, and NaN comes last.
__device__ __forceinline__ u32 order_of(float value) {
  const float x = value + 0.f;
  const u32 bits = __float_as_uint(x);
  return max((bits ^ ((u32)((int)bits >> 31) | 0x80000000u)) + 0x7FFFFFu, NAN_KEY);
}

struct Counts {
  u32 bins[BINS];
  u32 warps[32];
  u32 digit, left, taken;
};

// What passes: keys above `key`, and of those equal to it the ones whose index is at most `index`.
struct Cut {
  u32 key, index;
  __device__ __forceinline__ bool passes(u32 of, u32 at) const { return of > key || (of == key && at <= index); }
};

// Sum of the threads before this one.
__device__ __forceinline__ u32 sum_before(u32 value, u32* warps) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u32 sum = value;
#pragma unroll
  for (u32 o = 1; o < 32; o *= 2) {
    const u32 other = __shfl_up_sync(~0u, sum, o);
    if (lane >= o) sum += other;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  u32 before = sum - value;
  for (u32 w = 0; w < warp; ++w) before += warps[w];
  return before;
}

// Counts by one digit those that `of(i)` gives a digit (of at least 0), and finds the greatest digit d of which and
// above which there are at least `left`; afterwards c.left are wanted of d itself.
template <int SIZE, class Of>
__device__ __forceinline__ u32 digit_of(Of of, u32 length, u32 left, Counts& c) {
  constexpr u32 EACH = (SIZE + THREADS - 1) / THREADS;
  for (u32 i = threadIdx.x; i < SIZE; i += THREADS) c.bins[i] = 0;
  __syncthreads();
  for (u32 i = threadIdx.x; i < length; i += THREADS) {
    const int digit = of(i);
    if (digit >= 0) atomicAdd(&c.bins[digit], 1u);
  }
  __syncthreads();
  // A thread's digits go down from `top`.
  const int top = SIZE - 1 - (int)(threadIdx.x * EACH);
  u32 mine = 0;
  for (int j = 0; j < (int)EACH; ++j)
    if (top - j >= 0) mine += c.bins[top - j];
  u32 above = sum_before(mine, c.warps);
  if (above < left && above + mine >= left) {
    int digit = top;
    while (above + c.bins[digit] < left) above += c.bins[digit--];
    c.digit = digit;
    c.left = left - above;
    c.taken = c.bins[digit];
  }
  __syncthreads();
  return c.digit;
}

// The cut that k of `length` pass, 1 <= k <= length < 2^31.
template <class Key>
__device__ __forceinline__ Cut cut_of(Key key, u32 length, u32 k, Counts& c) {
  u32 high = digit_of<BINS>([&](u32 i) { return (int)(key(i) >> 21); }, length, k, c);
  u32 left = c.left;
  __syncthreads();
  high = high << DIGIT |
         digit_of<BINS>([&](u32 i) { u32 x = key(i); return x >> 21 == high ? (int)(x >> 10 & (BINS - 1)) : -1; },
                        length, left, c);
  left = c.left;
  __syncthreads();
  Cut cut;
  cut.key = high << 10 |
            digit_of<1024>([&](u32 i) { u32 x = key(i); return x >> 10 == high ? (int)(x & 1023) : -1; }, length, left, c);
  left = c.left;
  const u32 equal = c.taken;
  __syncthreads();
  cut.index = 0x7FFFFFFFu;
  if (left == equal) return cut;
  // Of equal ones the first: the same, by digits of what an index lacks of the greatest.
  u32 found = 0, mask = 0;
  for (int shift = 22; shift >= 0; shift -= DIGIT) {
    const u32 digit = digit_of<BINS>(
        [&](u32 i) {
          const u32 rest = 0x7FFFFFFFu - i;
          return key(i) == cut.key && (rest & mask) == found ? (int)(rest >> shift & (BINS - 1)) : -1;
        },
        length, left, c);
    found |= digit << shift;
    mask |= (u32)(BINS - 1) << shift;
    left = c.left;
    __syncthreads();
  }
  cut.index = 0x7FFFFFFFu - found;
  return cut;
}

// SIZE numbers, a power of two, in falling order.
template <int SIZE>
__device__ __forceinline__ void sort_falling(u64* of) {
  for (u32 run = 2; run <= SIZE; run *= 2)
    for (u32 stride = run / 2; stride; stride /= 2) {
      for (u32 i = threadIdx.x; i < SIZE / 2; i += THREADS) {
        const u32 low = 2 * i - (i & (stride - 1)), high = low + stride;
        const u64 a = of[low], b = of[high];
        if ((a < b) == ((low & run) == 0)) of[low] = b, of[high] = a;
      }
      __syncthreads();
    }
}

}  // namespace arriero
