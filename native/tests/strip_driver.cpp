// Tests of packed weights without Python or MLX, as driver.cpp tests the other kernels: `strip_driver` checks, `strip_driver
// bench [format]` measures, `strip_driver rate SECONDS` one row's throughput over so long and its share of what memory
// gives, `strip_driver hash` prints what every instruction set must agree about.
#include <algorithm>
#include <chrono>
#include <ctime>
#include <thread>

#include "../src/bandwidth.h"
#include "../src/packed.h"
#include "../src/pool.h"
#include "../src/successors.h"
#include "reference.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

using namespace reference;

namespace {

int checks = 0, failures = 0;
void expect(bool ok, const char* what, const std::string& where) {
  checks++;
  if (ok) return;
  if (failures++ < 40) std::printf("FAIL %s: %s\n", what, where.c_str());
}
const char* type_name(int t) { return t == F32 ? "f32" : t == F16 ? "f16" : "bf16"; }
std::string text(std::initializer_list<long long> v) {
  std::string s;
  for (auto i : v) s += std::to_string(i) + " ";
  return s;
}
struct Kind {
  int format, bits, group;
  bool symmetric;
  const char* name;
};
const Kind kinds[] = {
    {AFFINE, 1, 32, false, "affine1"}, {AFFINE, 2, 32, false, "affine2"}, {AFFINE, 3, 64, false, "affine3"},
    {AFFINE, 4, 32, false, "affine4"}, {AFFINE, 4, 32, true, "sym4"},     {AFFINE, 4, 64, false, "affine4"},
    {AFFINE, 5, 32, true, "sym5"},     {AFFINE, 5, 32, false, "affine5"}, {AFFINE, 6, 128, true, "sym6"},
    {AFFINE, 8, 32, true, "sym8"},     {AFFINE, 8, 64, false, "affine8"}, {NVFP4, 4, 16, false, "nvfp4"},
    {MXFP4, 4, 32, false, "mxfp4"},
};
// A packed matrix on memory of its own.
struct Strips {
  Packed p{};
  std::unique_ptr<uint8_t[]> block;
  Weights w;
};
Strips strips(const Kind& kind, int N, int K, int type, int E = 0) {
  Strips s;
  s.w = weights(kind.format, kind.bits, kind.group, N, K, type, E ? E : 1);
  const int zero = 1 << (kind.bits - 1);
  if (kind.symmetric)
    for (size_t i = 0; i < s.w.scales.size; i++) {
      s.w.biases.set(i, -zero * s.w.scales.at(i));
      const size_t n = i / (K / kind.group), g = i % (K / kind.group);
      for (int k = 0; k < kind.group; k++) {
        const size_t bit = (g * kind.group + k) * kind.bits;
        const uint8_t* c = s.w.codes.data() + n * s.w.row + bit / 8;
        const int pair = c[0] | (bit % 8 + kind.bits > 8 ? c[1] << 8 : 0);
        s.w.values[n * K + g * kind.group + k] =
            (((pair >> (bit % 8)) & ((1 << kind.bits) - 1)) - zero) * s.w.scales.at(i);
      }
    }
  Packed& p = s.p;
  p.format = kind.format, p.bits = kind.bits, p.group = kind.group, p.N = N, p.K = K, p.experts = E;
  p.st = s.w.scales.type;
  if (kind.format == AFFINE) {
    const int z = symmetric_zero(s.w.scales.data(), s.w.biases.data(), p.st, s.w.scales.size);
    p.biased = z < 0, p.zero = z < 0 ? 0 : z;
    expect(p.biased != kind.symmetric && (p.biased || z == zero), "zero", kind.name);
  } else p.zero = 12;
  s.block.reset(new uint8_t[packed_bytes(p) + 63]);
  uint8_t* to = s.block.get() + (64 - (size_t)s.block.get() % 64) % 64;
  pack_strips(p, {s.w.codes.data(), s.w.scales.data(), s.w.biases.block ? s.w.biases.data() : nullptr}, to);
  p.data = to;
  return s;
}
Doubles multiply(const Doubles& x, const Weights& w, int M, size_t first_row = 0) {
  Doubles y((size_t)M * w.N);
  for (int m = 0; m < M; m++)
    for (int n = 0; n < w.N; n++) {
      double a = 0;
      for (int k = 0; k < w.K; k++) a += x[(size_t)m * w.K + k] * w.values[(first_row + n) * w.K + k];
      y[(size_t)m * w.N + n] = a;
    }
  return y;
}
void run(const Packed& w, const void* x, int type, int M, void* y, bool exact = true) {
  const PackedProduct p{w, 1, nullptr, nullptr, y, (size_t)w.N, nullptr, 0};
  packed_run()({x, type, M, w.K, exact, &p, 1, nullptr, 0, nullptr, nullptr});
}

void products() {
  for (const Kind& kind : kinds)
    for (int xt : {F32, BF16, F16})
      for (int wt : {F32, BF16, F16})
        for (auto [N, K] : {std::pair{1, 128}, {7, 384}, {37, 640}, {130, 256}}) {
          if (kind.format == NVFP4 && N == 37) K += 16;
          if (wt != xt && N != 37) continue;
          const int most = N == 37 ? 40 : 20;
          const Strips s = strips(kind, N, K, wt);
          const Buffer x = gaussian((size_t)most * K, xt);
          const Doubles want = multiply(x.all(), s.w, most);
          const std::string where = std::string(kind.name) + " g" + std::to_string(kind.group) + " x " +
                                    type_name(xt) + " w " + type_name(wt) + " " + text({N, K});
          Buffer whole((size_t)most * N, xt);
          run(s.p, x.data(), xt, most, whole.data());
          expect(error(whole.all(), want, N) < tolerance(xt), "product", where + std::to_string(error(whole.all(), want, N)));
          for (auto [first, M] : {std::pair{0, 1}, {3, 2}, {1, 3}, {2, 4}, {5, 5}, {0, 8}, {0, 13}, {1, 17}}) {
            Buffer y((size_t)M * N, xt);
            run(s.p, x.data() + (size_t)first * K * bytes_of(xt), xt, M, y.data());
            expect(y.same(0, whole, (size_t)first * N, (size_t)M * N), "rows depend on their batch",
                   where + text({first, M}));
          }
          if (xt == F32) continue;
          Buffer fast((size_t)most * N, xt), part(14 * (size_t)N, xt);
          run(s.p, x.data(), xt, most, fast.data(), false);
          expect(error(fast.all(), want, N) < 2e-2, "fast product", where);
          run(s.p, x.data() + 3 * (size_t)K * bytes_of(xt), xt, 14, part.data(), false);
          expect(part.same(0, fast, 3 * (size_t)N, 14 * (size_t)N), "fast rows depend on their batch", where);
        }
}
// Several products of different formats at once, to columns of one result; then experts; then single rows.
void jobs() {
  const int K = 384;
  for (int xt : {F32, BF16})
    for (int M : {1, 3, 20}) {
      const Strips a = strips(kinds[3], 37, K, xt), b = strips(kinds[9], 64, K, xt), c = strips(kinds[11], 9, K, xt);
      const Buffer x = gaussian((size_t)M * K, xt);
      Buffer y((size_t)M * 120, xt);
      std::vector<PackedProduct> list;
      std::vector<float> by_row(64);
      for (float& f : by_row) f = (float)(1 + below(100) / 100.);
      int at = 0;
      for (const Strips* s : {&a, &b, &c}) {
        list.push_back({s->p, s == &a ? .5f : 1.f, s == &b ? by_row.data() : nullptr, nullptr,
                        y.data() + at * bytes_of(xt), 120, nullptr, 0});
        at += s->p.N;
      }
      packed_run()({x.data(), xt, M, K, true, list.data(), 3, nullptr, 0, nullptr, nullptr});
      Doubles want((size_t)M * 120);
      at = 0;
      for (const Strips* s : {&a, &b, &c}) {
        const Doubles one = multiply(x.all(), s->w, M);
        for (int m = 0; m < M; m++)
          for (int n = 0; n < s->p.N; n++)
            want[(size_t)m * 120 + at + n] = one[(size_t)m * s->p.N + n] * (s == &a ? .5 : s == &b ? by_row[n] : 1);
        at += s->p.N;
      }
      expect(error(y.all(), want, 120) < tolerance(xt), "several products", text({xt, M}));
    }
  for (const Kind& kind : kinds)
    for (int xt : {F32, BF16}) {
      const int E = 4, N = 21, T = 40, k = 2;
      const Strips s = strips(kind, N, K, xt, E);
      const Buffer x = gaussian((size_t)T * K, xt);
      Buffer y((size_t)T * k * N, xt);
      std::vector<int> xrows, yrows;
      std::vector<Segment> segments;
      const float scales[E] = {1, .5f, 2, .25f};
      Doubles want((size_t)T * k * N);
      for (int e : {3, 0, 2}) {
        const int first = (int)xrows.size();
        for (int i = 0; i < T * k; i++) {
          if (i % 4 != e) continue;
          xrows.push_back(i / k), yrows.push_back(i);
          const Doubles all = x.all(), row(all.begin() + i / k * K, all.begin() + (i / k + 1) * K);
          const Doubles r = multiply(row, s.w, 1, (size_t)e * N);
          for (int n = 0; n < N; n++) want[(size_t)i * N + n] = r[n] * scales[e];
        }
        segments.push_back({e, first, (int)xrows.size() - first});
      }
      const PackedProduct p{s.p, 1, nullptr, scales, y.data(), (size_t)N, nullptr, 0};
      packed_run()({x.data(), xt, T * k, K, true, &p, 1, segments.data(), 3, xrows.data(), yrows.data()});
      expect(error(y.all(), want, N) < tolerance(xt), "experts", kind.name);

      const Strips one = strips(kind, N, K, xt);
      const int ids[5] = {20, 0, -1, 21, 7};
      Buffer rows(5 * K, xt);
      packed_rows(one.p, ids, 5, .5f, rows.data(), xt);
      Doubles taken((size_t)5 * K);
      for (int i = 0; i < 5; i++)
        for (int j = 0; j < K && ids[i] >= 0 && ids[i] < N; j++)
          taken[(size_t)i * K + j] = one.w.values[(size_t)ids[i] * K + j] / 2;
      expect(error(rows.all(), taken, K) < tolerance(xt), "single rows", kind.name);
    }
}
// Jobs in turn, as layers are, while the pool changes its size: what waiting threads ask for changes no bits.
void in_turn() {
  const int threads = pool_threads();
  const uint8_t* names[] = {(const uint8_t*)64, (const uint8_t*)128};
  // Of a thread that ran no products before.
  std::thread([&] {
    for (int round = 0; round < 3; round++)
      for (int i = 0; i < 2; i++) {
        Coming* begins = beginning_of(names[i], 2);
        // The first job has none before it; the second is learnt at once, the first when it comes again.
        expect((begins != nullptr) == (2 * round + i == 1 || 2 * round + i == 2), "learnt once", text({round, i}));
        if (begins) begins[0].from[0] = names[i];
        const Coming* next = successor_of(names[i], 2);
        expect((next != nullptr) == (2 * round + i > 1), "known when it was seen", text({round, i}));
        expect(!next || next[0].from[0] == names[1 - i], "a successor", text({round, i}));
        expect(!successor_of(names[i], 3), "for another number of threads", text({round, i}));
      }
  }).join();
  const int K = 1024;
  std::vector<Strips> weights;
  for (int N : {640, 70, 1500}) weights.push_back(strips(kinds[3], N, K, BF16));
  const Buffer x = gaussian(8 * K, BF16);
  for (int M : {1, 8}) {
    std::vector<Buffer> first;
    for (int size : {threads, 3, 1, 2, threads}) {
      pool_resize(size);
      for (int round = 0; round < 3; round++)
        for (size_t i = 0; i < weights.size(); i++) {
          const int N = weights[i].p.N;
          Buffer y((size_t)M * N, BF16);
          run(weights[i].p, x.data(), BF16, M, y.data());
          if (first.size() == i) first.push_back(std::move(y));
          else expect(y.same(0, first[i], 0, (size_t)M * N), "jobs in turn", text({M, size, round, (int)i}));
        }
    }
  }
}
void non_finite() {
  for (const Kind& kind : kinds)
    for (int xt : {F32, BF16})
      for (bool exact : {true, false})
        for (double bad : {(double)NAN, (double)INFINITY}) {
          const int N = 19, K = 256, M = 20;
          const Strips s = strips(kind, N, K, BF16);
          Buffer x = gaussian((size_t)M * K, xt), y((size_t)M * N, xt);
          x.set(5 * K + 77, bad);
          run(s.p, x.data(), xt, M, y.data(), exact);
          bool ok = true;
          for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++)
              if (m != 5) ok = ok && std::isfinite(y.at((size_t)m * N + n));
              else if (xt != F32) ok = ok && !std::isfinite(y.at((size_t)m * N + n));
          expect(ok, "a non-finite activation", kind.name);
        }
  const Strips s = strips(kinds[3], 19, 256, BF16);
  Buffer x(256, BF16), y(19, BF16);
  run(s.p, x.data(), BF16, 1, y.data());
  for (int n = 0; n < 19; n++) expect(y.at(n) == 0, "zeros", "");
  for (int k = 0; k < 256; k++) x.set(k, 1e-38);
  run(s.p, x.data(), BF16, 1, y.data());
  for (int n = 0; n < 19; n++) expect(std::fabs(y.at(n)) < 1e-30, "tiny activations", "");
}
// The bits of 16-bit results over all kinds, as one number.
void hash() {
  uint64_t h = 1469598103934665603u;
  for (const Kind& kind : kinds)
    for (int xt : {BF16, F16}) {
      const int N = 53, K = 512, M = 21;
      const Strips s = strips(kind, N, K, xt);
      const Buffer x = gaussian((size_t)M * K, xt);
      Buffer y((size_t)M * N, xt);
      run(s.p, x.data(), xt, M, y.data());
      for (size_t i = 0; i < y.size * 2; i++) h = (h ^ y.data()[i]) * 1099511628211u;
    }
  std::printf("%016llx\n", (unsigned long long)h);
}

double seconds() {
  timespec t;
  clock_gettime(pool_threads() == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
uint8_t* huge(size_t n) {
  uint8_t* p = (uint8_t*)std::aligned_alloc(2 << 20, (n + (2 << 20)) >> 21 << 21);
#if defined(__linux__)
  madvise(p, n >> 21 << 21, MADV_HUGEPAGE);
#endif
  return p;
}
void bench(const std::string& format) {
  std::printf("%s, %d threads\n%-12s %-5s %5s %9s %9s %9s %9s %9s %9s\n", isa_name(), pool_threads(), "format", "x", "K",
              "M=1 GB/s", "M=2", "M=4", "M=8", "M=64 GF", "fast GF");
  for (const Kind& kind : kinds)
    for (int K : {576, 2048})
      for (int xt : {BF16, F32}) {
        if (!format.empty() && format != kind.name) continue;
        const int N = K, M = 64;
        const Strips s = strips(kind, 64, K, F16);
        Packed p = s.p;
        p.N = N;
        const size_t bytes = packed_bytes(p), E = 200000000 / bytes, part = packed_bytes(s.p);
        uint8_t* all = huge(E * bytes);
        for (size_t i = 0; i < E * bytes; i += part) std::memcpy(all + i, s.p.data, part);
        const Buffer x = gaussian((size_t)M * K, xt);
        Buffer y((size_t)M * N, xt);
        auto rate = [&](int M, size_t E, bool exact) {
          std::vector<double> t;
          for (int i = 0; i < 5; i++) {
            const double a = seconds();
            for (size_t e = 0; e < E; e++) p.data = all + e * bytes, run(p, x.data(), xt, M, y.data(), exact);
            t.push_back((seconds() - a) / E);
          }
          std::sort(t.begin(), t.end());
          return t[1];
        };
        const double one = rate(1, E, true), two = rate(2, E, true), four = rate(4, E, true), eight = rate(8, E, true);
        const size_t few = E < 20 ? E : 20;
        const double many = rate(M, few, true), fast = xt == F32 ? 0 : rate(M, few, false);
        const double g = 1e-9 * bytes, flop = 2e-9 * M * N * K;
        std::printf("%-8s g%-3d %-4s %5d %9.1f %9.1f %9.1f %9.1f %9.0f %9.0f\n", kind.name, kind.group, type_name(xt), K,
                    g / one, g / two, g / four, g / eight, flop / many, fast > 0 ? flop / fast : 0);
        std::fflush(stdout);
        std::free(all);
      }
}

void rate(double length) {
  for (const Kind& kind : {kinds[3], kinds[4], kinds[9]}) {
    const int K = 2048, N = 8192;
    const Strips s = strips(kind, 64, K, F16);
    Packed p = s.p;
    p.N = N;
    const size_t bytes = packed_bytes(p), E = 400000000 / bytes, part = packed_bytes(s.p);
    uint8_t* all = huge(E * bytes);
    for (size_t i = 0; i < E * bytes; i += part) std::memcpy(all + i, s.p.data, part);
    const Buffer x = gaussian(K, BF16);
    Buffer y(N, BF16);
    using clock = std::chrono::steady_clock;
    double best = 0, memory = 0;
    const auto start = clock::now();
    for (int i = 0; i == 0 || std::chrono::duration<double>(clock::now() - start).count() < length; i++) {
      if (i % 4 == 0) memory = std::max(memory, read_bandwidth(.3));
      const auto from = clock::now();
      for (size_t e = 0; e < E; e++) p.data = all + e * bytes, run(p, x.data(), BF16, 1, y.data());
      best = std::max(best, E * bytes / std::chrono::duration<double>(clock::now() - from).count());
    }
    std::printf("%s, %d threads, %s g%d: %.1f GB/s, %.0f %% of the %.1f GB/s that memory gives\n", isa_name(),
                pool_threads(), kind.name, kind.group, best * 1e-9, 100 * best / memory, memory * 1e-9);
    std::free(all);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "check";
  if (what == "bench") return bench(argc > 2 ? argv[2] : ""), 0;
  if (what == "rate") return rate(argc > 2 ? std::atof(argv[2]) : 3), 0;
  if (what == "hash") return hash(), 0;
  products();
  jobs();
  in_turn();
  non_finite();
  std::printf("%s: %d checks, %d failures\n", isa_name(), checks, failures);
  return failures > 99 ? 99 : failures;
}
