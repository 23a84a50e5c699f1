// Attention and the cache append as MLX operations.
#include <cstring>

#include "call.h"
#include "kernels.h"
#include "mlx/ops.h"

namespace arriero {
namespace {
[[noreturn]] void bad(const char* where, const std::string& what) {
  throw std::invalid_argument("[arriero_cpu." + std::string(where) + "] " + what);
}
}  // namespace

mx::array attention(const mx::array& q, const Arrays& keys, const Arrays& values, float scale,
                    const std::vector<int>& lengths, const std::vector<int>& counts,
                    const std::vector<long long>& positions, const std::optional<std::vector<long long>>& bases,
                    const std::optional<int>& window, const std::optional<float>& softcap,
                    const std::optional<mx::array>& sinks, bool causal) {
  const size_t n = keys.size();
  if (n == 0 || values.size() != n || lengths.size() != n || counts.size() != n || positions.size() != n ||
      (bases && bases->size() != n))
    bad("attention", "one entry per span is needed in keys, values, lengths, counts, positions and bases");
  if (q.ndim() != 3 || !is_float(q.dtype())) bad("attention", "q must be [T, Hq, D] of a float dtype");
  const auto kt = keys[0].dtype();
  if (!is_float(kt)) bad("attention", "keys must have a float dtype");
  const int Hq = q.shape(1), Dk = q.shape(2);
  std::vector<Span> spans(n);
  Arrays in{q};
  int Hkv = 0, Dv = 0, at = 0;
  for (size_t i = 0; i < n; i++) {
    const auto &k = keys[i], &v = values[i];
    if (k.ndim() != 4 || v.ndim() != 4 || k.shape(0) != 1 || v.shape(0) != 1 || k.shape(1) != v.shape(1) ||
        k.shape(3) != Dk || k.dtype() != kt || v.dtype() != kt)
      bad("attention", "keys and values must be [1, Hkv, cap, D] of one dtype");
    if (i == 0) Hkv = k.shape(1), Dv = v.shape(3);
    if (k.shape(1) != Hkv || v.shape(3) != Dv) bad("attention", "spans disagree about heads or sizes");
    if (counts[i] < 0 || counts[i] > k.shape(2) || counts[i] > v.shape(2) || lengths[i] < 0)
      bad("attention", "a count is larger than its buffer");
    Span& s = spans[i];
    s.first = at, s.queries = lengths[i], s.count = counts[i];
    s.position = positions[i], s.base = bases ? (*bases)[i] : 0;
    if (s.base < 0 || s.position < 0) bad("attention", "positions and bases must not be negative");
    at += lengths[i];
    in.push_back(k);
    in.push_back(v);
  }
  if (at != q.shape(0)) bad("attention", "lengths do not add up to q's rows");
  if (Hkv == 0 || Hq % Hkv) bad("attention", "the number of query heads must be a multiple of the key heads");
  if (Dk < 1 || Dv < 1 || Dk > 1024 || Dv > 1024) bad("attention", "head sizes must lie between 1 and 1024");
  if (sinks) {
    if ((int)sinks->size() != Hq) bad("attention", "sinks must hold one value per query head");
    in.push_back(mx::astype(*sinks, mx::float32, cpu_stream()));
  }
  auto call = std::make_shared<Call>(cpu_stream(), "ArrieroAttention");
  call->strided_from = 1, call->strided_to = 1 + 2 * n;
  call->plan = [spans, scale, Hq, Hkv, Dk, Dv, window = window.value_or(0), cap = softcap.value_or(0.f), causal,
               sunk = sinks.has_value()](const Arrays& in, Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    std::vector<Span> ss;
    for (size_t i = 0; i < spans.size(); i++) {
      Span s = spans[i];
      const auto &k = in[1 + 2 * i], &v = in[2 + 2 * i];
      s.k = k.data<char>(), s.v = v.data<char>();
      s.kh = k.strides()[1], s.kt = k.strides()[2], s.vh = v.strides()[1], s.vt = v.strides()[2];
      if (s.queries) ss.push_back(s);
    }
    Attention p{};
    p.nspans = (int)ss.size();
    p.Hq = Hq, p.Hkv = Hkv, p.Dk = Dk, p.Dv = Dv;
    p.q = in[0].data<char>(), p.qt = type_of(in[0].dtype()), p.kt = type_of(in[1].dtype());
    p.o = out[0].data<char>();
    p.scale = scale, p.softcap = cap, p.window = window, p.causal = causal;
    p.sinks = sunk ? in.back().data<float>() : nullptr;
    return [p, ss = std::move(ss)]() mutable {
      p.spans = ss.data();
      table().attention(p);
    };
  };
  return mx::array({q.shape(0), Hq, Dv}, q.dtype(), call, std::move(in));
}

// MLX's own slice update copies the whole cache whenever a queued task still holds the buffer, which under async_eval
// on the CPU is always.
mx::array kv_append(const mx::array& buffer, const mx::array& update, int start) {
  const bool packed = update.ndim() == 3;
  if (buffer.ndim() != 4 || buffer.shape(0) != 1 || (!packed && (update.ndim() != 4 || update.shape(0) != 1)))
    bad("kv_append", "buffer must be [1, H, cap, D], update [1, H, T, D] or [T, H, D]");
  const int H = buffer.shape(1), cap = buffer.shape(2), D = buffer.shape(3);
  const int T = packed ? update.shape(0) : update.shape(2);
  if (update.shape(1) != H || update.shape(-1) != D) bad("kv_append", "buffer and update disagree about heads or size");
  if (start < 0 || start + T > cap) bad("kv_append", "the update does not fit");
  auto call = std::make_shared<Call>(cpu_stream(), "ArrieroAppend");
  call->shared = 1, call->strided_from = 1, call->strided_to = 2;
  call->plan = [packed, start, H, T, D](const Arrays& in, Arrays& out) -> Task {
    if (in[1].size() == 0) return [] {};
    const auto& u = in[1];
    const size_t es = u.itemsize(), ut = u.strides()[packed ? 0 : 2], uh = u.strides()[1];
    const size_t bh = out[0].strides()[1], bt = out[0].strides()[2], bd = out[0].strides()[3];
    char* b = out[0].data<char>();
    const char* s = u.data<char>();
    return [=] {
      for (int h = 0; h < H; h++)
        for (int t = 0; t < T; t++) {
          char* to = b + (h * bh + (start + t) * bt) * es;
          const char* from = s + (h * uh + t * ut) * es;
          if (bd == 1) std::memcpy(to, from, D * es);
          else
            for (int d = 0; d < D; d++) std::memcpy(to + d * bd * es, from + d * es, es);
        }
    };
  };
  const auto u = update.dtype() == buffer.dtype() ? update : mx::astype(update, buffer.dtype(), cpu_stream());
  return mx::array(buffer.shape(), buffer.dtype(), call, {buffer, u});
}

}  // namespace arriero
