// What stands for warpgroup.cu. What is asynchronous happens as late as it may: products when they are waited for, copies
// when a thread finds that it must wait for them, so that whatever is overwritten or read too early is seen.
namespace arriero {

constexpr u32 SHARED_BASE = 4096;
inline u32 shared_at(const void* p) { return SHARED_BASE + (u32)((const char*)p - shared_); }

inline int warp_of_block() { return threadIdx.x >> 5; }

struct Barrier { u16 count, missing; int bytes : 24; unsigned phase : 8; };
static_assert(sizeof(Barrier) == 8, "as large as the device's");
inline void settle(Barrier& b) {
  if (b.missing == 0 && b.bytes == 0) b.missing = b.count, ++b.phase;
  fibers::changed = true;
}
inline void barrier_begin(u64* barrier, u32 count) { *(Barrier*)barrier = {(u16)count, (u16)count, 0, 0}; }
inline void barriers_begun() {}
inline void barrier_arrive(u64* barrier) {
  Barrier& b = *(Barrier*)barrier;
  --b.missing;
  settle(b);
}
// The same place in another block of the cluster.
inline char* place_in(const void* p, u32 block) { return memories_[block] + ((const char*)p - shared_); }
inline void barrier_arrive(u64* barrier, u32 block) { barrier_arrive((u64*)place_in(barrier, block)); }
inline void barrier_announce(u64* barrier, u32 bytes) {
  ((Barrier*)barrier)->bytes += bytes;
  barrier_arrive(barrier);
}
struct Copy { void* to; const void* from; u32 bytes; u64* barrier; };
static Copy copies[64];
static int copies_open = 0;
inline void copy_tile(void* to, const void* from, u32 bytes, u64* barrier) { copies[copies_open++] = {to, from, bytes, barrier}; }
inline void barrier_wait(u64* barrier, u32 parity) {
  while ((((Barrier*)barrier)->phase & 1) == parity) {
    if (copies_open) {
      const Copy c = copies[0];
      memmove(copies, copies + 1, --copies_open * sizeof(Copy));
      memcpy(c.to, c.from, c.bytes);
      ((Barrier*)c.barrier)->bytes -= c.bytes;
      settle(*(Barrier*)c.barrier);
    }
    fibers::wait(fibers::POLL);
  }
}

inline void copy_tile(void* to, const void* from, u32 bytes, u64* barrier, u16 blocks) {
  for (u32 block = 0; block < CLUSTER; ++block)
    if (blocks >> block & 1) copy_tile(place_in(to, block), from, bytes, (u64*)place_in(barrier, block));
}
inline void cluster_meets() { fibers::wait(CLUSTER == 1 ? fibers::BLOCK : fibers::GATHERED); }
inline u32 block_of_cluster() { return rank_; }

// Source of the bits: PTX ISA, matrix descriptor.
inline u64 describe(u32 address) { return (u64)(address & 0x3FFFF) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62; }
// Number k of column n.
inline float described(u64 d, int n, int k) {
  u32 at = (u32)(d & 0x3FFF) * 16 + n / 8 * ((u32)(d >> 32 & 0x3FFF) * 16) + n % 8 * 128 + k * 2;
  if (d >> 62 != 1) return NAN;
  return number(*(const u16*)(shared_ + ((at ^ (at >> 7 & 7) << 4) - SHARED_BASE)));
}

struct Multiplication { float* c; int columns; u32 a[2][8]; u64 b; int group; };
static Multiplication multiplications[fibers::MOST][16];
static int multiplications_open[fibers::MOST], groups_closed[fibers::MOST];
inline void warpgroup_begin() {}
inline void warpgroup_close() { ++groups_closed[fibers::block.current]; }
template <int C>
inline void warpgroup_mma(float (&c)[C], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  const int me = fibers::block.current, row = me & ~3 & 31;
  const fibers::Slot* w = fibers::exchange({a0, a1, a2, a3});
  Multiplication m{c, C * 2, {}, b, groups_closed[me]};
  // Rows g and g + 8 of A, whose parts lie in four threads.
  for (int e = 0; e < 2; ++e)
    for (int half = 0; half < 2; ++half)
      for (int t = 0; t < 4; ++t) m.a[e][half * 4 + t] = w[row + t].words[half * 2 + e];
  multiplications[me][multiplications_open[me]++] = m;
}
template <int OPEN>
inline void warpgroup_wait() {
  const int me = fibers::block.current, t = me & 3;
  int kept = 0;
  for (int i = 0; i < multiplications_open[me]; ++i) {
    const Multiplication& m = multiplications[me][i];
    if (m.group >= groups_closed[me] - OPEN) {
      multiplications[me][kept++] = m;
      continue;
    }
    for (int j = 0; j < m.columns / 8; ++j)
      for (int column = 0; column < 2; ++column)
        for (int k = 0; k < 16; ++k) {
          const float b = described(m.b, j * 8 + t * 2 + column, k);
          for (int e = 0; e < 2; ++e) m.c[j * 4 + e * 2 + column] += half_of(m.a[e][k >> 1], k & 1) * b;
        }
  }
  multiplications_open[me] = kept;
  fibers::exchange({});  // a warp waits together
}
template <int C> inline void warpgroup_settled(float (&)[C]) {}
template <int REGISTERS> inline void registers_keep() {}
template <int REGISTERS> inline void registers_take() {}

inline void store_columns(void* to, u32 m0, u32 m1, u32 m2, u32 m3) {
  const int me = fibers::block.current & 31;
  const u64 place = (u64)to;
  const fibers::Slot* w = fibers::exchange({m0, m1, m2, m3, (u32)place, (u32)(place >> 32)});
  // This lane's own column of its own matrix.
  const int matrix = me >> 3, column = me & 7;
  for (int row = 0; row < 8; ++row) {
    const u32 both = w[row * 4 + (column >> 1)].words[matrix];
    ((u16*)to)[row] = column & 1 ? both >> 16 : both & 0xffff;
  }
}

}  // namespace arriero
