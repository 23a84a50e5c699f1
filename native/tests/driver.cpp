// Kernel tests without Python or MLX: for sanitizers, emulators and cross compilers. `driver` checks every kernel of
// the chosen instruction set (ARRIERO_CPU_ISA) but those of packed weights against double precision and exits with the
// number of failures; `driver bench [format]` measures the products, `driver isa` names the set.
#include <algorithm>
#include <chrono>
#include <ctime>
#include <thread>

#include "../src/pool.h"
#include "reference.h"

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
  const char* name;
};
const Kind kinds[] = {{MXFP8, 8, 32, "mxfp8"}, {DENSE, 0, 1, "dense"}};  // strip_driver.cpp has the others
Product product_of(const Weights& w, const Buffer& x, Buffer& y, int M) {
  Product p{};
  p.format = w.format;
  p.M = M, p.N = w.N, p.K = w.K;
  p.x = x.data(), p.xt = x.type;
  p.w = w.codes.data(), p.wrow = w.row, p.wt = w.wt;
  p.scales = w.scales.block ? w.scales.data() : nullptr;
  p.gscale = 1;
  p.y = y.data(), p.yt = y.type, p.ldy = w.N;
  return p;
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

void products() {
  const int types[] = {F32, BF16, F16};
  for (const Kind& kind : kinds)
    for (int xt : types)
      for (int wt : types)
        for (auto [N, K] : {std::pair{1, 128}, {7, 384}, {37, 640}, {66, 256}}) {
          if (kind.format == DENSE) K += 3;
          if (wt != xt && N != 37) continue;
          const int most = N == 37 ? 35 : 18;
          const Weights w = weights(kind.format, kind.bits, kind.group, N, K, wt);
          const Buffer x = gaussian((size_t)most * K, xt);
          const Doubles want = multiply(x.all(), w, most);
          const std::string where = std::string(kind.name) + " x " + type_name(xt) + " w " + type_name(wt) + " " + text({N, K});
          Buffer whole((size_t)most * N, xt);
          table().product(product_of(w, x, whole, most));
          expect(error(whole.all(), want, N) < tolerance(xt), "product", where);
          for (auto [first, M] : {std::pair{0, 1}, {3, 2}, {1, 3}, {2, 4}, {5, 5}, {0, 13}, {1, 17}}) {
            Buffer y((size_t)M * N, xt);
            Product p = product_of(w, x, y, M);
            p.x = x.data() + (size_t)first * K * bytes_of(xt);
            table().product(p);
            expect(y.same(0, whole, (size_t)first * N, (size_t)M * N), "rows depend on their batch",
                   where + text({first, M}));
          }
        }
}
void experts_and_rows() {
  for (const Kind& kind : kinds)
    for (int xt : {F32, BF16}) {
        const int E = 4, N = 21, K = kind.format == DENSE ? 77 : 256, T = 40, k = 2;
        const Weights w = weights(kind.format, kind.bits, kind.group, N, K, xt, E);
        const Buffer x = gaussian((size_t)T * K, xt);
        Buffer y((size_t)T * k * N, xt);
        std::vector<int> index(T * k);
        for (int& i : index) i = below(E + 1);  // E is no expert: zeros
        const float scales[E] = {1, .5f, 2, .25f};
        Experts e{};
        e.p = product_of(w, x, y, 0);
        e.rows = T * k, e.experts = E, e.per_x = k, e.index = index.data(), e.gscales = scales;
        experts(e);
        const Doubles xs = x.all();
        Doubles want((size_t)T * k * N);
        for (int i = 0; i < T * k; i++) {
          if (index[i] == E) continue;
          const Doubles row(xs.begin() + (size_t)(i / k) * K, xs.begin() + (size_t)(i / k + 1) * K);
          const Doubles r = multiply(row, w, 1, (size_t)index[i] * N);
          for (int n = 0; n < N; n++) want[(size_t)i * N + n] = r[n] * scales[index[i]];
        }
        expect(error(y.all(), want, N) < tolerance(xt), "experts", kind.name);
        Buffer wide((size_t)20 * (N + 9), xt);
        std::vector<float> by_row(N);
        for (float& f : by_row) f = (float)(1 + below(100) / 100.);
        Product p = product_of(w, x, wide, 20);
        p.ldy = N + 9, p.row_scales = by_row.data();
        table().product(p);
        Doubles got, expected = multiply(xs, w, 20);
        for (int m = 0; m < 20; m++)
          for (int n = 0; n < N; n++) {
            got.push_back(wide.at((size_t)m * (N + 9) + n));
            expected[(size_t)m * N + n] *= by_row[n];
          }
        expect(error(got, expected, N) < tolerance(xt), "row scales", kind.name);
        bool untouched = true;
        for (int m = 0; m < 20; m++)
          for (int n = N; n < N + 9; n++) untouched = untouched && wide.at((size_t)m * (N + 9) + n) == 0;
        expect(untouched, "wrote between rows", kind.name);
      }
}
void attentions() {
  for (int round = 0; round < 60; round++) {
    const int qt = round % 3, kt = round / 3 % 3, Hkv = 1 + below(3), rep = 1 + below(4), Hq = Hkv * rep;
    const int sizes[] = {8, 24, 33, 64, 80, 128};
    Attention p{};
    p.Hq = Hq, p.Hkv = Hkv, p.Dk = sizes[below(6)], p.Dv = below(2) ? p.Dk : sizes[below(6)];
    p.qt = qt, p.kt = kt, p.scale = (float)(1 / std::sqrt(p.Dk)), p.causal = round % 5 != 0;
    p.window = below(3) ? 0 : 1 + below(300), p.softcap = below(3) ? 0.f : 5.f;
    if (!p.causal) p.window = 0;
    std::vector<float> sinks(Hq);
    for (float& f : sinks) f = (float)normal();
    if (below(2)) p.sinks = sinks.data();
    int T = 0;
    std::vector<Span2> spans;
    std::vector<Buffer> keep;
    for (int i = 0, n = 1 + below(3); i < n; i++) {
      const int queries = below(4) ? 1 + below(4) : 20 + below(30), count = queries + below(below(2) ? 600 : 40);
      const int cap = count + below(5), pad = below(2) * 3;
      Span2 sp{};
      Span& s = sp.s;
      s.first = T, s.queries = queries, s.count = count, s.base = below(2) ? below(1000) : 0;
      s.position = s.base + count - queries;
      s.kt = p.Dk + pad, s.kh = cap * s.kt, s.vt = p.Dv + pad, s.vh = cap * s.vt;
      if (below(3) == 0) s.kh = p.Dk + pad, s.kt = Hkv * s.kh;  // [cap, H, D]
      Buffer k = gaussian((size_t)Hkv * cap * (p.Dk + pad), kt), v = gaussian((size_t)Hkv * cap * (p.Dv + pad), kt);
      sp.k = k.all(), sp.v = v.all();
      keep.push_back(std::move(k)), keep.push_back(std::move(v));
      s.k = keep[keep.size() - 2].data(), s.v = keep.back().data();
      spans.push_back(std::move(sp));
      T += queries;
    }
    const Buffer q = gaussian((size_t)T * Hq * p.Dk, qt);
    Buffer o((size_t)T * Hq * p.Dv, qt);
    std::vector<Span> ss;
    for (auto& s : spans) ss.push_back(s.s);
    p.spans = ss.data(), p.nspans = (int)ss.size(), p.q = q.data(), p.o = o.data();
    table().attention(p);
    const Doubles want = attention(p, spans, q.all(), T);
    const std::string where = text({round, Hq, Hkv, p.Dk, p.Dv, p.window, p.causal, T});
    expect(error(o.all(), want, p.Dv) < tolerance(qt, true), "attention", where);
    for (auto& s : spans) {  // the last query alone
      const int t = s.s.queries - 1;
      Span one = s.s;
      one.first = 0, one.queries = 1, one.position += t;
      Buffer single((size_t)Hq * p.Dv, qt);
      Attention a = p;
      a.spans = &one, a.nspans = 1, a.o = single.data();
      a.q = q.data() + (size_t)(s.s.first + t) * Hq * p.Dk * bytes_of(qt);
      table().attention(a);
      expect(single.same(0, o, (size_t)(s.s.first + t) * Hq * p.Dv, single.size), "attention depends on its batch",
             where);
    }
  }
}
void glue() {
  for (int t : {F32, BF16, F16})
    for (int n : {1, 3, 8, 16, 17, 63, 200, 577})
      for (int rows : {1, 3, 40}) {
        const std::string where = std::string(type_name(t)) + " " + text({rows, n});
        const size_t all = (size_t)rows * n;
        const Buffer x = gaussian(all, t), r = gaussian(all, t), w = gaussian(n, (t + 1) % 3);
        for (bool sum : {false, true}) {
          Buffer h(all, t), y(all, t);
          Norm p{x.data(), sum ? r.data() : nullptr, w.data(), h.data(), y.data(), rows, n, 1e-5f, t, w.type};
          table().norm(p);
          Doubles want(all), total(all);
          for (int i = 0; i < rows; i++) {
            double a = 0;
            for (int j = 0; j < n; j++) {
              const size_t at = (size_t)i * n + j;
              total[at] = x.at(at) + (sum ? r.at(at) : 0);
              const double v = sum ? h.at(at) : total[at];
              a += v * v;
              want[at] = v * w.at(j);
            }
            for (int j = 0; j < n; j++) want[(size_t)i * n + j] /= std::sqrt(a / n + 1e-5f);
          }
          expect(error(y.all(), want, n) < tolerance(t), "norm", where);
          if (sum) expect(error(h.all(), total, n) < tolerance(t), "sum before a norm", where);
        }
        for (bool gelu : {false, true}) {
          Buffer y(all, t);
          Glu p{x.data(), r.data(), y.data(), (size_t)rows, (size_t)n, (size_t)n, (size_t)n, t, gelu};
          table().glu(p);
          Doubles want(all);
          for (size_t i = 0; i < all; i++) {
            const double g = x.at(i);
            const double s = gelu ? g / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)))
                                  : g / (1 + std::exp(-g));
            want[i] = s * r.at(i);
          }
          expect(error(y.all(), want, n) < tolerance(t), "glu", where);
        }
        std::vector<uint32_t> at(rows);
        table().argmax(x.data(), at.data(), rows, n, t);
        for (int i = 0; i < rows; i++) {
          int best = 0;
          for (int j = 0; j < n; j++)
            if (x.at((size_t)i * n + j) > x.at((size_t)i * n + best)) best = j;
          expect((int)at[i] == best, "argmax", where);
        }
        const int D = n, rot = n / 2 * 2, H = 2;
        if (rot == 0) continue;
        const Buffer heads = gaussian((size_t)rows * H * D, t);
        std::vector<int> positions(rows);
        for (int& i : positions) i = below(5000);
        std::vector<float> freqs(rot / 2), cs((size_t)rows * rot);
        for (int i = 0; i < rot / 2; i++) freqs[i] = (float)std::pow(10000., -2. * i / rot);
        rope_table(positions.data(), freqs.data(), cs.data(), rows, rot / 2, 1);
        for (bool interleaved : {false, true}) {
          Buffer y(heads.size, t);
          table().rope(Rope{heads.data(), y.data(), cs.data(), nullptr, rows, H, D, rot, t, interleaved});
          Doubles want = heads.all();
          for (int i = 0; i < rows * H; i++)
            for (int j = 0; j < rot / 2; j++) {
              const double a = (double)positions[i / H] * freqs[j], c = std::cos(a), s = std::sin(a);
              const size_t p0 = (size_t)i * D + (interleaved ? 2 * j : j), p1 = p0 + (interleaved ? 1 : rot / 2);
              const double u = heads.at(p0), v = heads.at(p1);
              want[p0] = u * c - v * s, want[p1] = u * s + v * c;
            }
          expect(error(y.all(), want, D) < tolerance(t), "rope", where);
        }
      }
  for (int t : {F32, BF16, F16}) {
    Buffer x = gaussian(70001, t);
    x.set(0, NAN), x.set(66000, 100), x.set(66001, 100);
    uint32_t at = 0;
    table().argmax(x.data(), &at, 1, x.size, t);
    expect(at == 66000, "argmax of a long row with a NaN", type_name(t));
  }
}
void non_finite() {
  for (const Kind& kind : kinds)
    for (double bad : {(double)NAN, (double)INFINITY}) {
        const int N = 9, K = 256, M = 20;
        const Weights w = weights(kind.format, kind.bits, kind.group, N, K, BF16);
        Buffer x = gaussian((size_t)M * K, BF16), y((size_t)M * N, BF16);
        x.set(5 * K + 77, bad);
        Product p = product_of(w, x, y, M);
        table().product(p);
        bool ok = true;
        for (int m = 0; m < M; m++)
          for (int n = 0; n < N; n++) ok = ok && std::isfinite(y.at((size_t)m * N + n)) == (m != 5);
        // a weight of exactly zero times infinity is still not a number, so no case is left out
        expect(ok, "a non-finite activation", kind.name);
      }
}
void threads() {
  const Weights w = weights(MXFP8, 8, 32, 300, 512, F32);
  const Buffer x = gaussian(20 * 512, F32);
  Buffer want(20 * 300, F32);
  pool_resize(1);
  table().product(product_of(w, x, want, 20));
  for (int n : {2, 3, 5}) {
    pool_resize(n);
    for (int spin : {0, 50}) {
      pool_set_spin(spin);
      std::vector<std::thread> callers;
      bool ok[3] = {true, true, true};
      for (bool& mine : ok)
        callers.emplace_back([&] {
          for (int i = 0; i < 40; i++) {
            Buffer y(20 * 300, F32);
            table().product(product_of(w, x, y, 20));
            mine = mine && y.same(0, want, 0, y.size);
            if (i % 10 == 9) std::this_thread::sleep_for(std::chrono::microseconds(300));
          }
        });
      for (auto& t : callers) t.join();
      expect(ok[0] && ok[1] && ok[2], "threads change a result", text({n, spin}));
    }
  }
  pool_resize(usable_cores());
  pool_set_spin(200);
}

// Processor time where there is one thread: other work on the machine then matters less.
double seconds() {
  timespec t;
  clock_gettime(pool_threads() == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
// Medians of seven: GB/s of weights for one row over 96 MB of matrices in turn, GFLOP/s for many rows of one.
void bench(const std::string& format) {
  const int N = 2048, K = 2048;
  std::printf("%s, %d threads\n%-12s %-5s %9s %9s %9s %9s\n", isa_name(), pool_threads(), "format", "x", "M=1 GB/s",
              "M=4 GB/s", "M=1 hot", "M=64 GF");
  auto median = [](auto f, int n) {
    std::vector<double> t;
    for (int i = 0; i < 7; i++) {
      const double a = seconds();
      for (int j = 0; j < n; j++) f(j);
      t.push_back((seconds() - a) / n);
    }
    std::sort(t.begin(), t.end());
    return t[3];
  };
  for (const Kind& kind : kinds)
    for (int xt : {BF16, F32})
      for (int wt : {BF16, F16, F32}) {
        if (wt != BF16 && (kind.format != DENSE || xt == F32)) continue;
        if (!format.empty() && format != kind.name) continue;
        const size_t line = kind.format == DENSE ? 0 : K / 32;
        const size_t bytes = kind.format == DENSE ? (size_t)N * K * bytes_of(wt) : (size_t)N * (K + line);
        const int E = (int)(96e6 / bytes) + 1;
        Weights w = weights(kind.format, kind.bits, kind.group, 8, K, wt);
        const int copies = N * E / 8;
        auto repeat = [&](Buffer& b) {
          Buffer r(b.size * copies, b.type);
          const size_t n = b.size * bytes_of(b.type);
          for (int i = 0; i < copies; i++) std::memcpy(r.data() + i * n, b.data(), n);
          b = std::move(r);
        };
        repeat(w.codes);
        if (w.scales.block) repeat(w.scales);
        w.N = N;
        const Buffer x = gaussian(64 * K, xt);
        Buffer y(64 * N, xt);
        auto at = [&](int M, int e) {
          Product p = product_of(w, x, y, M);
          p.w += (size_t)e * N * w.row;
          if (p.scales) p.scales = (const char*)p.scales + (size_t)e * N * line;
          return p;
        };
        int e = 0;
        auto cold = [&](int M) { return median([&](int) { table().product(at(M, e = (e + 1) % E)); }, 12); };
        const double one = cold(1), four = cold(4), hot = median([&](int) { table().product(at(1, 0)); }, 12);
        const double many = median([&](int) { table().product(at(64, 0)); }, 1);
        const std::string name = std::string(kind.name) + (kind.format == DENSE ? std::string(" ") + type_name(wt) : "");
        std::printf("%-12s %-5s %9.1f %9.1f %9.1f %9.0f\n", name.c_str(), type_name(xt), bytes / one * 1e-9,
                    bytes / four * 1e-9, bytes / hot * 1e-9, 2e-9 * 64 * N * K / many);
        std::fflush(stdout);
      }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "check";
  if (what == "isa") return std::printf("%s %s\n", isa_name(), isa_problem()) < 0;
  if (what == "bench") return bench(argc > 2 ? argv[2] : ""), 0;
  products();
  experts_and_rows();
  attentions();
  glue();
  non_finite();
  threads();
  std::printf("%s: %d checks, %d failures\n", isa_name(), checks, failures);
  return failures > 99 ? 99 : failures;
}
