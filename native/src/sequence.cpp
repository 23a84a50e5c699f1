// The sequence kernels as MLX operations, except for what attends: see indexed.cpp.
#include <cstring>

#include "mlx/ops.h"
#include "sequence_call.h"

namespace arriero {

namespace {
// Where the states that a call yields are cut: per span its stops and its end, in the order of the outputs.
struct Cuts {
  std::vector<std::vector<int>> after;
  size_t count = 0;
};
Cuts cuts_of(const char* where, const std::vector<int>& lengths, const std::vector<std::vector<int>>& stops,
             size_t states, int rows) {
  Cuts c;
  long long total = 0;
  if (lengths.empty() || states != lengths.size() || (!stops.empty() && stops.size() != lengths.size()))
    bad(where, "one entry per span is needed in lengths, states and stops");
  for (size_t i = 0; i < lengths.size(); i++) {
    if (lengths[i] < 0) bad(where, "a length is negative");
    total += lengths[i];
    std::vector<int> after = stops.empty() ? std::vector<int>{} : stops[i];
    for (size_t j = 0; j < after.size(); j++)
      if (after[j] <= (j ? after[j - 1] : 0) || after[j] >= lengths[i])
        bad(where, "stops must rise and lie strictly inside their span");
    after.push_back(lengths[i]);
    c.count += after.size();
    c.after.push_back(std::move(after));
  }
  if (total != rows) bad(where, "lengths do not add up to the rows");
  return c;
}
template <class Span>
struct Planned {  // spans and cuts of one task; the spans' pointers into cuts are set when it runs
  std::vector<Span> spans;
  std::vector<Cut> cuts;
  Planned(const Cuts& c, const std::vector<int>& lengths, Arrays& out) : spans(lengths.size()) {
    size_t o = 1;
    int at = 0;
    for (size_t i = 0; i < lengths.size(); i++) {
      spans[i].first = at, spans[i].length = lengths[i], spans[i].ncuts = (int)c.after[i].size();
      at += lengths[i];
      for (int after : c.after[i]) cuts.push_back({after, out[o++].data<char>()});
    }
  }
  const Span* ready() {
    const Cut* next = cuts.data();
    for (auto& s : spans) s.cuts = next, next += s.ncuts;
    return spans.data();
  }
};
}  // namespace

Arrays gated_delta(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& a, const mx::array& b,
                   const mx::array& rate, const mx::array& bias, const Arrays& states, const std::vector<int>& lengths,
                   const std::vector<std::vector<int>>& stops, float eps) {
  const char* f = "gated_delta";
  if (q.ndim() != 3 || k.shape() != q.shape() || v.ndim() != 3 || v.shape(0) != q.shape(0))
    bad(f, "q and k must be [T, Hk, Dk], v [T, Hv, Dv]");
  if (!is_float(v.dtype()) || q.dtype() != v.dtype() || k.dtype() != v.dtype())
    bad(f, "q, k and v must have one float dtype");
  const int T = q.shape(0), Hk = q.shape(1), Dk = q.shape(2), Hv = v.shape(1), Dv = v.shape(2);
  if (Hk < 1 || Hv < 1 || Hv % Hk || Dk < 1 || Dk > 1024 || Dv < 1)
    bad(f, "the value heads must be a multiple of the key heads, and heads not empty nor wider than 1024");
  if (a.shape() != mx::Shape{T, Hv} || b.shape() != a.shape() || !is_float(a.dtype()) || !is_float(b.dtype()))
    bad(f, "a and b must be [T, Hv] floats");
  if (rate.shape() != mx::Shape{Hv} || bias.shape() != rate.shape()) bad(f, "rate and bias must be [Hv]");
  const Cuts cuts = cuts_of(f, lengths, stops, states.size(), T);
  const mx::Shape shape{Hv, Dv, Dk};
  const auto stream = cpu_stream();
  Arrays in{q, k, v, a, b, mx::astype(rate, mx::float32, stream), mx::astype(bias, mx::float32, stream)};
  for (const auto& s : states) {
    if (s.shape() != shape || s.dtype() != mx::float32) bad(f, "a state must be float32 [Hv, Dv, Dk]");
    in.push_back(s);
  }
  auto call = std::make_shared<Call>(stream, "ArrieroGatedDelta");
  call->strided_from = 0, call->strided_to = 5;
  call->plan = [=](const Arrays& in, Arrays& out) -> Task {
    Planned<DeltaSpan> plan(cuts, lengths, out);
    for (size_t i = 0; i < plan.spans.size(); i++) plan.spans[i].from = in[7 + i].data<float>();
    Delta p{};
    p.nspans = (int)plan.spans.size();
    p.Hk = Hk, p.Hv = Hv, p.Dk = Dk, p.Dv = Dv, p.eps = eps;
    p.q = in[0].data<char>(), p.qt = in[0].strides()[0], p.qh = in[0].strides()[1];
    p.k = in[1].data<char>(), p.kt = in[1].strides()[0], p.kh = in[1].strides()[1];
    p.v = in[2].data<char>(), p.vt = in[2].strides()[0], p.vh = in[2].strides()[1];
    p.xt = type_of(in[2].dtype());
    p.a = in[3].data<char>(), p.a_token = in[3].strides()[0], p.a_type = type_of(in[3].dtype());
    p.b = in[4].data<char>(), p.b_token = in[4].strides()[0], p.b_type = type_of(in[4].dtype());
    p.rate = in[5].data<float>(), p.bias = in[6].data<float>();
    p.y = out[0].data<char>();
    return [p, plan = std::move(plan)]() mutable {
      p.spans = plan.ready();
      sequence_table().delta(p);
    };
  };
  std::vector<mx::Shape> shapes(1 + cuts.count, shape);
  std::vector<mx::Dtype> types(1 + cuts.count, mx::float32);
  shapes[0] = v.shape(), types[0] = v.dtype();
  return mx::array::make_arrays(std::move(shapes), types, call, in);
}

Arrays depthwise_conv(const mx::array& x, const mx::array& w, const std::optional<mx::array>& bias,
                      const Arrays& tails, const std::vector<int>& lengths, const std::vector<std::vector<int>>& stops,
                      int dilation, bool silu) {
  const char* f = "depthwise_conv";
  if (x.ndim() != 2 || !is_float(x.dtype())) bad(f, "x must be [T, C] of a float dtype");
  const int T = x.shape(0), C = x.shape(1);
  if (w.ndim() != 2 || w.shape(1) != C || !is_float(w.dtype())) bad(f, "w must be [K, C] floats");
  const int K = w.shape(0), history = (K - 1) * dilation;
  if (K < 1 || K > 16 || dilation < 1) bad(f, "1 to 16 taps and a dilation of 1 or more are supported");
  if (bias && (bias->shape() != mx::Shape{C} || !is_float(bias->dtype()))) bad(f, "bias must be [C] floats");
  const Cuts cuts = cuts_of(f, lengths, stops, tails.size(), T);
  const mx::Shape shape{history, C};
  Arrays in{x, w};
  if (bias) in.push_back(*bias);
  const size_t first = in.size();
  for (const auto& t : tails) {
    if (t.shape() != shape || t.dtype() != x.dtype()) bad(f, "a tail must be [(K - 1) dilation, C] of x's dtype");
    in.push_back(t);
  }
  auto call = std::make_shared<Call>(cpu_stream(), "ArrieroDepthwiseConv");
  call->strided_from = 0, call->strided_to = 1;
  call->plan = [=, biased = bias.has_value()](const Arrays& in, Arrays& out) -> Task {
    Planned<ConvSpan> plan(cuts, lengths, out);
    for (size_t i = 0; i < plan.spans.size(); i++) plan.spans[i].tail = in[first + i].data<char>();
    Conv p{};
    p.nspans = (int)plan.spans.size();
    p.C = C, p.K = K, p.dilation = dilation, p.silu = silu;
    p.x = in[0].data<char>(), p.x_token = in[0].strides()[0], p.xt = type_of(in[0].dtype());
    p.w = in[1].data<char>(), p.wt = type_of(in[1].dtype());
    if (biased) p.bias = in[2].data<char>(), p.bt = type_of(in[2].dtype());
    p.y = out[0].data<char>();
    return [p, plan = std::move(plan)]() mutable {
      p.spans = plan.ready();
      sequence_table().conv(p);
    };
  };
  std::vector<mx::Shape> shapes(1 + cuts.count, shape);
  shapes[0] = x.shape();
  const std::vector<mx::Dtype> types(1 + cuts.count, x.dtype());
  return mx::array::make_arrays(std::move(shapes), types, call, in);
}

mx::array top_k(const mx::array& x, int k) {
  if (!is_float(x.dtype()) || x.ndim() < 1 || k < 1 || k > x.shape(-1))
    bad("top_k", "k must lie between 1 and the length of the rows, and they must be floats");
  auto call = std::make_shared<Call>(cpu_stream(), "ArrieroTopK");
  call->plan = [k](const Arrays& in, Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    const size_t n = in[0].shape(-1), rows = in[0].size() / n;
    return [=, x = in[0].data<char>(), y = out[0].data<int>(), t = type_of(in[0].dtype())] {
      sequence_table().top_k(x, t, rows, n, k, y);
    };
  };
  auto shape = x.shape();
  shape.back() = k;
  return mx::array(shape, mx::int32, call, {x});
}

}  // namespace arriero
