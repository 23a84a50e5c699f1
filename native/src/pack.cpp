// Packing of MLX's row-major quantised layout into strips, and single rows out of them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "packed.h"
#include "pool.h"

namespace arriero {
namespace {

float half_to_float(uint16_t h) {
  const uint32_t e = h >> 10 & 31, m = h & 1023;
  if (e == 0) return (h & 0x8000 ? -1.f : 1.f) * (float)m * 0x1p-24f;
  const uint32_t u = (uint32_t)(h & 0x8000) << 16 | (e == 31 ? 255u : e + 112) << 23 | m << 13;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
uint16_t float_to_half(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const uint32_t sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // 65520 and above
  if (a < 0x38800000) {                                   // below 2^-14: in units of 2^-24
    float b;
    std::memcpy(&b, &a, 4);
    return (uint16_t)(sign | (uint32_t)std::nearbyint(b * 0x1p24f));
  }
  const uint32_t r = a - 0x38000000 + 0xfff + (a >> 13 & 1);
  return (uint16_t)(sign | r >> 13);
}
uint16_t float_to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if (f != f) return (uint16_t)(u >> 16 | 64);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
float read_float(const void* p, int type, size_t i) {
  if (type == F32) {
    float f;
    std::memcpy(&f, (const char*)p + 4 * i, 4);
    return f;
  }
  uint16_t h;
  std::memcpy(&h, (const char*)p + 2 * i, 2);
  if (type == F16) return half_to_float(h);
  const uint32_t u = (uint32_t)h << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
float read_scale(const Packed& p, const uint8_t* s, size_t i) {
  if (p.format == AFFINE) return read_float(s, p.st, i);
  if (p.format == NVFP4) return std::ldexp((float)(s[i] & 7) + (s[i] >> 3 & 15 ? 8 : 0), std::max(s[i] >> 3 & 15, 1) - 10);
  return std::ldexp(1.f, s[i] - 127);
}
int block_of(const Packed& p) { return p.group < 32 ? p.group : 32; }

// n codes of `bits` bits from a bit stream; reads no byte behind the last code's.
void unpack_codes(const uint8_t* w, int bits, int n, uint8_t* out) {
  if (bits == 8) {
    std::memcpy(out, w, n);
    return;
  }
  const unsigned mask = (1u << bits) - 1;
  for (int i = 0; i < n; i += 8, w += bits) {  // eight codes are `bits` bytes
    uint64_t v = 0;
    std::memcpy(&v, w, bits);
    for (int j = 0; j < 8; j++) out[i + j] = (uint8_t)(v >> (j * bits) & mask);
  }
}
// A block's codes of one column into the lane that begins at `to`.
void place_codes(const uint8_t* codes, int bits, int quads, uint8_t* to) {
  if (bits == 8) {
    for (int j = 0; j < quads; j++) std::memcpy(to + 64 * j, codes + 4 * j, 4);
    return;
  }
  int low = 0;
  for (int plane = 4; plane; plane /= 2) {
    if (!(bits & plane)) continue;
    const int fields = 8 / plane;
    for (int v = 0; v < quads / fields; v++, to += 64) {
      uint32_t lane = 0;
      for (int f = 0; f < fields; f++) {
        uint32_t quad;
        std::memcpy(&quad, codes + 4 * (v * fields + f), 4);
        lane |= (quad >> low & 0x01010101u * ((1u << plane) - 1)) << (f * plane);
      }
      std::memcpy(to, &lane, 4);
    }
    low += plane;
  }
}
int code_at(const Packed& p, const uint8_t* block, int column, int k) {
  const int quads = block_of(p) / 4, j = k / 4, at = 4 * column + k % 4;
  if (p.bits == 8) return block[64 * j + at];
  int code = 0, low = 0;
  for (int plane = 4; plane; plane /= 2) {
    if (!(p.bits & plane)) continue;
    const int fields = 8 / plane;
    code |= (block[64 * (j / fields) + at] >> (j % fields * plane) & ((1 << plane) - 1)) << low;
    block += 64 * (quads / fields);
    low += plane;
  }
  return code;
}
void pack_strip(const Packed& p, const Rowwise& from, size_t first, int columns, uint8_t* to) {
  const int block = block_of(p), G = p.K / p.group;
  const size_t wrow = (size_t)p.K * p.bits / 8, es = bytes_of(p.st);
  if (columns < kStrip) std::memset(to, 0, packed_strip(p));
  for (int g = 0; g < G; g++, to += packed_group(p)) {
    for (int k = 0; k < p.group; k += block)
      for (int c = 0; c < columns; c++) {
        uint8_t codes[32];
        unpack_codes(from.w + (first + c) * wrow + ((size_t)g * p.group + k) * p.bits / 8, p.bits, block, codes);
        place_codes(codes, p.bits, block / 4, to + (size_t)k * 2 * p.bits + 4 * c);
      }
    uint8_t* scales = to + packed_codes(p);
    for (int c = 0; c < columns; c++) {
      const size_t at = ((first + c) * G + g) * es;
      std::memcpy(scales + c * es, (const char*)from.scales + at, es);
      if (p.biased) std::memcpy(scales + (kStrip + c) * es, (const char*)from.biases + at, es);
    }
  }
}

}  // namespace

int symmetric_zero(const void* scales, const void* biases, int type, size_t n) {
  int z = -1;
  for (size_t i = 0; i < n; i++) {
    const float s = read_float(scales, type, i), b = read_float(biases, type, i);
    if (z < 0 && s != 0) {
      const float ratio = -b / s;
      if (!(ratio >= 0 && ratio <= 255) || ratio != std::floor(ratio)) return -1;
      z = (int)ratio;
    }
    if (z < 0 ? b != 0 : b != -(float)z * s) return -1;
  }
  return z < 0 ? 0 : z;
}

void pack_strips(const Packed& p, const Rowwise& from, uint8_t* to) {
  const int strips = packed_strips(p), all = strips * (p.experts ? p.experts : 1), each = 8;
  parallel((all + each - 1) / each, [&](int t) {
    for (int i = t * each; i < all && i < (t + 1) * each; i++) {
      const int e = i / strips, s = i % strips, left = p.N - s * kStrip;
      const size_t first = (size_t)e * p.N + (size_t)s * kStrip;
      pack_strip(p, from, first, left < kStrip ? left : kStrip, to + (size_t)i * packed_strip(p));
    }
  });
}

void packed_rows(const Packed& p, const int* ids, int M, float gscale, void* y, int yt) {
  static const float fp4[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
  auto row = [&](int m) {
    char* to = (char*)y + (size_t)m * p.K * bytes_of(yt);
    if (ids[m] < 0 || ids[m] >= p.N) {
      std::memset(to, 0, (size_t)p.K * bytes_of(yt));
      return;
    }
    const int column = ids[m] % kStrip, block = block_of(p);
    const uint8_t* at = p.data + (size_t)(ids[m] / kStrip) * packed_strip(p);
    for (int k = 0; k < p.K; k += p.group, at += packed_group(p)) {
      const uint8_t* scales = at + packed_codes(p);
      const double s = read_scale(p, scales, column);
      const double b = p.biased ? read_scale(p, scales, kStrip + column) : -p.zero * s;
      for (int i = 0; i < p.group; i++) {
        const int code = code_at(p, at + (size_t)(i / block) * block * 2 * p.bits, column, i % block);
        const float v = (float)(p.format == AFFINE ? code * s + b : fp4[code] * s) * gscale;
        if (yt == F32) std::memcpy(to + 4 * (size_t)(k + i), &v, 4);
        else {
          const uint16_t h = yt == BF16 ? float_to_bf16(v) : float_to_half(v);
          std::memcpy(to + 2 * (size_t)(k + i), &h, 2);
        }
      }
    }
  };
  if ((size_t)M * p.K < 8192)
    for (int m = 0; m < M; m++) row(m);
  else
    parallel(M, row);
}


void packed_experts(const PackedJob& job, const int* index, int rows, int per_x) {
  const PackedProduct& p = job.products[0];
  const int E = p.w.experts;
  std::vector<int> start(E + 1), x(rows), y(rows);
  const size_t line = (size_t)p.w.N * bytes_of(job.type);
  for (int i = 0; i < rows; i++)
    if (index[i] >= 0 && index[i] < E) start[index[i] + 1]++;
    else std::memset((char*)p.y + i * line, 0, line);
  for (int i = 0; i < E; i++) start[i + 1] += start[i];
  std::vector<int> at(start.begin(), start.end() - 1);
  for (int i = 0; i < rows; i++) {
    if (index[i] < 0 || index[i] >= E) continue;
    const int o = at[index[i]]++;
    x[o] = i / per_x, y[o] = i;
  }
  std::vector<Segment> used;
  for (int i = 0; i < E; i++)
    if (start[i + 1] > start[i]) used.push_back({i, start[i], start[i + 1] - start[i]});
  if (used.empty()) return;
  PackedJob all = job;
  all.M = rows, all.segments = used.data(), all.nsegments = (int)used.size(), all.xrows = x.data(), all.yrows = y.data();
  packed_run()(all);
}

}  // namespace arriero
