#include "bandwidth.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <new>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "pool.h"

namespace arriero {
namespace {

typedef uint64_t Two __attribute__((vector_size(16)));

// A thread's part, as so many streams side by side, AHEAD bytes prefetched. Returns what depends on every byte.
template <int STREAMS, int AHEAD>
uint64_t read_part(const char* p, size_t n) {
  const size_t each = n / STREAMS / 64 * 64;
  Two sums[4] = {};
  for (size_t i = 0; i < each; i += 64)
#pragma GCC unroll 8
    for (int s = 0; s < STREAMS; s++) {
      const char* at = p + s * each + i;
      if (AHEAD) __builtin_prefetch(at + AHEAD);
      Two v[4];
      std::memcpy(v, at, sizeof v);
      for (int j = 0; j < 4; j++) sums[j] += v[j];
    }
  for (int j = 1; j < 4; j++) sums[0] += sums[j];
  return sums[0][0] + sums[0][1];
}

}  // namespace

double read_bandwidth(double seconds) {
  using clock = std::chrono::steady_clock;
  constexpr size_t page = size_t(2) << 20, bytes = 256 * page;
  const std::unique_ptr<char, void (*)(void*)> memory((char*)std::aligned_alloc(page, bytes), std::free);
  if (!memory) throw std::bad_alloc();
#if defined(__linux__)
  madvise(memory.get(), bytes, MADV_HUGEPAGE);
#endif
  std::memset(memory.get(), 1, bytes);
  const int threads = pool_threads(), pieces = 4 * threads;
  const size_t part = bytes / pieces / 64 * 64;
  std::vector<uint64_t> kept(pieces);
  double best = 0;
  uint64_t (*const patterns[])(const char*, size_t) = {read_part<1, 0>,    read_part<1, 4096>, read_part<2, 2048>,
                                                       read_part<4, 0>,    read_part<4, 2048>, read_part<8, 1024>};
  for (const auto pattern : patterns) {
    const auto start = clock::now();
    do {
      const auto from = clock::now();
      parallel(pieces, [&](int i) { kept[i] += pattern(memory.get() + i * part, part); });
      best = std::max(best, pieces * part / std::chrono::duration<double>(clock::now() - from).count());
    } while (std::chrono::duration<double>(clock::now() - start).count() < seconds / std::size(patterns));
  }
  volatile uint64_t sink = kept[0];
  (void)sink;
  return best;
}

}  // namespace arriero
