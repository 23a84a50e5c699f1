// A causal depthwise convolution over spans, each behind its own tail of earlier rows. A thread has two channels and goes
// through the tokens of a run; the grid is (pairs of channels / THREADS, runs of the longest span, spans).
{
  using namespace arriero;
  constexpr int HISTORY = (TAPS - 1) * DILATION;
  const Span span = ((const Span*)table)[blockIdx.z];
  const void* const tails[] = {EACH(const void, t)};
  void* const ends[] = {EACH(void, t_end)};
  const void* tail = tails[blockIdx.z];
  const int c = (blockIdx.x * THREADS + threadIdx.x) * 2;
  if (c < CHANNELS) {
    auto two = [&](const void* from, size_t row) -> float2 {
      const size_t at = row * CHANNELS + c;
      if (WIDE) return *(const float2*)((const float*)from + at);
      const u32 v = *(const u32*)((const bf16*)from + at);
      return make_float2(low(v), high(v));
    };
    auto put = [&](void* to, size_t row, float2 v) {
      const size_t at = row * CHANNELS + c;
      if (WIDE) *(float2*)((float*)to + at) = v;
      else *(u32*)((bf16*)to + at) = pair(v.x, v.y);
    };
    // Row r of the window: the tail, then the span's own rows.
    auto seen = [&](int r) -> float2 {
      return r < HISTORY ? two(tail, r) : two(x, (size_t)(span.first + r - HISTORY));
    };
    float2 w[TAPS];
#pragma unroll
    for (int j = 0; j < TAPS; ++j) w[j] = two(taps, j);
    const float2 start = BIASED ? two(BIAS, 0) : make_float2(0.f, 0.f);
    const int from = blockIdx.y * RUN, to = min(from + RUN, span.length);
    for (int i = from; i < to; ++i) {
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int j = 0; j < TAPS; ++j) {
        const float2 v = seen(i + j * DILATION);
        sum.x += v.x * w[j].x;
        sum.y += v.y * w[j].y;
      }
      sum.x += start.x, sum.y += start.y;
      if (SILU) sum.x /= 1.f + expf(-sum.x), sum.y /= 1.f + expf(-sum.y);
      put(out, (size_t)(span.first + i), sum);
    }
    if (blockIdx.y == 0) {
      for (int r = 0; r < HISTORY; ++r) put(ends[blockIdx.z], r, seen(span.length + r));
#ifdef STOPS
      void* const kept[] = {EACH(void, t_kept)};
      for (int k = 0; k < span.stops; ++k) {
        const int after = ((const int*)table)[span.stop + k];
        for (int r = 0; r < HISTORY; ++r) put(kept[blockIdx.z], (size_t)k * HISTORY + r, seen(after + r));
      }
#endif
    }
  }
}
