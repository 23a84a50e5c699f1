// Copies of 16 bytes from memory to shared memory that go on while the thread does.
namespace arriero {

__device__ __forceinline__ void begin_copy(void* to, const void* from) {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
#else
  *(uint4*)to = *(const uint4*)from;
#endif
}
__device__ __forceinline__ void end_copies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace arriero
