// Chosen rows of a table, decoded: row places[i] of `rows`, of STRIDE bytes, becomes row i of `out`. A thread decodes 8
// numbers. In a row lie the codes, scales from SCALES_AT on (behind them the biases of affine formats), and a factor at
// FACTOR_AT, where that is not 0. KIND: 0 float32, 1 bfloat16, 2 E4M3, 3 NVFP4, 4 MXFP4, 5 MXFP8, 6 affine of BITS.
{
  using namespace arriero;
  constexpr u32 PIECES = WIDTH / 8;
  const u32 at = blockIdx.x * THREADS + threadIdx.x, line = at / PIECES, first = at % PIECES * 8;
  if (line >= (u32)places_shape[0]) return;
  const u8* row = rows + (size_t)places[line] * STRIDE;
  auto half = [](const u8* p) { return number((u16)(p[0] | p[1] << 8)); };
  auto wide = [](const u8* p) { return __uint_as_float(p[0] | p[1] << 8 | p[2] << 16 | (u32)p[3] << 24); };
  auto e2m1 = [](u32 code) {
    const u32 size = code & 7;
    const float v = size < 2 ? 0.5f * size : __uint_as_float(((size >> 1) + 126) << 23 | (size & 1) << 22);
    return code & 8 ? -v : v;
  };
  auto e4m3 = [](u32 code) {
    const u32 power = code >> 3 & 15, rest = code & 7;
    float v = power ? __uint_as_float((power + 120) << 23 | rest << 20) : rest * 0.001953125f;
    if (power == 15 && rest == 7) v = __uint_as_float(0x7fc00000u);
    return code & 128 ? -v : v;
  };
  auto e8m0 = [](u32 code) { return __uint_as_float(code == 255 ? 0x7fc00000u : code ? code << 23 : 0x00400000u); };
  const float factor = FACTOR_AT == 0 ? 1.f : wide(row + FACTOR_AT);
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 k = first + i;
    if (KIND == 0) v[i] = wide(row + 4 * k);
    if (KIND == 1) v[i] = half(row + 2 * k);
    if (KIND == 2) v[i] = e4m3(row[k]);
    if (KIND == 3) v[i] = e2m1(row[k / 2] >> 4 * (k & 1)) * e4m3(row[SCALES_AT + k / GROUP]);
    if (KIND == 4) v[i] = e2m1(row[k / 2] >> 4 * (k & 1)) * e8m0(row[SCALES_AT + k / GROUP]);
    if (KIND == 5) v[i] = e4m3(row[k]) * e8m0(row[SCALES_AT + k / GROUP]);
    if (KIND == 6) {
      const u32 code = BITS == 8 ? row[k] : row[k / 2] >> 4 * (k & 1) & 15;
      const u8* scale = row + SCALES_AT + k / GROUP * 2;
      v[i] = code * half(scale) + half(scale + WIDTH / GROUP * 2);
    }
    v[i] *= factor;
  }
  if (WIDE) {
    float4* to = (float4*)out + (size_t)at * 2;
    to[0] = make_float4(v[0], v[1], v[2], v[3]);
    to[1] = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    ((uint4*)out)[at] = make_uint4(pair(v[0], v[1]), pair(v[2], v[3]), pair(v[4], v[5]), pair(v[6], v[7]));
  }
}
