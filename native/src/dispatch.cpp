// Chooses the instruction set, and what needs no vector code of its own.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>
#if defined(ARRIERO_X86)
#include <cpuid.h>
#elif defined(ARRIERO_ARM64)
#include <sys/auxv.h>
#endif

#include "kernels.h"
#include "packed.h"
#include "pool.h"

namespace arriero {

extern const Table table_portable;
extern const PackedRun strips_portable;
#if defined(ARRIERO_X86)
extern const Table table_avx2, table_avx512;
extern const PackedRun strips_avx2, strips_avx2_vnni, strips_avx512, strips_avx512_vnni;
#elif defined(ARRIERO_ARM64)
extern const Table table_neon;
extern const PackedRun strips_neon, strips_neon_dotprod, strips_neon_i8mm;
#endif

namespace {

struct Set {
  const char* name;  // the part behind the hyphen is the integer extension
  const Table* table;
  PackedRun strips;
  bool here;
};
struct Choice {
  Set set;
  std::string problem;
};
// The best first.
std::vector<Set> sets() {
  std::vector<Set> all;
#if defined(ARRIERO_X86)
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  unsigned a = 0, b = 0, c = 0, d = 0;  // g++ 12 does not know AVX-VNNI by name
  const bool avx2_vnni = avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
  all.push_back({"avx512-vnni", &table_avx512, strips_avx512_vnni, avx512 && __builtin_cpu_supports("avx512vnni")});
  all.push_back({"avx512-plain", &table_avx512, strips_avx512, avx512});
  all.push_back({"avx2-vnni", &table_avx2, strips_avx2_vnni, avx2_vnni});
  all.push_back({"avx2-plain", &table_avx2, strips_avx2, avx2});
#elif defined(ARRIERO_ARM64)
  const bool dotprod = getauxval(AT_HWCAP) >> 20 & 1, i8mm = dotprod && (getauxval(AT_HWCAP2) >> 13 & 1);
  all.push_back({"neon-i8mm", &table_neon, strips_neon_i8mm, i8mm});
  all.push_back({"neon-dotprod", &table_neon, strips_neon_dotprod, dotprod});
  all.push_back({"neon-plain", &table_neon, strips_neon, true});
#endif
  all.push_back({"portable", &table_portable, strips_portable, true});
  return all;
}
const Choice& choice() {
  static const Choice chosen = [] {
    const char* e = std::getenv("ARRIERO_CPU_ISA");
    const std::string wanted = e ? e : "";
    const auto all = sets();
    std::string known, usable;
    const Set* best = nullptr;
    for (const Set& s : all) {
      const std::string name = s.name;
      known.append(known.empty() ? "" : ", ").append(name);
      if (!s.here) continue;
      usable.append(usable.empty() ? "" : ", ").append(name);
      if (!best) best = &s;
      if (wanted.empty() || wanted == name || wanted == name.substr(0, name.find('-'))) return Choice{s, ""};
    }
    return Choice{*best, "ARRIERO_CPU_ISA is '" + wanted + "'; this machine has " + usable + " (of " + known + ")"};
  }();
  return chosen;
}

}  // namespace

const Table& table() { return *choice().set.table; }
PackedRun packed_run() { return choice().set.strips; }
const char* isa_name() { return choice().set.name; }
const char* isa_problem() { return choice().problem.c_str(); }

void experts(const Experts& e) {
  // Rows are grouped by expert, so that a prefill reads each expert's weights once.
  std::vector<int> start(e.experts + 1), xr(e.rows), yr(e.rows);
  for (int i = 0; i < e.rows; i++)
    if (e.index[i] >= 0 && e.index[i] < e.experts) start[e.index[i] + 1]++;
  for (int i = 0; i < e.experts; i++) start[i + 1] += start[i];
  std::vector<int> at(start.begin(), start.end() - 1);
  const size_t yrow = (size_t)e.p.N * bytes_of(e.p.yt);
  for (int i = 0; i < e.rows; i++) {
    if (e.index[i] < 0 || e.index[i] >= e.experts) {
      std::memset((char*)e.p.y + i * yrow, 0, yrow);
      continue;
    }
    const int o = at[e.index[i]]++;
    xr[o] = i / e.per_x;
    yr[o] = i;
  }
  std::vector<int> used;
  for (int i = 0; i < e.experts; i++)
    if (start[i + 1] > start[i]) used.push_back(i);
  if (used.empty()) return;
  // One fork and join for all of them: a join per expert would cost as much as a small expert.
  const int want = (3 * pool_threads() + (int)used.size() - 1) / (int)used.size();
  const int rows = std::max(64, ((e.p.N + want - 1) / want + 3) / 4 * 4), parts = (e.p.N + rows - 1) / rows;
  const size_t line = (size_t)e.p.K / 32;
  parallel((int)used.size() * parts, [&](int t) {
    const int i = used[t / parts], n = t % parts * rows;
    const size_t at = (size_t)i * e.p.N + n;  // first row of w
    Product p = e.p;
    p.M = start[i + 1] - start[i];
    p.N = std::min(rows, e.p.N - n);
    p.w += at * p.wrow;
    if (p.scales) p.scales = (const char*)p.scales + at * line;
    if (e.gscales) p.gscale = e.gscales[i];
    p.y = (char*)p.y + n * bytes_of(p.yt);
    p.xrows = xr.data() + start[i];
    p.yrows = yr.data() + start[i];
    table().product(p);
  });
}

void rope_table(const int* positions, const float* freqs, float* out, int T, int half, float scale) {
  auto token = [&](int t) {
    for (int i = 0; i < half; i++) {
      const double a = (double)positions[t] * (double)freqs[i];
      out[((size_t)t * half + i) * 2] = (float)std::cos(a) * scale;
      out[((size_t)t * half + i) * 2 + 1] = (float)std::sin(a) * scale;
    }
  };
  if (T < 4)
    for (int t = 0; t < T; t++) token(t);
  else
    parallel((T + 15) / 16, [&](int c) {
      for (int t = c * 16; t < T && t < c * 16 + 16; t++) token(t);
    });
}

}  // namespace arriero
