#include "attention_part.h"

#include <algorithm>
#include <cstring>

#include "pool.h"

namespace arriero {

struct AttentionSteps {
  NormStep before;
  std::vector<Step> qkv;
  NormStep query_norm, key_norm;
  std::vector<Step> out;  // one
  NormStep after;
  size_t width = 0;  // elements of a row of qkv

  AttentionSteps(const AttentionShape& shape, const Arrays& in, size_t at) : before(shape.before, in, at) {
    for (const Matrix& m : shape.qkv) qkv.emplace_back(m, in, at), width += m.rows;
    query_norm = NormStep(shape.query_norm, in, at);
    key_norm = NormStep(shape.key_norm, in, at);
    out.emplace_back(shape.out, in, at);
    after = NormStep(shape.after, in, at);
  }
};

namespace {

[[noreturn]] void bad(const std::string& what) {
  throw std::invalid_argument("[arriero_cpu.attention_part] " + what);
}

// The call over these weights; angles null: no rotation.
AttentionWork work_of(std::shared_ptr<const AttentionWeights> weights, std::shared_ptr<const AttentionSteps> steps,
                      int rows, int type, const mx::array* angles, std::vector<Span> spans, const mx::array* buffers) {
  const auto& shape = weights->shape;
  AttentionWork w{};
  w.rows = rows, w.hidden = shape.qkv[0].columns, w.type = type;
  if (angles) w.angles = angles->data<float>(), w.rot = 2 * angles->shape(1);
  w.interleaved = shape.interleaved, w.fast = !shape.exact && rows >= kFastRows;
  for (size_t i = 0; i < spans.size(); i++) {
    const auto &k = buffers[2 * i], &v = buffers[2 * i + 1];
    if (k.strides()[3] != 1 || v.strides()[3] != 1) bad("a buffer's heads must be contiguous");
    Span& s = spans[i];
    s.k = k.data<char>(), s.v = v.data<char>();
    s.kh = k.strides()[1], s.kt = k.strides()[2], s.vh = v.strides()[1], s.vt = v.strides()[2];
  }
  spans.erase(std::remove_if(spans.begin(), spans.end(), [](const Span& s) { return s.queries == 0; }), spans.end());
  Attention& a = w.a;
  a.nspans = (int)spans.size(), a.Hq = shape.heads, a.Hkv = shape.kv_heads, a.Dk = a.Dv = shape.head_dim;
  a.qt = a.kt = type, a.scale = shape.scale, a.softcap = shape.softcap, a.window = shape.window, a.causal = true;
  const size_t row = (size_t)rows * bytes_of(type);
  Room room;
  w.normed = room.take(row * std::max(w.hidden, shape.out.rows));
  w.row = room.take(row * steps->width);
  w.q = room.take(row * a.Hq * a.Dk);
  w.total = room.bytes;
  w.spans = std::move(spans), w.steps = std::move(steps), w.weights = std::move(weights);
  return w;
}

}  // namespace

void AttentionWork::rotate(const char* from, char* to, int heads, const float* by) const {
  if (!by) {
    std::memcpy(to, from, (size_t)heads * a.Dk * bytes_of(type));
    return;
  }
  Rope p{};
  p.x = from, p.y = to, p.table = by, p.T = 1, p.H = heads, p.D = a.Dk, p.rot = rot, p.xt = type;
  p.interleaved = interleaved;
  table().rope(p);
}
// The norms of a token's heads, its query to q, its key and value to their places in the span's buffers.
void AttentionWork::place(int t, const Span& s, char* token, char* query) const {
  const size_t es = bytes_of(type), head = a.Dk * es;
  char *key = token + a.Hq * head, *value = key + a.Hkv * head;
  if (steps->query_norm) steps->query_norm.run(token, token, a.Hq, type);
  if (steps->key_norm) steps->key_norm.run(key, key, a.Hkv, type);
  const float* by = angles ? angles + (size_t)t * rot : nullptr;
  rotate(token, query, a.Hq, by);
  const size_t slot = s.position - s.base + t - s.first;
  for (int h = 0; h < a.Hkv; h++) {
    rotate(key + h * head, (char*)s.k + (h * s.kh + slot * s.kt) * es, 1, by);
    std::memcpy((char*)s.v + (h * s.vh + slot * s.vt) * es, value + h * head, head);
  }
}
void AttentionWork::operator()(const char* x, char* y) {
  const AttentionSteps& w = *steps;
  const size_t es = bytes_of(type), width = w.width, wide = (size_t)a.Hq * a.Dk;
  char* room = (char*)scratch(kLayer, total);
  const char* in = x;
  if (w.before) w.before.run(x, room + normed, rows, type), in = room + normed;
  run_steps(w.qkv, in, rows, type, room + row, width, fast);
  auto token = [&](int t) {
    size_t i = 0;
    while (t >= spans[i].first + spans[i].queries) i++;
    place(t, spans[i], room + row + t * width * es, room + q + t * wide * es);
  };
  if (rows * width < 16384)
    for (int t = 0; t < rows; t++) token(t);
  else
    parallel((rows + 7) / 8, [&](int c) {
      for (int t = c * 8; t < rows && t < c * 8 + 8; t++) token(t);
    });
  a.spans = spans.data();
  a.q = room + q, a.o = room + row;  // the product's rows are used up
  table().attention(a);
  char* to = w.after ? room + normed : y;
  run_steps(w.out, a.o, rows, type, to, w.out[0].width(), fast);
  if (w.after) w.after.run(to, y, rows, type);
}

AttentionPart::AttentionPart(AttentionShape shape)
    : weights_(std::make_shared<AttentionWeights>(AttentionWeights{std::move(shape), {}, nullptr})) {
  const auto& s = weights_->shape;
  auto& held = weights_->arrays;
  if (s.heads < 1 || s.kv_heads < 1 || s.heads % s.kv_heads || s.head_dim < 1 || s.head_dim > 1024)
    bad("wrong numbers of heads or a wrong head size");
  if (s.qkv.empty()) bad("no matrices for q, k and v");
  int width = 0;
  for (const Matrix& m : s.qkv) {
    if (m.columns != s.qkv[0].columns) bad("the matrices of q, k and v disagree about the inner size");
    width += m.rows;
  }
  if (width != (s.heads + 2 * s.kv_heads) * s.head_dim) bad("the matrices of q, k and v do not make the heads");
  if (s.out.columns != s.heads * s.head_dim) bad("the output matrix does not fit the heads");
  check_gain("attention_part", s.before, s.qkv[0].columns);
  check_gain("attention_part", s.query_norm, s.head_dim);
  check_gain("attention_part", s.key_norm, s.head_dim);
  check_gain("attention_part", s.after, s.out.rows);
  append(held, s.before);
  for (const Matrix& m : s.qkv) append(held, m);
  append(held, s.query_norm);
  append(held, s.key_norm);
  append(held, s.out);
  append(held, s.after);
}

std::vector<Span> AttentionPart::spans(const mx::array& x, const std::optional<mx::array>& angles,
                                       const mx::array* buffers, const std::vector<int>& lengths,
                                       const std::vector<long long>& positions, const long long* bases) const {
  const auto& shape = weights_->shape;
  if (x.ndim() != 2 || !is_float(x.dtype()) || x.shape(1) != shape.qkv[0].columns) bad("x must be [T, hidden] floats");
  for (const Matrix& m : shape.qkv) m.check("attention_part", x.dtype());
  shape.out.check("attention_part", x.dtype());
  if (angles && (angles->ndim() != 3 || angles->shape(0) != x.shape(0) || angles->shape(2) != 2 ||
                 angles->dtype() != mx::float32 || 2 * angles->shape(1) > shape.head_dim))
    bad("angles must be float32 [T, R / 2, 2]");
  std::vector<Span> spans(lengths.size());
  int at = 0;
  for (size_t i = 0; i < spans.size(); i++) {
    Span& s = spans[i];
    s.first = at, s.queries = lengths[i], s.position = positions[i], s.base = bases[i];
    at += lengths[i];
    const long long end = s.position + s.queries - s.base;
    for (const auto* b : {buffers + 2 * i, buffers + 2 * i + 1}) {
      if (b->ndim() != 4 || b->shape(0) != 1 || b->shape(1) != shape.kv_heads || b->shape(3) != shape.head_dim)
        bad("buffers must be [1, kv_heads, capacity, head_dim]");
      if (b->dtype() != x.dtype()) bad("buffers must have x's dtype");
      if (s.queries < 0 || s.base < 0 || s.position < s.base || end > b->shape(2)) bad("the tokens do not fit a buffer");
    }
    s.count = (int)end;
  }
  if (at != x.shape(0)) bad("lengths do not add up to x's rows");
  return spans;
}
bool AttentionPart::ready() const {
  auto& steps = weights_->steps;
  if (!steps && settled(weights_->arrays))
    steps = std::make_shared<const AttentionSteps>(weights_->shape, weights_->arrays, 0);
  return steps != nullptr;
}
AttentionWork AttentionPart::work(int rows, int type, const std::optional<mx::array>& angles, std::vector<Span> spans,
                                  const mx::array* buffers) const {
  return work_of(weights_, weights_->steps, rows, type, angles ? &*angles : nullptr, std::move(spans), buffers);
}

Arrays AttentionPart::operator()(const mx::array& x, const std::optional<mx::array>& angles, const Arrays& buffers,
                                 const std::vector<int>& lengths, const std::vector<long long>& positions,
                                 const std::vector<long long>& bases) const {
  const size_t n = lengths.size();
  if (n == 0 || buffers.size() != 2 * n || positions.size() != n || bases.size() != n)
    bad("one length, position, base and pair of buffers is needed per span");
  std::vector<Span> spans = this->spans(x, angles, buffers.data(), lengths, positions, bases.data());

  Arrays in{x};
  if (angles) in.push_back(*angles);
  const size_t first = in.size();
  in.insert(in.end(), buffers.begin(), buffers.end());
  if (!ready()) in.insert(in.end(), weights_->arrays.begin(), weights_->arrays.end());
  auto call = std::make_shared<Call>(cpu_stream(), "ArrieroAttentionPart");
  call->shared = 2 * n, call->shared_from = first, call->shared_to = 1;
  call->plan = [weights = weights_, steps = weights_->steps, spans = std::move(spans), first](const Arrays& in,
                                                                                             Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    auto known = steps ? steps : std::make_shared<const AttentionSteps>(weights->shape, in, first + 2 * spans.size());
    const char* x = in[0].data<char>();
    char* y = out[0].data<char>();
    return [x, y, w = work_of(weights, known, in[0].shape(0), type_of(in[0].dtype()), first == 2 ? &in[1] : nullptr,
                              spans, &out[1])]() mutable { w(x, y); };
  };
  std::vector<mx::Shape> shapes{{x.shape(0), weights_->shape.out.rows}};
  for (const auto& b : buffers) shapes.push_back(b.shape());
  return mx::array::make_arrays(std::move(shapes), std::vector<mx::Dtype>(1 + 2 * n, x.dtype()), call, in);
}

}  // namespace arriero
