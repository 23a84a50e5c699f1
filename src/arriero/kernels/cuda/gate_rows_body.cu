// activation(gate) · up of rows with gate and up side by side, 8 numbers a thread, in float32 and rounded once. The grid
// is (8 numbers / THREADS, rows).
{
  using namespace arriero;
  const int at = (blockIdx.x * THREADS + threadIdx.x) * 8;
  if (at < INNER) {
    const bf16* from = (const bf16*)rows + (size_t)blockIdx.y * 2 * INNER + at;
    const uint4 gates = __ldcs((const uint4*)from), ups = __ldcs((const uint4*)(from + INNER));
    auto two = [](u32 g, u32 u) {
      return pair(activate<ACTIVATION>(low(g)) * low(u), activate<ACTIVATION>(high(g)) * high(u));
    };
    *(uint4*)((bf16*)out + (size_t)blockIdx.y * INNER + at) =
        make_uint4(two(gates.x, ups.x), two(gates.y, ups.y), two(gates.z, ups.z), two(gates.w, ups.w));
  }
}
