// Runtime: fibers, scheduler, collective operations, and the memory checker.
// The kernel is compiled with -fsanitize=thread for its instrumentation only;
// the __tsan_* callbacks are defined here and do our own checking. Nothing in
// this file is instrumented.
#include "rt.h"
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>
#if !defined(__x86_64__) && !defined(__aarch64__)
#define MSL_UCONTEXT 1
#endif

#define API extern "C" __attribute__((visibility("default")))

namespace msl {
static const char *img_lo, *img_hi;   // the kernel's shared object in memory
static void (*entry)(void**);

#include "fibers.inc"

// Options, report.
struct Options {
  uint64_t seed, budget;
  double timeout;          // seconds of CPU time
  int32_t shuffle;         // random thread order
  int32_t divergent_simd;  // 0 error, 1 the lanes at one site form the active set
  int32_t races;           // check races
  int32_t cross_tg;        // 1: device memory may be shared between threadgroups
  int32_t uninit;          // check reads of memory nobody wrote
  int32_t exited_barrier;  // 1: returned threads do not count at threadgroup barriers
  int32_t tg_limit;        // bytes of threadgroup memory
  int32_t same_site;       // 1: a collective must be reached at one source position
};
struct Stats { uint64_t threads, threadgroups, switches, simd_ops, barriers, accesses, tg_bytes; };
static Options O;
static Stats S;
static char err[4096];
static uint64_t pcs[2];
static bool failed;

static void set_err(const char* kind, const char* fmt, va_list ap) {
  if (failed) return;
  failed = true;
  int n = snprintf(err, sizeof err, "%s: ", kind);
  n += vsnprintf(err + n, sizeof err - n, fmt, ap);
  if (cur && n < (int)sizeof err - 200) {
    auto& t = cur->info;
    snprintf(err + n, sizeof err - n, " [thread (%u,%u,%u) of threadgroup (%u,%u,%u), simdgroup %u lane %u]", t.pos_tg[0],
             t.pos_tg[1], t.pos_tg[2], t.tg_pos[0], t.tg_pos[1], t.tg_pos[2], t.sg, t.lane);
  }
}
static void sched_fail(const char* kind, const char* fmt, ...) {
  va_list ap; va_start(ap, fmt); set_err(kind, fmt, ap); va_end(ap);
}
void rt_fail(const char* kind, const char* fmt, ...) {
  va_list ap; va_start(ap, fmt); set_err(kind, fmt, ap); va_end(ap);
  if (!pcs[0]) pcs[0] = (uint64_t)((char*)__builtin_return_address(0) - img_lo);
  if (!cur) { fprintf(stderr, "%s\n", err); abort(); }
  to_sched();
  abort();
}

#include "memory.inc"
#include "schedule.inc"
#include "signals.inc"

// Entry points.
struct Buf {
  const char* name;
  void* data;          // caller's memory
  uint64_t bytes;
  int32_t kind;        // 0 in, 1 constant, 2 out, 3 out with init_value (data holds it)
  int32_t item;        // bytes of one element
  int32_t shift;       // place the buffer this many bytes after an aligned address
  int32_t pad_;
  uint64_t unwritten;  // out: bytes nobody wrote
};
struct Dispatch { uint32_t grid[3], tg[3]; };

API int msl_run(void (*fn)(void**), const char* lo, const char* hi, const Dispatch* D, Buf* bufs, int nbuf, const Options* opt, Stats* st, char* msg, int cap, uint64_t* out_pcs) {
  entry = fn; img_lo = lo; img_hi = hi;
  O = *opt; S = Stats{}; failed = false; err[0] = 0; pcs[0] = pcs[1] = 0; g_used = 0; cur = nullptr; last_hit = 0;
  rs = O.seed * 0x9E3779B97F4A7C15ull + 0x1234567; if (!rs) rs = 1;
  for (int i = 0; i < 8; i++) rnd();
  make_fibers();
  if (!grp) grp = (Group*)aligned_alloc(64, (sizeof(Group) * (MAXT / 32) + 63) / 64 * 64);
  if (!tg_arena) tg_arena = (char*)mmap(nullptr, TG_CAP, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  tg_used = 0;
  size_t need = PAD;
  for (int i = 0; i < nbuf; i++) need += (bufs[i].bytes + 3 * PAD) / PAD * PAD + PAD;
  arena_cap = need;
  arena = (char*)mmap(nullptr, need, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  regs.clear(); regs.reserve(256);
  std::vector<void*> ptr(nbuf + 1);
  size_t at = PAD;
  for (int i = 0; i < nbuf; i++) {
    Region r{};
    r.lo = arena + at + bufs[i].shift; r.hi = r.lo + bufs[i].bytes;
    r.kind = bufs[i].kind == 0 ? K_IN : bufs[i].kind == 1 ? K_CONST : K_OUT;
    r.init = bufs[i].kind == 3; r.id = -1;
    r.gran = uint32_t(bufs[i].item > 8 || bufs[i].item < 1 ? 1 : bufs[i].item);
    snprintf(r.name, sizeof r.name, "%s", bufs[i].name);
    if (bufs[i].kind != 2) memcpy(r.lo, bufs[i].data, bufs[i].bytes); else memset(r.lo, 0xff, bufs[i].bytes);
    if (r.kind == K_OUT) new_cells(r);
    regs.push_back(r);
    ptr[i] = r.lo;
    at += (bufs[i].bytes + 3 * PAD) / PAD * PAD + PAD;
  }
  g_bufs = ptr.data();

  const uint32_t* G = D->grid;
  uint32_t T[3], nt[3];
  for (int k = 0; k < 3; k++) { T[k] = D->tg[k] < G[k] ? D->tg[k] : G[k]; nt[k] = (G[k] + T[k] - 1) / T[k]; }
  uint64_t ntg = uint64_t(nt[0]) * nt[1] * nt[2];
  std::vector<uint32_t> order(ntg);
  for (uint64_t i = 0; i < ntg; i++) order[i] = uint32_t(i);
  if (O.shuffle) for (uint64_t i = ntg; i > 1; i--) { uint64_t j = rnd() % i; std::swap(order[i - 1], order[j]); }
  bool ok = true;
  signals(true, O.timeout);
  for (uint64_t o = 0; o < ntg && ok; o++) {
    const uint32_t i = order[o];
    const uint32_t p[3] = {i % nt[0], i / nt[0] % nt[1], i / (nt[0] * nt[1])};
    uint32_t sz[3];
    for (int k = 0; k < 3; k++) { uint32_t left = G[k] - p[k] * T[k]; sz[k] = left < T[k] ? left : T[k]; }
    g_n = int(sz[0] * sz[1] * sz[2]); g_nsg = (g_n + 31) / 32;
    g_tg = i + 1; g_ep[0] = g_ep[1] = 0;
    for (int s = 0; s < g_nsg; s++) { grp[s].first = 32 * s; grp[s].n = g_n - 32 * s < 32 ? g_n - 32 * s : 32; grp[s].ready = grp[s].n; grp[s].done = 0; grp[s].ep[0] = grp[s].ep[1] = 0; }
    for (int t = 0; t < g_n; t++) {
      Fiber& f = fib[t];
      ThreadInfo& q = f.info;
      const uint32_t l[3] = {uint32_t(t) % sz[0], uint32_t(t) / sz[0] % sz[1], uint32_t(t) / (sz[0] * sz[1])};
      for (int k = 0; k < 3; k++) {
        q.pos_tg[k] = l[k]; q.tg_pos[k] = p[k]; q.pos_grid[k] = p[k] * T[k] + l[k];
        q.tgs_per_grid[k] = nt[k]; q.grid[k] = G[k]; q.tptg[k] = sz[k]; q.dispatch_tptg[k] = T[k];
      }
      q.index = t; q.lane = t % 32; q.sg = t / 32; q.sgs = g_nsg; q.dispatch_sgs = (T[0] * T[1] * T[2] + 31) / 32;
      q.quad_lane = t % 4; q.quad = t / 4; q.quads = (g_n + 3) / 4; q.dispatch_quads = (T[0] * T[1] * T[2] + 3) / 4;
      reset_fiber(f);
    }
    ok = run_group();
    S.threads += g_n; S.threadgroups++;
  }
  signals(false, 0);
  for (int i = 0; i < nbuf; i++) {
    if (bufs[i].kind < 2) continue;
    Region& r = regs[i];
    memcpy(bufs[i].data, r.lo, bufs[i].bytes);
    bufs[i].unwritten = 0;
    size_t n = (bufs[i].bytes + r.gran - 1) / r.gran;
    for (size_t c = 0; c < n; c++) if (!r.cell[c].w.flags) bufs[i].unwritten += r.gran;
  }
  for (auto& r : regs) free_cells(r);
  regs.clear();
  munmap(arena, arena_cap);
  *st = S;
  snprintf(msg, cap, "%s", err);
  out_pcs[0] = pcs[0]; out_pcs[1] = pcs[1];
  return ok ? 0 : 1;
}
}  // namespace msl

#include "callbacks.inc"
