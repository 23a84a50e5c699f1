// A persistent fork-join pool and per-thread scratch memory. Nothing here is inline except what is internal to each
// translation unit: units compiled for different instruction sets must not share a function body.
#pragma once
#include <cstddef>
#include <cstdint>

namespace arriero {

// What a thread will read next, in stretches side by side that are `bytes` long each. While it has nothing else to do it
// asks memory for them, which would stand still meanwhile. Nothing is read through these pointers.
constexpr int kStretches = 4;
struct Coming {
  const uint8_t* from[kStretches];
  int n;
  size_t bytes;
};
// f(ctx, task) for each task in [0, n), to each thread its own part of them in order, then one by one what others have
// not come to; the caller takes part. Nested or concurrent calls run in the calling thread. coming, of `threads` threads:
// for when the tasks are done; null leaves what was said last.
void pool_run(int n, void (*f)(void*, int), void* ctx, const Coming* coming = nullptr, int threads = 0);
int pool_threads();
void pool_resize(int threads);
void pool_set_spin(int microseconds);
const char* pool_problem();  // what is wrong with ARRIERO_THREADS or ARRIERO_SPIN_US, or ""
int usable_cores();          // by affinity and quota
int quota_cores(const char* root);  // cores that the cgroups seen below root pay for, rounded up; 0: no quota

// Grow-only memory of the calling thread, 64-byte aligned. A slot's content dies at the next request for that slot.
enum Slot { kRows = 0, kTile, kScales, kAcc, kPart, kQuery, kQuant, kLayer, kPasses, kPrepared, kStack, kSlots };
void* scratch(Slot slot, size_t bytes);

namespace {
template <class F>
[[maybe_unused]] inline void parallel(int n, const F& f, const Coming* coming = nullptr, int threads = 0) {
  pool_run(n, [](void* c, int i) { (*static_cast<const F*>(c))(i); }, (void*)&f, coming, threads);
}
}  // namespace

}  // namespace arriero
