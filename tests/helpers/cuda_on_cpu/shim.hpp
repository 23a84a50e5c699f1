// What the kernels use of CUDA, for a CPU. Threads of a block are fibers that run one after another, in an order that a
// seed shuffles, until each waits for its warp or its block. A collective that not all threads of a warp or block reach
// is reported, and shared memory is poisoned before each block.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

// Few and small headers: most of a kernel's compilation would be theirs.
template <class A, class B>
inline auto max(A a, B b) -> decltype(true ? a : b) { return a < b ? b : a; }
template <class A, class B>
inline auto min(A a, B b) -> decltype(true ? a : b) { return b < a ? b : a; }
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __shared__ static

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct dim3_ { int x, y, z; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct __nv_bfloat16 { uint16_t bits; };
inline float as_float(uint32_t v) { float f; memcpy(&f, &v, 4); return f; }
inline uint32_t as_bits(float f) { uint32_t v; memcpy(&v, &f, 4); return v; }
inline uint16_t to_bf16(float f) {
  uint32_t v = as_bits(f);
  if (f != f) return 0x7fff;
  return (v + 0x7fff + ((v >> 16) & 1)) >> 16;
}
inline __nv_bfloat16 __float2bfloat16(float f) { return {to_bf16(f)}; }
inline float __bfloat162float(__nv_bfloat16 v) { return as_float((uint32_t)v.bits << 16); }
inline float __uint_as_float(unsigned v) { return as_float(v); }
inline unsigned __float_as_uint(float v) { return as_bits(v); }
inline float __int_as_float(int v) { return as_float((uint32_t)v); }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  uint64_t both = a | ((uint64_t)b << 32);
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= (unsigned)((both >> (8 * ((s >> (4 * i)) & 7))) & 0xff) << (8 * i);
  return r;
}
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline void __stcg(T* p, T v) { *p = v; }
inline void __threadfence() {}
inline unsigned atomicAdd(unsigned* p, unsigned v) { unsigned old = *p; *p += v; return old; }

namespace fibers {
#if defined(__x86_64__)
// ucontext asks the kernel to save signal masks at every switch, which here would be most of the time.
typedef void* Context;
extern "C" void fiber_switch(void** from, void* to);
asm(R"(
.text
.type fiber_switch,@function
fiber_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
inline void prepare(Context& c, char* stack, size_t size, void (*enter)()) {
  void** top = (void**)(((uintptr_t)stack + size) & ~(uintptr_t)15);
  *--top = nullptr;         // where enter() would return to; keeps the stack aligned as after a call
  *--top = (void*)enter;
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  c = top;
}
inline void change(Context& from, Context& to) { fiber_switch(&from, to); }
#else
typedef ucontext_t Context;
inline void prepare(Context& c, char* stack, size_t size, void (*enter)()) {
  getcontext(&c);
  c.uc_stack.ss_sp = stack;
  c.uc_stack.ss_size = size;
  c.uc_link = nullptr;
  makecontext(&c, enter, 0);
}
inline void change(Context& from, Context& to) { swapcontext(&from, &to); }
#endif

enum State { READY, WARP, BLOCK, GATHERED, POLL, DONE };
static bool changed;  // something that a thread polls
struct Fiber { Context context; State state; int parity; };
constexpr size_t STACK = 128 << 10;
constexpr int MOST = 1024;
struct Block {
  Fiber fibers[MOST];
  char* stacks;
  Context home;
  int current;
  void (*entry)();
};
static Block block;
struct Slot { unsigned words[8]; };
static Slot slots[2][MOST];

inline void wait(State state) {
  Fiber& f = block.fibers[block.current];
  f.state = state;
  change(f.context, block.home);
}
// Every lane's words, once all lanes of the warp have brought theirs.
inline const Slot* exchange(const Slot& mine) {
  int me = block.current;
  Fiber& f = block.fibers[me];
  Slot* buffer = slots[f.parity];
  f.parity ^= 1;
  buffer[me] = mine;
  wait(WARP);
  return &buffer[me / 32 * 32];
}
}  // namespace fibers

static dim3_ threadIdx, blockIdx, blockDim, gridDim;
inline void __syncthreads() { fibers::wait(fibers::BLOCK); }
inline float __shfl_xor_sync(unsigned, float v, int other) {
  int lane = threadIdx.x & 31;
  fibers::Slot s{};
  s.words[0] = as_bits(v);
  return as_float(fibers::exchange(s)[lane ^ other].words[0]);
}
inline unsigned __shfl_xor_sync(unsigned, unsigned v, int other) {
  return as_bits(__shfl_xor_sync(~0u, as_float(v), other));
}
inline void __syncwarp() { fibers::exchange({}); }
inline unsigned __shfl_up_sync(unsigned, unsigned v, unsigned by) {
  unsigned lane = threadIdx.x & 31;
  fibers::Slot s{};
  s.words[0] = v;
  return fibers::exchange(s)[lane >= by ? lane - by : lane].words[0];
}

// Blocks of a cluster run together, each with memory of its own.
constexpr int MOST_BLOCKS = 2;
alignas(16) char memories_[MOST_BLOCKS][256 << 10];
static int rank_ = 0;
#define shared_ (memories_[rank_])

namespace arriero {
typedef unsigned int u32;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef __nv_bfloat16 bf16;
inline float low(u32 v) { return as_float(v << 16); }
inline float high(u32 v) { return as_float(v & 0xffff0000u); }
inline float number(u16 v) { return as_float((u32)v << 16); }
inline u32 pair(float l, float h) { return to_bf16(l) | ((u32)to_bf16(h) << 16); }
inline u32 mul2(u32 a, u32 b) { return pair(low(a) * low(b), high(a) * high(b)); }
inline u32 fma2(u32 a, u32 b, u32 c) {
  return pair((float)((double)low(a) * low(b) + low(c)), (float)((double)high(a) * high(b) + high(c)));
}
inline u32 permute(u32 a, u32 b, u32 s) { return __byte_perm(a, b, s); }
inline float warp_sum(float v) {
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
static int phase_ = 0;
// A block alone waits for nobody, and so goes through all of a kernel's parts at once.
inline bool phase(int part) { return gridDim.x == 1 ? phase_ == 0 : part == phase_; }
struct Gathering {
  Gathering(void*, u32) {}
  void arrive() {
    if (gridDim.x == 1) __syncthreads();
  }
  void wait() const { ((Gathering*)this)->arrive(); }
};
inline u64 stream_policy() { return 0; }
inline uint4 load_stream(const void* p, u64) { return *(const uint4*)p; }
inline void copy_stream(void* to, const void* from, u64) { memcpy(to, from, 16); }
inline void copy_through(void* to, const void* from) { memcpy(to, from, 16); }
inline void close_copies() {}
template <int OPEN> inline void wait_copies() {}
inline float load_now(const float* p) { return *p; }
inline u32 count_arrival(u32* count) { return (*count)++; }
inline float times(float a, float b) { return a * b; }
inline float half_of(u32 v, int i) { return i ? high(v) : low(v); }
inline void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const fibers::Slot* w = fibers::exchange({a0, a1, a2, a3, b0, b1, 0, 0});
  int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  for (int e = 0; e < 4; ++e) {
    int column = 2 * t + (e & 1);
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      int owner = (k & 7) >> 1, part = k >> 3;
      u32 a = w[g * 4 + owner].words[2 * part + (e >> 1)], b = w[column * 4 + owner].words[4 + part];
      sum += half_of(a, k & 1) * half_of(b, k & 1);
    }
    c[e] += sum;
  }
}
}  // namespace arriero

namespace fibers {
inline void enter() {
  block.entry();
  block.fibers[block.current].state = DONE;
  change(block.fibers[block.current].context, block.home);
}
// Runs the blocks of a cluster, one in most kernels, which are neighbours along y; what is wrong with their collectives, or
// null.
inline const char* run(int each, void (*entry)(), unsigned seed, int cluster = 1) {
  const int threads = each * cluster, row = blockIdx.y;
  uint64_t random = seed * 2654435761u + 1;
  memset(memories_, 0xff, cluster * sizeof memories_[0]);
  if (!block.stacks) block.stacks = (char*)malloc(MOST * STACK);
  block.entry = entry;
  for (int i = 0; i < threads; ++i) {
    Fiber& f = block.fibers[i];
    f.state = READY;
    f.parity = 0;
    prepare(f.context, block.stacks + i * STACK, STACK, enter);
  }
  int order[MOST];
  for (int i = 0; i < threads; ++i) order[i] = i;
  for (;;) {
    for (int i = threads - 1; i > 0; --i) {
      random = random * 6364136223846793005u + 1442695040888963407u;
      int j = (random >> 33) % (i + 1), k = order[i];
      order[i] = order[j];
      order[j] = k;
    }
    for (int o = 0; o < threads; ++o) {
      int i = order[o];
      if (block.fibers[i].state != READY) continue;
      block.current = i;
      rank_ = i / each;
      threadIdx = {i % each, 0, 0};
      blockIdx.y = row + rank_;
      change(block.home, block.fibers[i].context);
    }
    bool moved = changed;
    int gathered = 0, done = 0;
    changed = false;
    for (int first = 0; first < threads; first += each) {
      int waiting = 0, left = 0;
      for (int w = first; w < first + each; w += 32) {
        int at_warp = 0;
        for (int i = w; i < w + 32; ++i) {
          at_warp += block.fibers[i].state == WARP;
          waiting += block.fibers[i].state == BLOCK;
          gathered += block.fibers[i].state == GATHERED;
          if (block.fibers[i].state == POLL) block.fibers[i].state = READY;
          left += block.fibers[i].state == DONE;
        }
        if (at_warp == 32) {
          for (int i = w; i < w + 32; ++i) block.fibers[i].state = READY;
          moved = true;
        }
      }
      if (waiting && waiting + left == each) {
        if (left) return "some threads left before a barrier of the block";
        for (int i = first; i < first + each; ++i) block.fibers[i].state = READY;
        moved = true;
      }
      done += left;
    }
    if (done == threads) return nullptr;
    if (gathered == threads) {
      for (int i = 0; i < threads; ++i) block.fibers[i].state = READY;
      moved = true;
    }
    if (!moved) return "threads wait for a collective that others do not reach";
  }
}
}  // namespace fibers
