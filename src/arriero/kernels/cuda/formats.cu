// Packed weights in MLX's layout, decoded in registers to pairs of bfloat16.
//
// A unit is 64 bytes of one row; four threads of a warp hold 16 bytes of it each, which are BLOCKS blocks of 8 weights.
// decode() turns a block into 4 pairs, whose order pairs_of() gives to the activations too. What it yields times undo()
// is the weight; every value is exact but affine ones, which round as MLX's own dequantisation does.
namespace arriero {

enum { NVFP4 = 0, MXFP4 = 1, MXFP8 = 2, AFFINE4 = 3, AFFINE8 = 4 };

template <int MODE, int GROUP>
struct Format;

// An E2M1 nibble's sign and magnitude moved to bits 15 and 8..6 of a bfloat16: the value times 2^-126 (one half is
// subnormal, and exact).
__device__ __forceinline__ void e2m1(u32 q, u32 factor, u32* p) {
  u32 h = q >> 8;
  p[0] = mul2(((q & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, factor);
  p[1] = mul2(((q & 0x00F000F0u) * 0x0104u) & 0x81C081C0u, factor);
  p[2] = mul2(((h & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, factor);
  p[3] = mul2(((h & 0x00F000F0u) * 0x0104u) & 0x81C081C0u, factor);
}

// Scales are E4M3, one for 16 weights: times 2^100 in bfloat16, which is exact, subnormal ones included. The product of
// a weight and a scale has 6 significant bits.
template <int GROUP>
struct Format<NVFP4, GROUP> {
  static constexpr int UNIT = 128, BLOCKS = 4;
  struct Scale { u32 v; };
  struct Factor { u32 first, second; };
  static __device__ __forceinline__ Scale load(const void* scales, const void*, long row, int K, int unit, int t) {
    Scale s;
    s.v = __ldg((const u16*)((const u8*)scales + row * (K / 16) + unit * 8 + t * 2));
    return s;
  }
  static __device__ __forceinline__ u32 widen(u32 e4m3) {
    const u32 c = 0x76807680u;  // 2^110, twice
    return mul2(mul2((e4m3 & 0x7f) * 0x00100010u, c), c);
  }
  static __device__ __forceinline__ Factor factor(Scale s) {
    Factor f;
    f.first = widen(s.v);
    f.second = widen(s.v >> 8);
    return f;
  }
  static __device__ __forceinline__ void decode(const u32* q, int i, const Factor& f, u32* p) {
    e2m1(q[i], i < 2 ? f.first : f.second, p);
  }
  static __device__ __forceinline__ float undo() { return 67108864.f; }  // 2^26
};

// Scales are powers of two, one for 32 weights. The sum of exponents is kept inside what bfloat16 holds.
template <int GROUP>
struct Format<MXFP4, GROUP> {
  static constexpr int UNIT = 128, BLOCKS = 4;
  struct Scale { u32 v; };
  struct Factor { u32 s; };
  static __device__ __forceinline__ Scale load(const void* scales, const void*, long row, int K, int unit, int t) {
    Scale s;
    s.v = __ldg((const u8*)scales + row * (K / 32) + unit * 4 + t);
    return s;
  }
  static __device__ __forceinline__ Factor factor(Scale s) {
    Factor f;
    f.s = (min(s.v + 66u, 254u) << 7) * 0x00010001u;
    return f;
  }
  static __device__ __forceinline__ void decode(const u32* q, int i, const Factor& f, u32* p) { e2m1(q[i], f.s, p); }
  static __device__ __forceinline__ float undo() { return 1152921504606846976.f; }  // 2^60
};

template <int GROUP>
struct Format<MXFP8, GROUP> {
  static constexpr int UNIT = 64, BLOCKS = 2;
  struct Scale { u32 v; };
  struct Factor { u32 s; };
  static __device__ __forceinline__ Scale load(const void* scales, const void*, long row, int K, int unit, int t) {
    Scale s;
    s.v = __ldg((const u8*)scales + row * (K / 32) + unit * 2 + (t >> 1));
    return s;
  }
  static __device__ __forceinline__ Factor factor(Scale s) {
    Factor f;
    f.s = (min(s.v + 60u, 254u) << 7) * 0x00010001u;
    return f;
  }
  static __device__ __forceinline__ void word(u32 q, const Factor& f, u32* p) {
    p[0] = mul2(((q << 8) & 0x80008000u) | ((q << 4) & 0x07F007F0u), f.s);
    p[1] = mul2((q & 0x80008000u) | ((q >> 4) & 0x07F007F0u), f.s);
  }
  static __device__ __forceinline__ void decode(const u32* q, int i, const Factor& f, u32* p) {
    word(q[(2 * i) & 3], f, p);
    word(q[(2 * i + 1) & 3], f, p + 2);
  }
  static __device__ __forceinline__ float undo() { return 1152921504606846976.f; }  // 2^60
};

// A scale and a bias in bfloat16 for GROUP weights.
template <int GROUP>
struct Affine {
  struct Scale { u32 v; };  // scale | bias << 16
  struct Factor { u32 s, b; };
  static __device__ __forceinline__ Scale at(const void* scales, const void* biases, long index) {
    Scale s;
    s.v = __ldg((const u16*)scales + index) | ((u32)__ldg((const u16*)biases + index) << 16);
    return s;
  }
  static __device__ __forceinline__ Factor factor(Scale s) {
    Factor f;
    f.s = permute(s.v, 0, 0x1010);
    f.b = permute(s.v, 0, 0x3232);
    return f;
  }
  static __device__ __forceinline__ float undo() { return 1.f; }
  // Codes 0..15 in the low bits of 0x4300 are 128 + code; 128 is then taken off.
  static __device__ __forceinline__ u32 nibbles(u32 q) {
    return fma2((q & 0x000F000Fu) | 0x43004300u, 0x3F803F80u, 0xC300C300u);
  }
};

template <int GROUP>
struct Format<AFFINE4, GROUP> : Affine<GROUP> {
  typedef Affine<GROUP> A;
  static constexpr int UNIT = 128, BLOCKS = 4;
  static __device__ __forceinline__ typename A::Scale load(
      const void* scales, const void* biases, long row, int K, int unit, int t) {
    return A::at(scales, biases, row * (K / GROUP) + (unit * 128 + t * 32) / GROUP);
  }
  static __device__ __forceinline__ void decode(const u32* q, int i, const typename A::Factor& f, u32* p) {
#pragma unroll
    for (int j = 0; j < 4; ++j) p[j] = fma2(A::nibbles(q[i] >> (4 * j)), f.s, f.b);
  }
};

template <int GROUP>
struct Format<AFFINE8, GROUP> : Affine<GROUP> {
  typedef Affine<GROUP> A;
  static constexpr int UNIT = 64, BLOCKS = 2;
  static __device__ __forceinline__ typename A::Scale load(
      const void* scales, const void* biases, long row, int K, int unit, int t) {
    return A::at(scales, biases, row * (K / GROUP) + (unit * 64 + t * 16) / GROUP);
  }
  // The low 7 bits in those of 0x4300 are 128 + code; where the eighth is not set, 128 (0x80 · 0x186 is its bits) is taken off.
  static __device__ __forceinline__ u32 bytes(u32 q, const typename A::Factor& f) {
    const u32 less = (~q & 0x00800080u) * 0x186u;
    return fma2(fma2((q & 0x007F007Fu) | 0x43004300u, 0x3F803F80u, less), f.s, f.b);
  }
  static __device__ __forceinline__ void word(u32 q, const typename A::Factor& f, u32* p) {
    p[0] = bytes(q, f);
    p[1] = bytes(q >> 8, f);
  }
  static __device__ __forceinline__ void decode(const u32* q, int i, const typename A::Factor& f, u32* p) {
    word(q[(2 * i) & 3], f, p);
    word(q[(2 * i + 1) & 3], f, p + 2);
  }
};

// 8 activations in the order of a decoded block.
template <int UNIT>
__device__ __forceinline__ uint4 pairs_of(uint4 v) {
  uint4 r;
  if (UNIT == 64) {
    r.x = permute(v.x, v.y, 0x5410);
    r.y = permute(v.x, v.y, 0x7632);
    r.z = permute(v.z, v.w, 0x5410);
    r.w = permute(v.z, v.w, 0x7632);
  } else {
    r.x = permute(v.x, v.z, 0x5410);
    r.y = permute(v.x, v.z, 0x7632);
    r.z = permute(v.y, v.w, 0x5410);
    r.w = permute(v.y, v.w, 0x7632);
  }
  return r;
}

}  // namespace arriero
