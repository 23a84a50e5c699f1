// Norms, rotary positions, gated activations and argmax as MLX operations.
#include <cmath>

#include "call.h"
#include "kernels.h"
#include "mlx/ops.h"

namespace arriero {
namespace {

[[noreturn]] void bad(const char* where, const std::string& what) {
  throw std::invalid_argument("[arriero_cpu." + std::string(where) + "] " + what);
}
std::vector<mx::Shape> like_first(const Arrays& in) { return {in[0].shape()}; }

std::shared_ptr<Call> norm_call(const mx::array& x, const std::optional<mx::array>& w, float eps, bool sum) {
  const char* f = sum ? "add_rms_norm" : "rms_norm";
  if (!is_float(x.dtype()) || x.ndim() < 1) bad(f, "x must have a float dtype and an axis");
  if (w && (!is_float(w->dtype()) || w->ndim() != 1 || w->shape(0) != x.shape(-1))) bad(f, "w does not fit x");
  auto call = std::make_shared<Call>(cpu_stream(), sum ? "ArrieroAddRmsNorm" : "ArrieroRmsNorm");
  call->plan = [eps, sum, weighted = w.has_value()](const Arrays& in, Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    Norm p{};
    p.x = in[0].data<char>(), p.xt = type_of(in[0].dtype());
    p.n = in[0].shape(-1), p.rows = (int)(in[0].size() / p.n), p.eps = eps;
    if (sum) p.r = in[1].data<char>(), p.h = out[0].data<char>();
    if (weighted) p.w = in.back().data<char>(), p.wt = type_of(in.back().dtype());
    p.y = out.back().data<char>();
    return [p] { table().norm(p); };
  };
  return call;
}

}  // namespace

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& w, float eps) {
  auto call = norm_call(x, w, eps, false);
  call->shapes = like_first;
  Arrays in{x};
  if (w) in.push_back(*w);
  return mx::array(x.shape(), x.dtype(), call, std::move(in));
}
Arrays add_rms_norm(const mx::array& x, const mx::array& r, const std::optional<mx::array>& w, float eps) {
  auto call = norm_call(x, w, eps, true);
  if (r.shape() != x.shape() || r.dtype() != x.dtype()) bad("add_rms_norm", "x and r disagree");
  call->shapes = [](const Arrays& in) { return std::vector<mx::Shape>{in[0].shape(), in[0].shape()}; };
  Arrays in{x, r};
  if (w) in.push_back(*w);
  return mx::array::make_arrays({x.shape(), x.shape()}, {x.dtype(), x.dtype()}, call, in);
}

mx::array rope_table(const mx::array& positions, const mx::array& frequencies, float scale) {
  if (positions.ndim() != 1 || frequencies.ndim() != 1) bad("rope_table", "positions [T] and frequencies [R / 2]");
  auto call = std::make_shared<Call>(cpu_stream(), "ArrieroRopeTable");
  call->plan = [scale](const Arrays& in, Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    const int *at = in[0].data<int>(), T = in[0].shape(0), half = in[1].shape(0);
    const float* f = in[1].data<float>();
    return [=, o = out[0].data<float>()] { rope_table(at, f, o, T, half, scale); };
  };
  const auto s = cpu_stream();
  return mx::array({positions.shape(0), frequencies.shape(0), 2}, mx::float32, call,
                   {mx::astype(positions, mx::int32, s), mx::astype(frequencies, mx::float32, s)});
}

mx::array rope(const mx::array& x, const mx::array& table_, const std::optional<mx::array>& positions,
               bool interleaved) {
  if (x.ndim() != 3 || !is_float(x.dtype())) bad("rope", "x must be [T, H, D] of a float dtype");
  if (table_.ndim() != 3 || table_.shape(2) != 2 || table_.dtype() != mx::float32)
    bad("rope", "the table must be float32 [positions, R / 2, 2]");
  const int rot = 2 * table_.shape(1);
  if (rot > x.shape(2)) bad("rope", "the table is wider than a head");
  if (positions ? positions->ndim() != 1 || positions->shape(0) != x.shape(0) : table_.shape(0) != x.shape(0))
    bad("rope", "one position (or table row) per token is needed");
  auto call = std::make_shared<Call>(cpu_stream(), "ArrieroRope");
  call->plan = [interleaved](const Arrays& in, Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    Rope p{};
    p.x = in[0].data<char>(), p.y = out[0].data<char>(), p.table = in[1].data<float>();
    p.T = in[0].shape(0), p.H = in[0].shape(1), p.D = in[0].shape(2);
    p.rot = 2 * in[1].shape(1), p.xt = type_of(in[0].dtype()), p.interleaved = interleaved;
    if (in.size() == 3) p.positions = in[2].data<int>();
    return [p, rows = in[1].shape(0)]() mutable {
      std::vector<int> at;
      if (p.positions) {
        at.assign(p.positions, p.positions + p.T);
        for (int& i : at) i = std::min(std::max(i, 0), rows - 1);
        p.positions = at.data();
      }
      table().rope(p);
    };
  };
  call->shapes = like_first;
  Arrays in{x, table_};
  if (positions) in.push_back(mx::astype(*positions, mx::int32, cpu_stream()));
  return mx::array(x.shape(), x.dtype(), call, std::move(in));
}

mx::array glu(const mx::array& gate, const mx::array& up, bool gelu) {
  const char* f = gelu ? "geglu" : "swiglu";
  if (gate.shape() != up.shape() || gate.dtype() != up.dtype() || !is_float(gate.dtype()) || gate.ndim() < 1)
    bad(f, "gate and up must agree and have a float dtype");
  auto call = std::make_shared<Call>(cpu_stream(), gelu ? "ArrieroGeglu" : "ArrieroSwiglu");
  // Two halves of one packed product come as two-dimensional strided views.
  if (gate.ndim() == 2) call->strided_from = 0, call->strided_to = 2;
  call->plan = [gelu](const Arrays& in, Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    Glu p{};
    p.gate = in[0].data<char>(), p.up = in[1].data<char>(), p.y = out[0].data<char>();
    p.n = in[0].shape(-1), p.rows = in[0].size() / p.n;
    p.ldg = p.ldu = p.n;
    if (in[0].ndim() == 2) p.ldg = in[0].strides()[0], p.ldu = in[1].strides()[0];
    p.xt = type_of(in[0].dtype()), p.gelu = gelu;
    return [p] { table().glu(p); };
  };
  call->shapes = like_first;
  return mx::array(gate.shape(), gate.dtype(), call, {gate, up});
}

mx::array argmax(const mx::array& x) {
  if (!is_float(x.dtype()) || x.ndim() < 1 || x.shape(-1) == 0) bad("argmax", "x must be nonempty floats");
  auto call = std::make_shared<Call>(cpu_stream(), "ArrieroArgmax");
  call->plan = [](const Arrays& in, Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    const size_t n = in[0].shape(-1), rows = in[0].size() / n;
    return [=, x = in[0].data<char>(), y = out[0].data<uint32_t>(), t = type_of(in[0].dtype())] {
      table().argmax(x, y, rows, n, t);
    };
  };
  auto shape = x.shape();
  shape.pop_back();
  return mx::array(shape, mx::uint32, call, {x});
}

}  // namespace arriero
