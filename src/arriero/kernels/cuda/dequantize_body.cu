// Rows of packed weights as bfloat16, times FACTORS of the rows where there are any: one thread decodes WORDS words of 32
// bits, and the grid covers all exactly.
{
  using namespace arriero;
  typedef Format<MODE, GROUP> F;
  constexpr int PER_WORD = F::UNIT / 16;                       // weights
  constexpr u32 ROW_WORDS = K_ / PER_WORD;
  const u32 threads = gridDim.x * blockDim.x, first = blockIdx.x * blockDim.x + threadIdx.x;
  u32 q[WORDS];
  typename F::Scale s[WORDS];
  int block[WORDS];
#pragma unroll
  for (int j = 0; j < WORDS; ++j) {
    const u32 at = first + j * threads, row = at / ROW_WORDS;
    const int k = (int)(at % ROW_WORDS) * PER_WORD, inside = k % F::UNIT;
    q[j] = __ldcs((const u32*)w + at);
    s[j] = F::load(scales, BIASES, row, K_, k / F::UNIT, inside / (F::BLOCKS * 8));
    block[j] = inside % (F::BLOCKS * 8) / 8;
  }
#pragma unroll
  for (int j = 0; j < WORDS; ++j) {
    const u32 at = first + j * threads;
    typename F::Factor f = F::factor(s[j]);
    const float* factors_ = FACTORS;
    const float times = factors_ ? F::undo() * __ldg(factors_ + at / ROW_WORDS) : 0.f;
    auto whole = [&](u32 v) { return factors_ ? pair(low(v) * times, high(v) * times) : mul2(v, UNDO); };
    u32 p[4];
    if (F::UNIT == 64) {
      // Both words of a block are decoded alike; a thread has only one.
      u32 twice[4] = {q[j], q[j], q[j], q[j]};
      F::decode(twice, 0, f, p);
      p[0] = whole(p[0]), p[1] = whole(p[1]);
      ((uint2*)out)[at] = make_uint2(permute(p[0], p[1], 0x5410), permute(p[0], p[1], 0x7632));
    } else {
      u32 same[4] = {q[j], q[j], q[j], q[j]};
      if (block[j] < 2) F::decode(same, 0, f, p);
      else F::decode(same, 2, f, p);
#pragma unroll
      for (int e = 0; e < 4; ++e) p[e] = whole(p[e]);
      ((uint4*)out)[at] = make_uint4(permute(p[0], p[1], 0x5410), permute(p[2], p[3], 0x5410),
                                     permute(p[0], p[1], 0x7632), permute(p[2], p[3], 0x7632));
    }
  }
}
