#include "successors.h"

#include <vector>

namespace arriero {
namespace {

// A job's name, that of the one behind it and how that begins. Two jobs that fall on one place take turns there.
struct Entry {
  const uint8_t *job = nullptr, *next = nullptr;
  std::vector<Coming> begins;
};
constexpr size_t kEntries = 1024;  // several times the products of a step
struct Known {
  std::vector<Entry> entries;
  const uint8_t* last = nullptr;

  Entry& of(const uint8_t* job) {
    if (entries.empty()) entries.resize(kEntries);
    return entries[((uintptr_t)job >> 6) * 0x9e3779b97f4a7c15ull >> 32 & (kEntries - 1)];
  }
};
thread_local Known known;

}  // namespace

Coming* beginning_of(const uint8_t* job, int threads) {
  const uint8_t* before = known.last;
  known.last = job;
  if (!before) return nullptr;
  Entry& e = known.of(before);
  if (e.job == before && e.next == job && (int)e.begins.size() == threads) return nullptr;
  e.job = before, e.next = job;
  e.begins.assign(threads, Coming{});
  return e.begins.data();
}
const Coming* successor_of(const uint8_t* job, int threads) {
  const Entry& e = known.of(job);
  return e.job == job && (int)e.begins.size() == threads ? e.begins.data() : nullptr;
}

}  // namespace arriero
