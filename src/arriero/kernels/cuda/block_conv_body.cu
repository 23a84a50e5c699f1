// A causal convolution within one block of rows, whose kernels are a part that stands and one for each row and group of
// channels: y[t][c] = residual[t][c] + sum over j of (base[j][c] + dynamic[t][j][c / GROUP]) * x[t - j][c]. Each product
// and each sum is rounded to bfloat16, as plain operations round them. A thread has two channels of one row.
{
  using namespace arriero;
  constexpr u32 HALF = WIDTH / 2, GROUPS = WIDTH / GROUP;
  const u32 at = blockIdx.x * THREADS + threadIdx.x, row = at / HALF, c = at % HALF * 2;
  if (row >= ROWS) return;
  const u32* from = (const u32*)x;
  const u32* stands = (const u32*)base + (size_t)SIDE * TAPS * HALF;
  const u16* moves = (const u16*)dynamic + ((size_t)row * 2 + SIDE) * TAPS * GROUPS + c / GROUP;
  auto rounded = [](float v) { return __bfloat162float(__float2bfloat16(v)); };
  float a = 0.f, b = 0.f;
#pragma unroll
  for (u32 tap = 0; tap < TAPS; ++tap) {
    const u32 earlier = row >= tap ? from[(size_t)(row - tap) * HALF + c / 2] : 0, k = stands[tap * HALF + c / 2];
    const float m = number(moves[tap * GROUPS]), u = low(earlier), v = high(earlier);
    a = rounded(a + rounded(low(k) * u));
    b = rounded(b + rounded(high(k) * v));
    a = rounded(a + rounded(m * u));
    b = rounded(b + rounded(m * v));
  }
  const u32* rest = (const u32*)RESIDUAL;
  if (rest) {
    const u32 r = rest[(size_t)row * HALF + c / 2];
    a += low(r), b += high(r);
  }
  ((u32*)y)[(size_t)row * HALF + c / 2] = pair(a, b);
}
