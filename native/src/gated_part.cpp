#include "gated_part.h"

#include <algorithm>

#include "pool.h"

namespace arriero {
namespace {

[[noreturn]] void bad(const std::string& what) { throw std::invalid_argument("[arriero_cpu.gated_part] " + what); }

constexpr int kBlock = 256;  // rows taken at once: what lies between the products stays in the cache

struct Work {
  NormStep before, after;
  std::vector<Step> gate_up, down;  // down: one
  const char *x, *branch;
  char* y;
  int rows, hidden, type;
  bool gelu;
  size_t wide;                                 // elements of a row of gate and up
  size_t sum, normed, both, product, total;  // places in the task's memory

  void operator()() const {
    const size_t es = bytes_of(type), line = hidden * es;
    char* room = (char*)scratch(kLayer, total);
    for (int m = 0; m < rows; m += kBlock) {
      const int n = std::min(rows - m, kBlock);
      before.run_sum(x + m * line, branch + m * line, room + sum, room + normed, n, type);
      size_t column = 0;
      for (const Step& s : gate_up) {
        s.run(room + normed, n, type, room + both + column * es, wide);
        column += s.width();
      }
      Glu g{};
      g.gate = room + both, g.up = room + both + wide / 2 * es, g.y = room + product;
      g.rows = n, g.n = wide / 2, g.ldg = g.ldu = wide, g.xt = type, g.gelu = gelu;
      table().glu(g);
      down[0].run(room + product, n, type, room + normed, hidden);
      if (after) after.run(room + normed, room + normed, n, type);
      add(room + sum, room + normed, y + m * line, n, hidden, type);
    }
  }
};

}  // namespace

GatedPart::GatedPart(GatedShape shape) : shape_(std::make_shared<const GatedShape>(std::move(shape))) {
  const auto& s = *shape_;
  const int hidden = s.down.rows;
  int wide = 0;
  for (const Matrix& m : s.gate_up) {
    if (m.columns != hidden) bad("gate and up do not fit the hidden size");
    wide += m.rows;
  }
  if (wide != 2 * s.down.columns) bad("gate and up do not fit down");
  check_gain("gated_part", s.before, hidden);
  check_gain("gated_part", s.after, hidden);
  append(held_, std::optional<Gain>(s.before));
  for (const Matrix& m : s.gate_up) append(held_, m);
  append(held_, s.down);
  append(held_, s.after);
}

mx::array GatedPart::operator()(const mx::array& x, const mx::array& branch) const {
  if (x.ndim() != 2 || !is_float(x.dtype()) || x.shape(1) != shape_->down.rows) bad("x must be [T, hidden] floats");
  if (branch.shape() != x.shape() || branch.dtype() != x.dtype()) bad("x and branch disagree");
  Arrays in{x, branch};
  in.insert(in.end(), held_.begin(), held_.end());
  auto call = std::make_shared<Call>(cpu_stream(), "ArrieroGatedPart");
  call->plan = [held = shape_](const Arrays& in, Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    const auto& shape = *held;
    Work w{};
    w.rows = in[0].shape(0), w.hidden = in[0].shape(1), w.type = type_of(in[0].dtype());
    w.x = in[0].data<char>(), w.branch = in[1].data<char>(), w.y = out[0].data<char>();
    w.gelu = shape.gelu;
    size_t at = 2;
    w.before = NormStep(shape.before, in, at);
    for (const Matrix& m : shape.gate_up) w.gate_up.emplace_back(m, in, at), w.wide += m.rows;
    w.down.emplace_back(shape.down, in, at);
    w.after = NormStep(shape.after, in, at);
    const size_t row = (size_t)std::min(w.rows, kBlock) * bytes_of(w.type);
    Room room;
    w.sum = room.take(row * w.hidden);
    w.normed = room.take(row * w.hidden);
    w.both = room.take(row * w.wide);
    w.product = room.take(row * w.wide / 2);
    w.total = room.bytes;
    return w;
  };
  return mx::array(x.shape(), x.dtype(), call, std::move(in));
}

}  // namespace arriero
