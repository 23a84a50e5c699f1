// The sequence kernels without Python or MLX, as driver.cpp does for the others: every kernel of the chosen instruction
// set against double precision, and against itself alone, on memory without a spare byte.
#include <algorithm>
#include <numeric>

#include "../src/pool.h"
#include "../src/sequence.h"
#include "reference.h"

using namespace reference;

namespace {

int checks = 0, failures = 0;
void expect(bool ok, const char* what, int a = 0, int b = 0, int c = 0) {
  checks++;
  if (ok) return;
  if (failures++ < 40) std::printf("FAIL %s: %d %d %d\n", what, a, b, c);
}
Doubles part(const Doubles& x, size_t from, size_t n) { return {x.begin() + from, x.begin() + from + n}; }

struct DeltaShape {
  int Hk, Hv, Dk, Dv;
};
struct DeltaRows {
  Buffer q, k, v, a, b, rate, bias;
};
// y and the states after each of the rows [first, first + n)
void delta_reference(const DeltaShape& s, const DeltaRows& x, int first, int n, Doubles state, Doubles& y,
                     std::vector<Doubles>& states) {
  const int rep = s.Hv / s.Hk;
  for (int t = first; t < first + n; t++) {
    for (int h = 0; h < s.Hv; h++) {
      const size_t at = ((size_t)t * s.Hk + h / rep) * s.Dk, row = (size_t)t * s.Hv + h;
      double kk = 0, qq = 0;
      for (int d = 0; d < s.Dk; d++) kk += std::pow(x.k.at(at + d), 2), qq += std::pow(x.q.at(at + d), 2);
      const double kf = 1 / std::sqrt(kk + 1e-6), qf = 1 / std::sqrt((qq + 1e-6) * s.Dk);
      const double g = std::exp(-x.rate.at(h) * std::log1p(std::exp(x.a.at(row) + x.bias.at(h))));
      const double beta = 1 / (1 + std::exp(-x.b.at(row)));
      for (int r = 0; r < s.Dv; r++) {
        double* S = &state[((size_t)h * s.Dv + r) * s.Dk];
        double read = 0, out = 0;
        for (int d = 0; d < s.Dk; d++) read += (S[d] *= g) * x.k.at(at + d) * kf;
        const double u = beta * (x.v.at(row * s.Dv + r) - read);
        for (int d = 0; d < s.Dk; d++) out += (S[d] += u * x.k.at(at + d) * kf) * x.q.at(at + d) * qf;
        y.push_back(out);
      }
    }
    states.push_back(state);
  }
}
void deltas() {
  for (const DeltaShape s : {DeltaShape{2, 6, 128, 128}, {1, 1, 7, 5}, {3, 3, 40, 66}, {1, 2, 1, 1}})
    for (int type : {F32, BF16, F16}) {
      const std::vector<int> lengths = {1, 37, 18};
      const int T = 56;
      const size_t size = (size_t)s.Hv * s.Dv * s.Dk, width = (size_t)s.Hv * s.Dv;
      DeltaRows x{gaussian((size_t)T * s.Hk * s.Dk, type), gaussian((size_t)T * s.Hk * s.Dk, type),
                  gaussian(T * width, type), gaussian((size_t)T * s.Hv, type), gaussian((size_t)T * s.Hv, F32),
                  Buffer(s.Hv, F32), gaussian(s.Hv, F32)};
      for (int h = 0; h < s.Hv; h++) x.rate.set(h, std::fabs(normal()));
      std::vector<float> rate(s.Hv), bias(s.Hv);
      for (int h = 0; h < s.Hv; h++) rate[h] = (float)x.rate.at(h), bias[h] = (float)x.bias.at(h);
      Buffer y(T * width, type);
      Delta p{};
      p.Hk = s.Hk, p.Hv = s.Hv, p.Dk = s.Dk, p.Dv = s.Dv, p.xt = type, p.eps = 1e-6f;
      p.q = x.q.data(), p.k = x.k.data(), p.v = x.v.data(), p.a = x.a.data(), p.b = x.b.data();
      p.qt = p.kt = (size_t)s.Hk * s.Dk, p.qh = p.kh = s.Dk, p.vt = width, p.vh = s.Dv;
      p.a_token = p.b_token = s.Hv, p.a_type = type, p.b_type = F32;
      p.rate = rate.data(), p.bias = bias.data(), p.y = y.data();
      std::vector<std::vector<float>> states(4, std::vector<float>(size)), from(3, std::vector<float>(size));
      for (auto& f : from)
        for (float& v : f) v = (float)normal();
      const Cut cuts[] = {
          {1, states[0].data()}, {17, states[1].data()}, {37, states[2].data()}, {18, states[3].data()}};
      const DeltaSpan spans[] = {{0, 1, from[0].data(), cuts, 1}, {1, 37, from[1].data(), cuts + 1, 2},
                                 {38, 18, from[2].data(), cuts + 3, 1}};
      p.spans = spans, p.nspans = 3;
      sequence_table().delta(p);
      for (int i = 0; i < 3; i++) {
        Doubles want;
        std::vector<Doubles> every;
        delta_reference(s, x, spans[i].first, spans[i].length, {from[i].begin(), from[i].end()}, want, every);
        expect(error(part(y.all(), spans[i].first * width, want.size()), want, s.Dv) < tolerance(type, true),
               "delta", s.Dk, type, i);
        for (int c = 0; c < spans[i].ncuts; c++) {
          const float* state = (const float*)spans[i].cuts[c].to;
          expect(error({state, state + size}, every[spans[i].cuts[c].after - 1], s.Dk) < 4e-6, "state", s.Dk, type, c);
        }
      }
      // The second span again, in two calls cut at its stop.
      Buffer again(T * width, type);
      std::vector<float> middle(size), end(size);
      const Cut halves[] = {{17, middle.data()}, {20, end.data()}};
      const DeltaSpan pieces[] = {{1, 17, from[1].data(), halves, 1}, {18, 20, middle.data(), halves + 1, 1}};
      p.y = again.data(), p.nspans = 1;
      for (const DeltaSpan& piece : pieces) p.spans = &piece, sequence_table().delta(p);
      const bool rows = again.same(width, y, width, 37 * width);
      expect(rows && middle == states[1] && end == states[2], "cut delta", s.Dk, type);
    }
}

void convolutions() {
  for (int type : {F32, BF16, F16})
    for (int C : {5, 64, 1030})
      for (int dilation : {1, 3})
        for (bool silu : {false, true}) {
          const int K = 4, H = (K - 1) * dilation, T = 71, stop = 5;
          const Buffer x = gaussian((size_t)T * C, type), w = gaussian((size_t)K * C, BF16), bias = gaussian(C, F32);
          const Buffer tail = gaussian((size_t)H * C, type);
          Buffer y((size_t)T * C, type), inner((size_t)H * C, type), end((size_t)H * C, type);
          const Cut cuts[] = {{stop, inner.data()}, {T, end.data()}};
          const ConvSpan span{0, T, tail.data(), cuts, 2};
          sequence_table().conv(Conv{&span, 1, C, K, dilation, x.data(), (size_t)C, type, w.data(), bias.data(), BF16,
                                     F32, y.data(), silu});
          auto window = [&](int r, int c) {
            return r < H ? tail.at((size_t)r * C + c) : x.at((size_t)(r - H) * C + c);
          };
          Doubles want;
          bool tails = true;
          for (int t = 0; t < T; t++)
            for (int c = 0; c < C; c++) {
              double a = bias.at(c);
              for (int j = 0; j < K; j++) a += w.at((size_t)j * C + c) * window(t + j * dilation, c);
              want.push_back(silu ? a / (1 + std::exp(-a)) : a);
            }
          for (int r = 0; r < H; r++)
            for (int c = 0; c < C; c++)
              tails = tails && inner.at((size_t)r * C + c) == window(stop + r, c) &&
                      end.at((size_t)r * C + c) == window(T + r, c);
          expect(error(y.all(), want, C) < tolerance(type), "conv", C, type, dilation);
          expect(tails, "tails", C, type, dilation);
        }
}

std::vector<int> sorted(const Doubles& x, size_t from, size_t n, size_t k) {
  std::vector<int> order(n);
  std::iota(order.begin(), order.end(), 0);
  auto key = [&](int i) { return std::isnan(x[from + i]) ? std::make_pair(1, 0.) : std::make_pair(0, -x[from + i]); };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key(a) < key(b); });
  order.resize(k < n ? k : n);
  return order;
}
void tops() {
  for (int type : {F32, BF16, F16})
    for (int n : {1, 17, 500, 2049, 70001})
      for (int kind = 0; kind < 4; kind++) {
        const int rows = n > 70000 ? 1 : 2;
        Buffer x((size_t)rows * n, type);
        for (size_t i = 0; i < x.size; i++) {
          const double v = kind == 1 ? std::round(normal()) : kind == 3 ? (double)i : normal();
          x.set(i, kind == 2 && below(3) ? (below(2) ? (double)NAN : -INFINITY) : v);
        }
        for (int k : {1, 2, 40, 700, n}) {
          if (k > n) continue;
          std::vector<int> out((size_t)rows * k);
          sequence_table().top_k(x.data(), type, rows, n, k, out.data());
          bool ok = true;
          for (int r = 0; r < rows; r++) {
            const auto want = sorted(x.all(), (size_t)r * n, n, k);
            ok = ok && std::equal(want.begin(), want.end(), out.begin() + (size_t)r * k);
          }
          expect(ok, "top k", n, k, kind);
        }
      }
}

void blocks() {
  for (int type : {F32, BF16, F16})
    for (int D : {24, 128}) {
      const int H = 4, T = 17, block = 4, width = 20, position = 60, count = (position + T) / block;
      const Buffer q = gaussian((size_t)T * H * D, type), k = gaussian((size_t)count * D, type);
      std::vector<int> out((size_t)T * width);
      const SelectSpan span{0, T, position, k.data(), (size_t)D};
      sequence_table().select(Select{&span, 1, H, D, q.data(), type, type, block, width, .1f, out.data()});
      bool ok = true;
      for (int t = 0; t < T; t++) {
        const int seen = (position + t + 1) / block;
        Doubles scores;
        for (int b = 0; b < seen; b++) {
          double sum = 0;
          for (int h = 0; h < H; h++) {
            double a = 0;
            for (int d = 0; d < D; d++) a += q.at(((size_t)t * H + h) * D + d) * k.at((size_t)b * D + d);
            sum += a > 0 ? a : 0;
          }
          scores.push_back(sum);
        }
        auto want = sorted(scores, 0, seen, width);
        std::sort(want.begin(), want.end());
        want.resize(width, -1);
        ok = ok && std::equal(want.begin(), want.end(), out.begin() + (size_t)t * width);
      }
      expect(ok, "select", D, type);
    }
}

void attentions() {
  struct Shape {
    int Hq, Hkv, Dk, Dv, position, T;
  };
  for (int type : {F32, BF16, F16})
    for (const Shape s :
         {Shape{24, 2, 256, 256, 900, 3}, {3, 3, 20, 36, 402, 9}, {7, 1, 64, 100, 0, 5}, {6, 2, 33, 7, 90, 40}}) {
      const int block = 4, width = 90, K = s.position + s.T;
      const Buffer q = gaussian((size_t)s.T * s.Hq * s.Dk, type);
      const Buffer k = gaussian((size_t)K * s.Hkv * s.Dk, type), v = gaussian((size_t)K * s.Hkv * s.Dv, type);
      Buffer o((size_t)s.T * s.Hq * s.Dv, type), one((size_t)s.Hq * s.Dv, type);
      std::vector<int> lists((size_t)s.T * width);
      for (int& b : lists) b = below(8) ? below(K / block + 2) : -1;
      // Keys token by token, values head by head.
      const IndexedSpan span{0, s.T, K, s.position, k.data(), v.data(), (size_t)s.Dk, (size_t)s.Hkv * s.Dk,
                             (size_t)K * s.Dv, (size_t)s.Dv};
      Indexed p{&span, 1, s.Hq, s.Hkv, s.Dk, s.Dv, q.data(), type, type, lists.data(), width, block, o.data(), .3f};
      sequence_table().indexed(p);
      Doubles want;
      for (int t = 0; t < s.T; t++) {
        const int here = s.position + t, complete = (here + 1) / block;
        std::vector<int> keys;
        for (int i = 0; i < width; i++) {
          const int b = lists[(size_t)t * width + i];
          for (int j = 0; b >= 0 && b < complete && j < block; j++) keys.push_back(b * block + j);
        }
        for (int j = complete * block; j <= here; j++) keys.push_back(j);
        for (int h = 0; h < s.Hq; h++) {
          const int kv = h / (s.Hq / s.Hkv);
          Doubles w, y(s.Dv);
          for (int j : keys) {
            double a = 0;
            for (int d = 0; d < s.Dk; d++)
              a += q.at(((size_t)t * s.Hq + h) * s.Dk + d) * k.at(((size_t)j * s.Hkv + kv) * s.Dk + d);
            w.push_back(a * .3);
          }
          const double top = keys.empty() ? 0 : *std::max_element(w.begin(), w.end());
          double sum = 0;
          for (double& e : w) sum += e = std::exp(e - top);
          for (size_t j = 0; j < keys.size(); j++)
            for (int d = 0; d < s.Dv; d++) y[d] += w[j] / sum * v.at(((size_t)kv * K + keys[j]) * s.Dv + d);
          want.insert(want.end(), y.begin(), y.end());
        }
      }
      expect(error(o.all(), want, s.Dv) < tolerance(type, true), "indexed", s.Hq, type);
      const IndexedSpan last{0, 1, K, s.position + s.T - 1, span.k, span.v, span.kh, span.kt, span.vh, span.vt};
      p.spans = &last, p.blocks += (size_t)(s.T - 1) * width, p.o = one.data();
      p.q = q.data() + (size_t)(s.T - 1) * s.Hq * s.Dk * bytes_of(type);
      sequence_table().indexed(p);
      expect(one.same(0, o, (size_t)(s.T - 1) * one.size, one.size), "indexed depends on its batch", s.Hq, type);
    }
}

}  // namespace

int main() {
  for (int threads : {1, 3}) {
    pool_resize(threads);
    deltas();
    convolutions();
    tops();
    blocks();
    attentions();
  }
  std::printf("%s: %d checks, %d failures\n", table().name, checks, failures);
  return failures > 99 ? 99 : failures;
}
