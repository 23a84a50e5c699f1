#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace arriero {
namespace {

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// How far a thread has come with asking for what it reads next.
struct Asking {
  Coming what{};
  size_t at = 0;
  // Asks for a little, then pauses: requests that find no place in the queue of the first-level cache are dropped.
  void pause() {
    for (int line = 0; line < 4 && at < what.bytes; line++, at += 64)
      for (int i = 0; i < what.n; i++) __builtin_prefetch(what.from[i] + at, 0, 2);
    relax();
  }
};

std::string& problem() {
  static std::string* text = new std::string();
  return *text;
}
int env_int(const char* name, int least, int most, int fallback) {
  const char* e = std::getenv(name);
  if (!e || !*e) return fallback;
  char* end = nullptr;
  const long v = std::strtol(e, &end, 10);
  if (!*end && v >= least && v <= most) return (int)v;
  problem() = std::string(name) + " is '" + e + "'; it must be a whole number from " + std::to_string(least) + " to " +
              std::to_string(most);
  return fallback;
}

// Cores that one group's quota pays for, or a huge number.
double quota_of(const std::string& v2, const std::string& v1) {
  constexpr double none = 1e9;
  std::ifstream max(v2 + "/cpu.max");
  std::string quota;
  double period = 0;
  if (max >> quota >> period) {
    const double q = quota == "max" ? 0 : std::atof(quota.c_str());
    return q > 0 && period > 0 ? q / period : none;
  }
  double q = -1, p = 0;
  std::ifstream(v1 + "/cpu.cfs_quota_us") >> q;
  std::ifstream(v1 + "/cpu.cfs_period_us") >> p;
  return q > 0 && p > 0 ? q / p : none;
}

class Pool {
 public:
  Pool() {
    set_spin(env_int("ARRIERO_SPIN_US", 0, 1000000, 200));
    start(env_int("ARRIERO_THREADS", 1, 4096, usable_cores()));
  }
  int threads() const { return n_.load(std::memory_order_relaxed); }
  void set_spin(int us) { spin_.store(us < 0 ? 0 : us, std::memory_order_relaxed); }
  void resize(int n) {
    std::lock_guard<std::mutex> lk(busy_);
    stop();
    start(n);
  }
  void run(int tasks, void (*f)(void*, int), void* ctx, const Coming* coming, int known) {
    if (tasks <= 1 || threads() == 1 || inside_ || !busy_.try_lock()) {
      for (int i = 0; i < tasks; i++) f(ctx, i);
      return;
    }
    fn_ = f;
    ctx_ = ctx;
    shares_ = std::min(tasks, threads());
    for (long long i = 0; i < shares_; i++) {
      share_[i].next.store((int)(tasks * i / shares_), std::memory_order_relaxed);
      share_[i].end = (int)(tasks * (i + 1) / shares_);
    }
    news_ = coming != nullptr;
    if (news_) {
      own_ = {};
      if (known > 0) own_.what = coming[0];
      for (int i = 1; i < threads(); i++) share_[i].coming = i < known ? coming[i] : Coming{};
    }
    state_.store(kOpen, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> lk(m_); }
      wake_.notify_all();
    }
    inside_ = true;
    work(0);
    inside_ = false;
    // Only workers that have come in are waited for: one that the system has not scheduled costs nothing.
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int it = 0; state_.load(std::memory_order_acquire) != 0;) {
      own_.pause();
      if (++it > 20000) {
        std::this_thread::yield();
        it = 0;
      }
    }
    busy_.unlock();
  }
  void forget_workers() {  // after fork only the calling thread exists
    for (auto& t : workers_) t.detach();
    workers_.clear();
    n_.store(1);
  }

 private:
  void start(int n) {
    if (n < 1) n = 1;
    quit_ = false;
    share_ = std::vector<Share>(n);
    for (int i = 1; i < n; i++) workers_.emplace_back([this, i, g = generation_.load()] { loop(i, g); });
    n_.store(n);
  }
  void stop() {
    {
      std::lock_guard<std::mutex> lk(m_);
      quit_ = true;
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& t : workers_) t.join();
    workers_.clear();
  }
  // A thread takes the tasks of its own share in their order, which lie side by side in memory, then those that others
  // have not come to.
  void work(int own) {
    for (int i = 0; i < shares_; i++) {
      Share& s = share_[(own + i) % shares_];
      while (s.next.load(std::memory_order_relaxed) < s.end) {
        const int task = s.next.fetch_add(1, std::memory_order_relaxed);
        if (task < s.end) fn_(ctx_, task);
      }
    }
  }
  void loop(int own, unsigned seen) {
    inside_ = true;
    Asking asking;
    for (;;) {
      using clock = std::chrono::steady_clock;
      const auto until = clock::now() + std::chrono::microseconds(spin_.load(std::memory_order_relaxed));
      for (unsigned it = 1; generation_.load(std::memory_order_acquire) == seen; it++) {
        asking.pause();
        if (it % 64 || clock::now() < until) continue;
        std::unique_lock<std::mutex> lk(m_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lk, [&] { return generation_.load(std::memory_order_seq_cst) != seen; });
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      }
      seen = generation_.load(std::memory_order_acquire);
      if (quit_) return;
      unsigned st = state_.load(std::memory_order_acquire);
      while ((st & kOpen) && !state_.compare_exchange_weak(st, st + 1, std::memory_order_acq_rel)) {
      }
      if (!(st & kOpen)) continue;
      if (news_) asking = {share_[own].coming};
      work(own);
      state_.fetch_sub(1, std::memory_order_release);
    }
  }

  static thread_local bool inside_;  // this thread runs a task: what it starts runs in it
  static constexpr unsigned kOpen = 1u << 31;
  std::atomic<int> n_{1}, spin_{200};
  std::atomic<bool> quit_{false};  // read by workers that a job woke while stop() sets it
  std::vector<std::thread> workers_;
  std::mutex m_, busy_;
  std::condition_variable wake_;
  std::atomic<unsigned> generation_{0};
  std::atomic<unsigned> state_{0};  // the open bit and the number of workers inside
  struct alignas(64) Share {
    std::atomic<int> next{0};
    int end = 0;
    alignas(64) Coming coming;
  };
  std::vector<Share> share_;  // one per thread
  int shares_ = 0;            // of this job
  alignas(64) std::atomic<int> sleepers_{0};
  void (*fn_)(void*, int) = nullptr;
  void* ctx_ = nullptr;
  bool news_ = false;  // whether the job says what to ask for
  Asking own_;         // of whoever runs a job
};

thread_local bool Pool::inside_ = false;

Pool& pool() {
  static Pool* p = [] {
    auto* q = new Pool();  // never destroyed: workers may outlive static destructors
#if defined(__linux__)
    pthread_atfork(nullptr, nullptr, [] { pool().forget_workers(); });
#endif
    return q;
  }();
  return *p;
}

struct Scratch {
  void* p[kSlots] = {};
  size_t n[kSlots] = {};
  ~Scratch() {
    for (void* q : p) std::free(q);
  }
};
thread_local Scratch scratch_;

}  // namespace

void pool_run(int n, void (*f)(void*, int), void* ctx, const Coming* coming, int threads) {
  pool().run(n, f, ctx, coming, threads);
}
int pool_threads() { return pool().threads(); }
void pool_resize(int threads) { pool().resize(threads); }
void pool_set_spin(int us) { pool().set_spin(us); }

const char* pool_problem() {
  pool();
  return problem().c_str();
}

// A quota binds at every level from the process's group up to the root. In a container the group's path is often that
// of the host and not visible; the container's own quota then stands at the root.
int quota_cores(const char* below) {
  const std::string root = below;
  const std::string base = root + "/sys/fs/cgroup";
  std::string unified = "/", cpu = "/", line;
  for (std::ifstream groups(root + "/proc/self/cgroup"); std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string path = line.substr(second + 1);
    std::string kinds(1, ',');  // for whole words to be found in
    kinds.append(line, first + 1, second - first).back() = ',';
    if (kinds == ",,") unified = path;
    else if (kinds.find(",cpu,") != std::string::npos) cpu = path;
  }
  double cores = 1e9;
  auto climb = [&](std::string path, const std::string& v2, const std::string& v1) {
    for (;; path.erase(path.find_last_of('/'))) {
      if (path == "/") path.clear();
      cores = std::min(cores, quota_of(v2 + path, v1 + path));
      if (path.find('/') == std::string::npos) break;
    }
  };
  climb(unified, base, base + "/none");
  climb(cpu, base + "/none", base + "/cpu");
  return cores < 1e6 ? (int)std::ceil(cores - 1e-9) : 0;
}

int usable_cores() {
  int n = (int)std::thread::hardware_concurrency();
#if defined(__linux__)
  for (int size = 1024; size <= 1 << 20; size *= 4) {  // the kernel refuses a set smaller than its own
    cpu_set_t* set = CPU_ALLOC(size);
    if (!set) break;
    const size_t bytes = CPU_ALLOC_SIZE(size);
    const bool known = sched_getaffinity(0, bytes, set) == 0;
    if (known) n = CPU_COUNT_S(bytes, set);
    CPU_FREE(set);
    if (known) break;
  }
#endif
  const int q = quota_cores("");
  if (q > 0 && q < n) n = q;
  return n < 1 ? 1 : n;
}

void* scratch(Slot slot, size_t bytes) {
  Scratch& s = scratch_;
  if (bytes < 64) bytes = 64;
  if (bytes > s.n[slot]) {
    std::free(s.p[slot]);
    s.n[slot] = (bytes + bytes / 8 + 63) / 64 * 64;
    s.p[slot] = std::aligned_alloc(64, s.n[slot]);
    if (!s.p[slot]) {
      s.n[slot] = 0;
      throw std::bad_alloc();
    }
  }
  return s.p[slot];
}

}  // namespace arriero
