#include "pool.h"

#include <atomic>
#include <chrono>
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

int env_int(const char* name, int fallback) {
  const char* e = std::getenv(name);
  if (!e || !*e) return fallback;
  const int v = std::atoi(e);
  return v > 0 ? v : fallback;
}

// Cores the cgroup's quota pays for, rounded up; 0 where there is no quota.
int quota_cores() {
  std::ifstream v2("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (v2 >> quota >> period) {
    if (quota == "max" || period <= 0) return 0;
    return (int)(std::atof(quota.c_str()) / period + 0.999);
  }
  double q = -1, p = 0;
  std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> q;
  std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> p;
  return q > 0 && p > 0 ? (int)(q / p + 0.999) : 0;
}

class Pool {
 public:
  Pool() {
    set_spin(env_int("ARRIERO_SPIN_US", 200));
    start(env_int("ARRIERO_THREADS", usable_cores()));
  }
  int threads() const { return n_.load(std::memory_order_relaxed); }
  void set_spin(int us) { spin_.store(us < 0 ? 0 : us, std::memory_order_relaxed); }
  void resize(int n) {
    std::lock_guard<std::mutex> lk(busy_);
    stop();
    start(n);
  }
  void run(int tasks, void (*f)(void*, int), void* ctx) {
    if (tasks <= 1 || threads() == 1 || inside_ || !busy_.try_lock()) {
      for (int i = 0; i < tasks; i++) f(ctx, i);
      return;
    }
    fn_ = f;
    ctx_ = ctx;
    tasks_ = tasks;
    next_.store(0, std::memory_order_relaxed);
    state_.store(kOpen, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> lk(m_); }
      wake_.notify_all();
    }
    inside_ = true;
    for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks;) f(ctx, i);
    inside_ = false;
    // Only workers that have come in are waited for: one that the system has not scheduled costs nothing.
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int it = 0; state_.load(std::memory_order_acquire) != 0;) {
      relax();
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
    for (int i = 1; i < n; i++) workers_.emplace_back([this, g = generation_.load()] { loop(g); });
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
  void loop(unsigned seen) {
    inside_ = true;
    for (;;) {
      using clock = std::chrono::steady_clock;
      const auto until = clock::now() + std::chrono::microseconds(spin_.load(std::memory_order_relaxed));
      for (unsigned it = 1; generation_.load(std::memory_order_acquire) == seen; it++) {
        relax();
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
      for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) fn_(ctx_, i);
      state_.fetch_sub(1, std::memory_order_release);
    }
  }

  static thread_local bool inside_;  // this thread runs a task: what it starts runs in it
  static constexpr unsigned kOpen = 1u << 31;
  std::atomic<int> n_{1}, spin_{200};
  bool quit_ = false;
  std::vector<std::thread> workers_;
  std::mutex m_, busy_;
  std::condition_variable wake_;
  std::atomic<unsigned> generation_{0};
  std::atomic<unsigned> state_{0};  // the open bit and the number of workers inside
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  void (*fn_)(void*, int) = nullptr;
  void* ctx_ = nullptr;
  int tasks_ = 0;
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

void pool_run(int n, void (*f)(void*, int), void* ctx) { pool().run(n, f, ctx); }
int pool_threads() { return pool().threads(); }
void pool_resize(int threads) { pool().resize(threads); }
void pool_set_spin(int us) { pool().set_spin(us); }

int usable_cores() {
  int n = (int)std::thread::hardware_concurrency();
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) n = CPU_COUNT(&set);
#endif
  const int q = quota_cores();
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
