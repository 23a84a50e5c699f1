#include "gated_part.h"

#include <algorithm>

#include "pool.h"

namespace arriero {

struct GatedSteps {
  NormStep before, after;
  std::vector<Step> gate_up, down;  // down: one
  size_t wide = 0;                  // elements of a row of gate and up

  GatedSteps(const GatedShape& shape, const Arrays& in, size_t at) : before(shape.before, in, at) {
    for (const Matrix& m : shape.gate_up) gate_up.emplace_back(m, in, at), wide += m.rows;
    down.emplace_back(shape.down, in, at);
    after = NormStep(shape.after, in, at);
  }
};

namespace {

[[noreturn]] void bad(const std::string& what) { throw std::invalid_argument("[arriero_cpu.gated_part] " + what); }

constexpr int kBlock = 256;  // rows taken at once: what lies between the products stays in the cache

GatedWork work_of(std::shared_ptr<const GatedWeights> weights, std::shared_ptr<const GatedSteps> steps, int rows,
                  int type) {
  GatedWork w{};
  w.rows = rows, w.hidden = weights->shape.down.rows, w.type = type;
  w.gelu = weights->shape.gelu, w.fast = !weights->shape.exact && rows >= kFastRows;
  const size_t row = (size_t)std::min(rows, kBlock) * bytes_of(type);
  Room room;
  w.sum = room.take(row * w.hidden);
  w.normed = room.take(row * w.hidden);
  w.both = room.take(row * steps->wide);
  w.product = room.take(row * steps->wide / 2);
  w.total = room.bytes;
  w.steps = std::move(steps), w.weights = std::move(weights);
  return w;
}

}  // namespace

void GatedWork::operator()(const char* x, const char* branch, char* y) const {
  const GatedSteps& w = *steps;
  const size_t es = bytes_of(type), line = hidden * es, wide = w.wide;
  char* room = (char*)scratch(kLayer, total);
  for (int m = 0; m < rows; m += kBlock) {
    const int n = std::min(rows - m, kBlock);
    w.before.run_sum(x + m * line, branch + m * line, room + sum, room + normed, n, type);
    run_steps(w.gate_up, room + normed, n, type, room + both, wide, fast);
    Glu g{};
    g.gate = room + both, g.up = room + both + wide / 2 * es, g.y = room + product;
    g.rows = n, g.n = wide / 2, g.ldg = g.ldu = wide, g.xt = type, g.gelu = gelu;
    table().glu(g);
    run_steps(w.down, room + product, n, type, room + normed, hidden, fast);
    if (w.after) w.after.run(room + normed, room + normed, n, type);
    add(room + sum, room + normed, y + m * line, n, hidden, type);
  }
}

GatedPart::GatedPart(GatedShape shape)
    : weights_(std::make_shared<GatedWeights>(GatedWeights{std::move(shape), {}, nullptr})) {
  const auto& s = weights_->shape;
  auto& held = weights_->arrays;
  const int hidden = s.down.rows;
  int wide = 0;
  for (const Matrix& m : s.gate_up) {
    if (m.columns != hidden) bad("gate and up do not fit the hidden size");
    wide += m.rows;
  }
  if (wide != 2 * s.down.columns) bad("gate and up do not fit down");
  check_gain("gated_part", s.before, hidden);
  check_gain("gated_part", s.after, hidden);
  append(held, std::optional<Gain>(s.before));
  for (const Matrix& m : s.gate_up) append(held, m);
  append(held, s.down);
  append(held, s.after);
}

void GatedPart::check(const mx::array& x) const {
  const auto& shape = weights_->shape;
  if (x.ndim() != 2 || !is_float(x.dtype()) || x.shape(1) != shape.down.rows) bad("x must be [T, hidden] floats");
  for (const Matrix& m : shape.gate_up) m.check("gated_part", x.dtype());
  shape.down.check("gated_part", x.dtype());
}
bool GatedPart::ready() const {
  auto& steps = weights_->steps;
  if (!steps && settled(weights_->arrays))
    steps = std::make_shared<const GatedSteps>(weights_->shape, weights_->arrays, 0);
  return steps != nullptr;
}
GatedWork GatedPart::work(int rows, int type) const { return work_of(weights_, weights_->steps, rows, type); }

mx::array GatedPart::operator()(const mx::array& x, const mx::array& branch) const {
  check(x);
  if (branch.shape() != x.shape() || branch.dtype() != x.dtype()) bad("x and branch disagree");
  Arrays in{x, branch};
  if (!ready()) in.insert(in.end(), weights_->arrays.begin(), weights_->arrays.end());
  auto call = std::make_shared<Call>(cpu_stream(), "ArrieroGatedPart");
  call->plan = [weights = weights_, steps = weights_->steps](const Arrays& in, Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    auto known = steps ? steps : std::make_shared<const GatedSteps>(weights->shape, in, 2);
    return [x = in[0].data<char>(), branch = in[1].data<char>(), y = out[0].data<char>(),
            w = work_of(weights, known, in[0].shape(0), type_of(in[0].dtype()))] { w(x, branch, y); };
  };
  return mx::array(x.shape(), x.dtype(), call, std::move(in));
}

}  // namespace arriero
