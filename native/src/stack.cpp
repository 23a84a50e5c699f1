#include "stack.h"

#include <algorithm>

#include "pool.h"

namespace arriero {
namespace {

[[noreturn]] void bad(const std::string& what) { throw std::invalid_argument("[arriero_cpu.stack] " + what); }

// What a call needs until it is done. Neither angles nor buffers that have memory are inputs of MLX's graph, where an
// array costs a microsecond.
struct Held {
  std::vector<std::pair<AttentionPart, GatedPart>> layers;
  std::vector<std::optional<mx::array>> angles;
  Arrays buffers;
  std::vector<std::vector<Span>> spans;  // of each layer
};
// Whether a task that is queued now on this stream could run before the array is computed.
bool pending(const mx::array& a, const mx::Stream& stream) {
  if (a.status() == mx::array::Status::unscheduled) return true;
  return a.event().valid() && a.event().stream() != stream;
}
struct Work {
  std::vector<std::pair<AttentionWork, GatedWork>> layers;
  std::shared_ptr<const Held> held;
  const char* x;
  char* y;
  size_t bytes;  // of x

  void operator()() {
    char* room = (char*)scratch(kStack, 2 * bytes);
    char *branch = room, *between = room + bytes;
    const char* from = x;
    for (auto& [attention, gated] : layers) {
      attention(from, branch);
      char* to = &gated == &layers.back().second ? y : between;
      gated(from, branch, to);
      from = to;
    }
  }
};

}  // namespace

Stack::Stack(std::vector<std::pair<AttentionPart, GatedPart>> layers) : layers_(std::move(layers)) {
  if (layers_.empty()) bad("no layers");
  const int hidden = layers_[0].second.weights()->shape.down.rows;
  for (const auto& [attention, gated] : layers_) {
    const auto& shape = attention.weights()->shape;
    if (shape.qkv[0].columns != hidden || shape.out.rows != hidden || gated.weights()->shape.down.rows != hidden)
      bad("the layers disagree about the hidden size");
  }
}
bool Stack::ready() const {
  return std::all_of(layers_.begin(), layers_.end(), [](const auto& l) { return l.first.ready() && l.second.ready(); });
}
mx::array Stack::operator()(const mx::array& x, std::vector<std::optional<mx::array>> angles, Arrays buffers,
                            const std::vector<int>& lengths, const std::vector<long long>& positions,
                            const std::vector<long long>& bases, const Arrays& after) const {
  const size_t n = lengths.size(), depth = layers_.size();
  if (n == 0 || positions.size() != n || angles.size() != depth || bases.size() != depth * n ||
      buffers.size() != 2 * depth * n)
    bad("one length and position is needed per span, and angles, bases and pairs of buffers for each layer's");
  if (!ready()) bad("the weights are not computed yet");
  auto held = std::make_shared<Held>();
  held->spans.reserve(depth);
  for (size_t i = 0; i < depth; i++) {
    held->spans.push_back(
        layers_[i].first.spans(x, angles[i], &buffers[2 * n * i], lengths, positions, &bases[n * i]));
    layers_[i].second.check(x);
  }
  const auto stream = cpu_stream();
  Arrays in{x};
  auto wait_for = [&](const mx::array& a) {
    if (pending(a, stream)) in.push_back(a);
  };
  for (const auto& a : after) wait_for(a);
  for (const auto& a : buffers) wait_for(a);
  for (size_t i = 0; i < depth; i++)
    if (angles[i] && (i == 0 || !angles[i - 1] || angles[i]->id() != angles[i - 1]->id())) wait_for(*angles[i]);
  held->layers = layers_, held->angles = std::move(angles), held->buffers = std::move(buffers);
  auto call = std::make_shared<Call>(stream, "ArrieroStack");
  call->strided_from = 1, call->strided_to = in.size();  // what comes behind x is only waited for
  call->plan = [held, n](const Arrays& in, Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    Work w{{}, held, in[0].data<char>(), out[0].data<char>(), (in[0].nbytes() + 63) / 64 * 64};
    w.layers.reserve(held->layers.size());
    for (size_t i = 0; i < held->layers.size(); i++) {
      const auto& [attention, gated] = held->layers[i];
      const auto& angles = held->angles[i];
      if (angles && !angles->flags().row_contiguous) bad("angles must be contiguous");
      const int rows = in[0].shape(0), type = type_of(in[0].dtype());
      w.layers.emplace_back(attention.work(rows, type, angles, held->spans[i], &held->buffers[2 * n * i]),
                            gated.work(rows, type));
    }
    return [w = std::make_shared<Work>(std::move(w))] { (*w)(); };
  };
  return mx::array(x.shape(), x.dtype(), call, std::move(in));
}

}  // namespace arriero
