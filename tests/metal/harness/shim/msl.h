// A C++20 stand-in for the part of the Metal Shading Language that compute
// kernels use, so that kernel text compiles as C++ and runs on the CPU.
// Only freestanding-style headers are included: <cmath> would put ::exp,
// ::log1p and so on into the global namespace, where kernels define their own.
#pragma once
#include <concepts>
#include <cstdint>
#include <limits>
#include <source_location>
#include <type_traits>
#include "rt.h"

// Scalars.
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;

struct bfloat;
namespace msl {
template <class T> concept integral_ = std::is_integral_v<T>;
template <class T> inline constexpr bool is_half = std::is_same_v<T, half>;
template <class T> inline constexpr bool is_bf = std::is_same_v<T, bfloat>;
template <class T> inline constexpr bool is_fp =
    std::is_same_v<T, float> || is_half<T> || is_bf<T>;
template <class T> concept scalar_ = std::is_integral_v<T> || is_fp<T> || std::is_same_v<T, double>;
}  // namespace msl

// MSL: bfloat converts implicitly to float only; float and half need a cast.
struct bfloat {
  uint16_t bits_;
  bfloat() = default;
  static constexpr uint16_t round_(float f) {
    uint32_t u = __builtin_bit_cast(uint32_t, f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);
    return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
  }
  explicit constexpr bfloat(float f) : bits_(round_(f)) {}
  explicit constexpr bfloat(double f) : bits_(round_(float(f))) {}
  explicit constexpr bfloat(half f) : bits_(round_(float(f))) {}
  template <msl::integral_ I> constexpr bfloat(I i) : bits_(round_(float(i))) {}
  constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits_) << 16); }
  constexpr bfloat operator-() const { bfloat r(*this); r.bits_ ^= 0x8000; return r; }
  constexpr bfloat operator+() const { return *this; }
#define MSL_BF(op)                                                                              \
  friend constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); } \
  template <msl::integral_ I> friend constexpr bfloat operator op(bfloat a, I b) { return a op bfloat(b); } \
  template <msl::integral_ I> friend constexpr bfloat operator op(I a, bfloat b) { return bfloat(a) op b; } \
  constexpr bfloat& operator op##=(bfloat b) { return *this = *this op b; }
  MSL_BF(+) MSL_BF(-) MSL_BF(*) MSL_BF(/)
#undef MSL_BF
  bfloat& operator++() { return *this += bfloat(1); }
};

#include "msl_vectors.h"
#include "consts.h"
#include "msl_math.h"
#include "msl_groups.h"

namespace msl {
template <class T> MSL_NOSAN inline T& tg_var(int id, const char* name) { return *(T*)rt_tg_alloc(id, sizeof(T), alignof(T), name); }
}  // namespace msl

// Literals: 1.0h and 1.0bf (an unsuffixed one is float, by a compiler flag)
#pragma GCC system_header
constexpr half operator""h(long double v) { return half(float(v)); }
constexpr half operator""H(long double v) { return half(float(v)); }
constexpr bfloat operator""bf(long double v) { return bfloat(float(v)); }

// Keywords, last.
#define device
#define constant
#define threadgroup
#define thread
#define kernel
#define METAL_FUNC inline
#define METAL_CONST const
#define __METAL__ 1
#pragma GCC poison double goto throw dynamic_cast typeid
#define __METAL_VERSION__ 310
