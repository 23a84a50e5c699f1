// What all kernels share: pairs of bfloat16 in one register, the tensor cores' product, loads that pass through once.
#include <cuda_bf16.h>

// MLX generates the kernel's signature; redefining __global__ is how a launch bound gets into it.
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(THREADS, RESIDENT)

namespace arriero {

typedef unsigned int u32;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef __nv_bfloat16 bf16;

__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
__device__ __forceinline__ u32 pair(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ float number(u16 v) { return __uint_as_float((u32)v << 16); }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

// c += A B, A 16x16 and B 16x8 in bfloat16, c in float32.
__device__ __forceinline__ void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Weights pass through once: evict-first keeps code, activations and caches in the L2 cache.
__device__ __forceinline__ u64 stream_policy() {
  u64 p;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
  return p;
}
__device__ __forceinline__ uint4 load_stream(const void* p, u64 policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p), "l"(policy));
  return v;
}

// 16 bytes into shared memory without a register in between; zeros where nothing is `there`. copies_done() waits for those
// of the thread that calls it.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool there) {
  u32 at = (u32)__cvta_generic_to_shared(to), n = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(n) : "memory");
}
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Asks for `bytes` bytes to be brought into the L2 cache; one warp calls it. A bulk prefetch is an instruction of the whole
// warp, so one lane asks for PIECE bytes at a time; devices without them are asked line by line.
#ifndef PIECE
#define PIECE 16384u
#endif
__device__ __forceinline__ void fetch(const void* from, u32 bytes) {
  const u64 first = (u64)from & ~15ull;
#if __CUDA_ARCH__ >= 900
  const u32 all = ((u32)((u64)from - first) + bytes) & ~15u;
  if ((threadIdx.x & 31) == 0) {
#pragma unroll 1
    for (u32 at = 0; at < all; at += PIECE) {
      const u32 n = min(PIECE, all - at);
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(first + at), "r"(n) : "memory");
    }
  }
#else
#pragma unroll 1
  for (u32 at = (threadIdx.x & 31) * 128; at < bytes; at += 32 * 128)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(first + at));
#endif
}

// The same for this block's part of them.
__device__ __forceinline__ void prefetch(const void* from, u32 bytes, u32 block, u32 blocks) {
  const u32 share = (bytes / blocks + 127) & ~127u, first = block * share;
  if (first < bytes) fetch((const char*)from + first, min(share, bytes - first));
}

// The matrix of the product that comes next: what of it is brought into the L2 cache, from its beginning and, where gate
// and up are multiplied side by side, again from `second`. Null for none.
struct Ahead {
  const void* w;
  const void* scales;
  u32 bytes, scale_bytes;
  u64 second, scale_second;
  __device__ __forceinline__ void fetch(u32 block, u32 blocks) const {  // one warp's work
    if (!w) return;
    prefetch(w, bytes, block, blocks);
    prefetch(scales, scale_bytes, block, blocks);
    if (second) {
      prefetch((const char*)w + second, bytes, block, blocks);
      prefetch((const char*)scales + scale_second, scale_bytes, block, blocks);
    }
  }
};

}  // namespace arriero
