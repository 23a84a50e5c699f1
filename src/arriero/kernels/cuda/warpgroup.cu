// What GPUs of compute capability 9.0 (sm_90a) have for warpgroups, four warps each: asynchronous products with one side
// in shared memory, copies of whole tiles, and barriers in shared memory that both report to. Source: PTX ISA, wgmma,
// cp.async.bulk, mbarrier, stmatrix.

// Blocks of a cluster, neighbours along y, reach into one another's shared memory.
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(THREADS, RESIDENT) __attribute__((cluster_dims(1, CLUSTER, 1)))

namespace arriero {

__device__ __forceinline__ u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// This warp's number, which the compiler then knows to be its threads' own: what follows from it stays in uniform registers.
__device__ __forceinline__ int warp_of_block() { return __shfl_sync(~0u, threadIdx.x >> 5, 0); }

// A barrier of 8 bytes. A phase ends when `count` have arrived and all bytes that were announced are there.
__device__ __forceinline__ void barrier_begin(u64* barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_at(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void barriers_begun() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_at(barrier)) : "memory");
}
// The same barrier of another block of the cluster.
__device__ __forceinline__ void barrier_arrive(u64* barrier, u32 block) {
  asm volatile(
      "{\n\t.reg .b32 other;\n\tmapa.shared::cluster.u32 other, %0, %1;\n\t"
      "mbarrier.arrive.shared::cluster.b64 _, [other];\n\t}" ::"r"(shared_at(barrier)), "r"(block) : "memory");
}
__device__ __forceinline__ void barrier_announce(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_at(barrier)), "r"(bytes) : "memory");
}
// Until the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@done bra over;\n\tbra again;\nover:\n\t}" ::"r"(shared_at(barrier)), "r"(parity) : "memory");
}
// Contiguous bytes, a multiple of 16, which the barrier counts when they are there.
__device__ __forceinline__ void copy_tile(void* to, const void* from, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_at(to)),
               "l"(from), "r"(bytes), "r"(shared_at(barrier)) : "memory");
}
// The same to the same places of the cluster's blocks that `blocks` has bits for, each of whose barriers counts them.
__device__ __forceinline__ void copy_tile(void* to, const void* from, u32 bytes, u64* barrier, u16 blocks) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
               ::"r"(shared_at(to)), "l"(from), "r"(bytes), "r"(shared_at(barrier)), "h"(blocks) : "memory");
}
// All threads of all blocks of a cluster meet.
__device__ __forceinline__ void cluster_meets() {
  if (CLUSTER == 1) __syncthreads();
  else asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 block_of_cluster() {
  u32 rank = 0;
  if (CLUSTER > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Rows of 128 bytes, eight of which are one pattern of 1,024 bytes, aligned to as many: the 16 bytes at place p of row r
// lie at p ^ (r & 7). Columns of B are rows here.
__device__ __forceinline__ u64 describe(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}

__device__ __forceinline__ void warpgroup_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_close() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int OPEN>
__device__ __forceinline__ void warpgroup_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(OPEN) : "memory"); }

// Sums may be used from here on: the compiler takes them for there once their product was issued, and would move what uses
// them in front of the wait.
template <int C>
__device__ __forceinline__ void warpgroup_settled(float (&c)[C]) {
#pragma unroll
  for (int i = 0; i < C; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// A warpgroup gives registers away, or takes of those that were given; all of its warps do.
template <int REGISTERS>
__device__ __forceinline__ void registers_keep() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
__device__ __forceinline__ void registers_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

#define ARRIERO_8(a, i) "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3]), "+f"(a[i + 4]), "+f"(a[i + 5]), \
                        "+f"(a[i + 6]), "+f"(a[i + 7])
#define ARRIERO_32(a, i) ARRIERO_8(a, i), ARRIERO_8(a, i + 8), ARRIERO_8(a, i + 16), ARRIERO_8(a, i + 24)

// c += A B: A is 64x16, bfloat16 in registers (16 rows a warp, as for mma), B 16 times 64, 128 or 256 columns in shared memory,
// c in float32: of each 8 columns a thread has what mma gives it.
__device__ __forceinline__ void warpgroup_mma(float (&c)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
      "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
      : ARRIERO_32(c, 0)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
__device__ __forceinline__ void warpgroup_mma(float (&c)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
      "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"
      "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
      : ARRIERO_32(c, 0), ARRIERO_32(c, 32)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
__device__ __forceinline__ void warpgroup_mma(float (&c)[128], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
      "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"
      "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,"
      "%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,"
      "%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,"
      "%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, {%128,%129,%130,%131}, %132, 1, 1, 1, 0;"
      : ARRIERO_32(c, 0), ARRIERO_32(c, 32), ARRIERO_32(c, 64), ARRIERO_32(c, 96)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
#undef ARRIERO_32
#undef ARRIERO_8

// Four matrices of 8x8 in the fragments of mma's results, each stored by columns: lane 8 m + i says where column i of
// matrix m goes, 16 bytes.
__device__ __forceinline__ void store_columns(void* to, u32 m0, u32 m1, u32 m2, u32 m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_at(to)), "r"(m0), "r"(m1),
               "r"(m2), "r"(m3) : "memory");
}

}  // namespace arriero
