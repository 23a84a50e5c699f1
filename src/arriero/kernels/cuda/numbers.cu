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
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
#else
  // Before there was such an instruction: with −0 added, every product keeps its sign.
  asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
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

// A product that stays one: it is not contracted with a sum behind it, whatever the code around it.
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }

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

// 16 bytes on their way to shared memory, past the level-1 cache and registers. A thread's copies are waited for in
// groups, in order; other threads see them behind a barrier of theirs.
__device__ __forceinline__ void copy_stream(void* to, const void* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
               ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "l"(policy) : "memory");
}
__device__ __forceinline__ void copy_through(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int OPEN>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(OPEN) : "memory"); }
// A load that the compiler does not move to where its result is used.
__device__ __forceinline__ float load_now(const float* p) {
  float v;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}

// One more has arrived, of those that were counted: what its block wrote before a barrier is seen by the last to arrive.
__device__ __forceinline__ u32 count_arrival(u32* count) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
  return before;
}

// All blocks of a grid, which stand on the device at once, wait for one another `times` times. `state` counts arrivals and
// never goes back, so that between launches it is a multiple of grid and times.
struct Gathering {
  u64* state;
  u64 target;
  __device__ __forceinline__ Gathering(void* counts, u32 times) : state((u64*)counts + times) {
    if (threadIdx.x == 0) {
      asm volatile("ld.relaxed.gpu.u64 %0, [%1];" : "=l"(target) : "l"(state) : "memory");
      target -= target % (gridDim.x * times);
    }
  }
  __device__ __forceinline__ void arrive() {
    __syncthreads();
    if (threadIdx.x == 0) {
      target += gridDim.x;
      asm volatile("fence.acq_rel.gpu;\n\tred.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(state), "l"(1ull) : "memory");
    }
  }
  __device__ __forceinline__ void wait() const {
    if (threadIdx.x == 0) {
      u64 now;
      do asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(now) : "l"(state) : "memory");
      while (now < target);
    }
    __syncthreads();
  }
};
// Tests execute the parts between such meetings one after another, each for all blocks.
__device__ __forceinline__ bool phase(int) { return true; }

}  // namespace arriero
