// Plain double-precision references for the kernels, and the memory the driver tests them on.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "../src/kernels.h"

namespace reference {

using namespace arriero;
using Doubles = std::vector<double>;

inline std::mt19937& random() {
  static std::mt19937 r(7);
  return r;
}
inline double normal() {
  static std::normal_distribution<double> d;
  return d(random());
}
inline int below(int n) { return (int)(random()() % (unsigned)n); }

inline float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline double half(uint16_t h) {
  const int e = (h >> 10) & 31, m = h & 1023;
  const double v = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
  return h & 0x8000 ? -v : v;
}
inline double fp8(uint8_t b) {  // e4m3
  const int e = (b >> 3) & 15, m = b & 7;
  const double v = e ? std::ldexp(8 + m, e - 10) : std::ldexp(m, -9);
  return b & 0x80 ? -v : v;
}
inline double fp4(int q) {
  static const double v[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};
  return q & 8 ? -v[q & 7] : v[q & 7];
}

// An exactly sized heap block whose content begins one element off alignment, so that a sanitizer sees every byte
// beyond it and every aligned access faults.
struct Buffer {
  std::unique_ptr<uint8_t[]> block;
  size_t size = 0, shift = 0;
  int type = U8;
  Buffer() = default;
  Buffer(size_t n, int type) : size(n), shift(bytes_of(type)), type(type) {
    block.reset(new uint8_t[n * bytes_of(type) + shift]());
  }
  uint8_t* data() { return block.get() + shift; }
  const uint8_t* data() const { return block.get() + shift; }
  double at(size_t i) const {
    const uint8_t* p = data() + i * bytes_of(type);
    uint16_t h;
    float f;
    switch (type) {
      case F32: std::memcpy(&f, p, 4); return f;
      case F16: std::memcpy(&h, p, 2); return half(h);
      case BF16: std::memcpy(&h, p, 2); return bits_to_float((uint32_t)h << 16);
    }
    return *p;
  }
  void set(size_t i, double v) {
    uint8_t* p = data() + i * bytes_of(type);
    const float f = (float)v;
    uint16_t h = 0;
    switch (type) {
      case F32: std::memcpy(p, &f, 4); return;
      case BF16: {
        const uint32_t u = float_to_bits(f);
        h = std::isfinite(f) ? (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16) : (uint16_t)(u >> 16);
        break;
      }
      case F16: {
        if (!std::isfinite(v)) h = std::isnan(v) ? 0x7e00 : 0x7c00;
        else {
          int e;
          std::frexp(std::fabs(v), &e);
          e = e < -13 ? -13 : e;
          h = (uint16_t)(std::nearbyint(std::ldexp(std::fabs(v), 11 - e)) + (e + 13) * 1024);
        }
        h |= v < 0 ? 0x8000 : 0;
        break;
      }
      default: *p = (uint8_t)v; return;
    }
    std::memcpy(p, &h, 2);
  }
  Doubles all() const {
    Doubles v(size);
    for (size_t i = 0; i < size; i++) v[i] = at(i);
    return v;
  }
  bool same(size_t i, const Buffer& o, size_t j, size_t n) const {
    return std::memcmp(data() + i * bytes_of(type), o.data() + j * bytes_of(type), n * bytes_of(type)) == 0;
  }
};
inline Buffer gaussian(size_t n, int type, double scale = 1) {
  Buffer b(n, type);
  for (size_t i = 0; i < n; i++) b.set(i, normal() * scale);
  return b;
}

struct Weights {
  int format, bits, group, N, K, wt;
  Buffer codes, scales, biases;
  size_t row;      // bytes in a row
  Doubles values;  // [N, K]
};
// E stacked matrices
inline Weights weights(int format, int bits, int group, int N, int K, int type, int E = 1) {
  Weights w{format, bits, group, N, K, type, {}, {}, {}, 0, {}};
  const size_t rows = (size_t)N * E;
  w.values.resize(rows * K);
  if (format == DENSE) {
    w.codes = gaussian(rows * K, type);
    w.values = w.codes.all();
    w.row = (size_t)K * bytes_of(type);
    return w;
  }
  w.row = (size_t)K * bits / 8;
  w.codes = Buffer(rows * w.row, U8);
  for (size_t i = 0; i < w.codes.size; i++) w.codes.data()[i] = (uint8_t)below(256);
  if (format == MXFP8)  // 0x7f is NaN
    for (size_t i = 0; i < w.codes.size; i++)
      if ((w.codes.data()[i] & 0x7f) == 0x7f) w.codes.data()[i]--;
  const size_t G = K / group;
  w.scales = Buffer(rows * G, format == AFFINE ? type : U8);
  if (format == AFFINE) w.biases = Buffer(rows * G, type);
  for (size_t i = 0; i < rows * G; i++) {
    if (format == AFFINE) {
      const double s = (.5 + below(1000) / 1000.) / (1 << bits);
      w.scales.set(i, s), w.biases.set(i, -s * (1 << bits) * (.3 + below(400) / 1000.));
    } else w.scales.data()[i] = (uint8_t)(format == NVFP4 ? 40 + below(24) : 124 + below(6));
  }
  for (size_t n = 0; n < rows; n++)
    for (int k = 0; k < K; k++) {
      const size_t bit = (size_t)k * bits, s = n * G + k / group;
      const uint8_t* c = w.codes.data() + n * w.row + bit / 8;
      const int pair = c[0] | (bit % 8 + bits > 8 ? c[1] << 8 : 0);
      const int q = (pair >> (bit % 8)) & ((1 << bits) - 1);
      double v;
      if (format == AFFINE) v = q * w.scales.at(s) + w.biases.at(s);
      else if (format == NVFP4) v = fp4(q) * fp8(w.scales.data()[s]);
      else v = (format == MXFP4 ? fp4(q) : fp8((uint8_t)q)) * std::ldexp(1, w.scales.data()[s] - 127);
      w.values[n * K + k] = v;
    }
  return w;
}

// Largest error of a row relative to the largest row norm.
inline double error(const Doubles& got, const Doubles& want, size_t row) {
  double worst = 0, norm = 0;
  if (got.size() != want.size()) return INFINITY;
  for (size_t i = 0; i < got.size(); i += row) {
    double e = 0, n = 0;
    for (size_t j = i; j < i + row; j++) e += (got[j] - want[j]) * (got[j] - want[j]), n += want[j] * want[j];
    if (!(e <= worst)) worst = e;  // a NaN stays
    if (n > norm) norm = n;
  }
  return norm > 0 ? std::sqrt(worst / norm) : std::sqrt(worst);
}
inline double tolerance(int type, bool attention = false) {
  return type == F32 ? (attention ? 4e-6 : 2e-6) : type == BF16 ? 4e-3 : 5e-4;
}

struct Span2 {
  Span s;
  Doubles k, v;  // as addressed by the span's strides
};
inline Doubles attention(const Attention& p, const std::vector<Span2>& spans, const Doubles& q, int T) {
  Doubles o((size_t)T * p.Hq * p.Dv);
  for (const auto& sp : spans)
    for (int t = 0; t < sp.s.queries; t++)
      for (int h = 0; h < p.Hq; h++) {
        const Span& s = sp.s;
        const size_t row = (size_t)(s.first + t) * p.Hq + h, kv = h / (p.Hq / p.Hkv);
        Doubles w(s.count);
        double top = p.sinks ? p.sinks[h] : -INFINITY, sum = 0;
        for (int j = 0; j < s.count; j++) {
          const long long key = s.base + j, at = s.position + t;
          w[j] = -INFINITY;
          if (p.causal && (key > at || (p.window > 0 && key <= at - p.window))) continue;
          double a = 0;
          for (int d = 0; d < p.Dk; d++) a += q[row * p.Dk + d] * sp.k[kv * s.kh + j * s.kt + d];
          a *= p.scale;
          w[j] = p.softcap > 0 ? p.softcap * std::tanh(a / p.softcap) : a;
          top = std::fmax(top, w[j]);
        }
        for (double& x : w) sum += x = top == -INFINITY ? 0 : std::exp(x - top);
        if (p.sinks) sum += std::exp(p.sinks[h] - top);
        for (int j = 0; sum > 0 && j < s.count; j++)
          for (int d = 0; d < p.Dv; d++) o[row * p.Dv + d] += w[j] / sum * sp.v[kv * s.vh + j * s.vt + d];
      }
  return o;
}

}  // namespace reference
