#include "packed_array.h"

#include <cstring>
#include <mutex>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "kernels.h"
#include "mlx/allocator.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"

namespace arriero {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;

[[noreturn]] void bad(const char* where, const std::string& what) {
  throw std::invalid_argument("[arriero_cpu." + std::string(where) + "] " + what);
}
const uint8_t* aligned(const void* p) { return (const uint8_t*)(((size_t)p + 63) / 64 * 64); }
// Large pages cut the time of a read by a third. Where the system gives none, nothing is lost.
void prefer_huge_pages([[maybe_unused]] const uint8_t* p, [[maybe_unused]] size_t n) {
#if defined(__linux__)
  const size_t from = ((size_t)p + kHugePage - 1) / kHugePage * kHugePage, to = ((size_t)p + n) / kHugePage * kHugePage;
  if (from < to) madvise((void*)from, to - from, MADV_HUGEPAGE);
#endif
}
// Memory for n bytes, 64-byte aligned wherever it begins. Small matrices share blocks, so that they too come to lie on
// large pages; a block lives as long as one of them.
class Blocks {
 public:
  mx::array take(size_t n) {
    const size_t lines = (n + 63 + kLine - 1) / kLine;
    if (n >= kShared) return fresh(lines);
    std::lock_guard<std::mutex> lock(mutex_);
    if (!block_ || used_ + lines > kBlock / kLine) block_ = fresh(kBlock / kLine), used_ = 0;
    const mx::Shape shape{(int)lines, kLine};
    mx::array view(mx::allocator::malloc(0), shape, mx::uint8);
    view.copy_shared_buffer(*block_, {kLine, 1}, block_->flags(), lines * kLine, used_ * kLine);
    used_ += lines;
    return view;
  }

 private:
  static constexpr int kLine = 4096;  // arrays have two axes, because one alone could not be as long
  static constexpr size_t kBlock = 4 * kHugePage, kShared = 2 * kHugePage;
  static mx::array fresh(size_t lines) {
    mx::array a(mx::allocator::malloc(lines * kLine), mx::Shape{(int)lines, kLine}, mx::uint8);
    prefer_huge_pages(a.data<uint8_t>(), lines * kLine);
    return a;
  }
  std::mutex mutex_;
  std::optional<mx::array> block_;
  size_t used_ = 0;
};
Blocks& blocks() {
  static Blocks* b = new Blocks();  // never destroyed: MLX may be gone by then
  return *b;
}
mx::array computed(const mx::array& a) {
  mx::array c = mx::contiguous(a, false, cpu_stream());
  c.eval();
  return c;
}
Packed shape_of(const Quant& q, const mx::array& w, long long K) {
  Packed p{};
  p.format = q.format, p.bits = q.bits, p.group = q.group;
  p.N = w.shape(-2), p.K = (int)K, p.experts = w.ndim() == 3 ? w.shape(0) : 0;
  return p;
}
// The product's scale, if any, is the last input.
struct Scaled {
  const float* one = nullptr;
  bool by_column = false;
};
Scaled scaled(const Arrays& in, bool has) {
  if (!has) return {};
  return {in.back().data<float>(), in.back().size() > 1};
}
void check_x(const char* where, const mx::array& x, const PackedArray& w) {
  if (!is_float(x.dtype()) || x.ndim() < 1) bad(where, "x must be float32, float16 or bfloat16 and have an axis");
  if (x.shape(-1) != w.shape.K) bad(where, "x and the packed weights disagree about the inner size");
}

}  // namespace

Packed packed_at(const PackedArray& p, const mx::array& bytes) {
  Packed at = p.shape;
  at.data = aligned(bytes.data<uint8_t>());
  return at;
}

PackedArray pack(const mx::array& w, const mx::array& scales, const std::optional<mx::array>& biases, int group_size,
                 int bits, const std::string& mode) {
  const char* f = "pack";
  if (!packable(mode, bits, group_size))
    bad(f, "not packable: " + mode + ", " + std::to_string(bits) + " bits, groups of " + std::to_string(group_size));
  if (w.ndim() != 2 && w.ndim() != 3) bad(f, "w must be [N, packed K] or [experts, N, packed K]");
  const long long K = (long long)w.shape(-1) * 32 / bits;
  const Quant q = check_weights(f, K, w, scales, biases, group_size, bits, mode, w.ndim() - 2);
  Packed p = shape_of(q, w, K);
  if (w.size() == 0) bad(f, "w is empty");
  const mx::array codes = computed(w), s = computed(scales);
  std::optional<mx::array> b;
  if (biases) b = computed(*biases);
  p.st = type_of(s.dtype());
  if (q.format == AFFINE) {
    p.zero = symmetric_zero(s.data<char>(), b->data<char>(), p.st, s.size());
    p.biased = p.zero < 0;
    if (p.biased) p.zero = 0;
  } else p.zero = 12;
  mx::array bytes = blocks().take(packed_bytes(p));
  uint8_t* to = const_cast<uint8_t*>(aligned(bytes.data<uint8_t>()));
  pack_strips(p, {codes.data<uint8_t>(), s.data<char>(), b ? b->data<char>() : nullptr}, to);
  return {p, std::move(bytes)};
}

mx::array packed_matmul(const mx::array& x, const PackedArray& w, const std::optional<mx::array>& global_scale,
                        bool exact) {
  const char* f = "packed_matmul";
  check_x(f, x, w);
  if (w.shape.experts) bad(f, "the weights are a stack of experts; packed_gather takes those");
  Arrays in{x, w.bytes};
  if (global_scale) in.push_back(scale_input(f, *global_scale, global_scale->size() > 1 ? w.shape.N : 1));
  auto call = std::make_shared<Call>(cpu_stream(), "ArrieroPackedMatmul");
  call->plan = [w, exact, has = global_scale.has_value()](const Arrays& in, Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    PackedProduct p{packed_at(w, in[1]), 1, nullptr, nullptr, out[0].data<char>(), (size_t)w.shape.N, nullptr, 0};
    const int M = (int)(in[0].size() / w.shape.K);
    PackedJob job{in[0].data<char>(), type_of(in[0].dtype()), M, w.shape.K, exact || M < kFastRows,
                        nullptr, 1, nullptr, 0, nullptr, nullptr};
    return [p, job, g = scaled(in, has)]() mutable {
      if (g.by_column) p.row_scales = g.one;
      else if (g.one) p.gscale = *g.one;
      job.products = &p;
      packed_run()(job);
    };
  };
  call->shapes = [N = w.shape.N](const Arrays& in) {
    auto s = in[0].shape();
    s.back() = N;
    return std::vector<mx::Shape>{s};
  };
  auto shape = x.shape();
  shape.back() = w.shape.N;
  return mx::array(shape, x.dtype(), call, std::move(in));
}

mx::array packed_gather(const mx::array& x, const PackedArray& w, const mx::array& indices,
                        const std::optional<mx::array>& global_scale, bool exact) {
  const char* f = "packed_gather";
  check_x(f, x, w);
  if (!w.shape.experts) bad(f, "the weights are a single matrix; packed_matmul takes those");
  if (x.ndim() != 2 || (indices.ndim() != 1 && indices.ndim() != 2) || indices.shape(0) != x.shape(0))
    bad(f, "x must be [T, K] and indices [T] or [T, k]");
  Arrays in{x, w.bytes, mx::astype(indices, mx::int32, cpu_stream())};
  if (global_scale) {
    auto g = *global_scale;
    if (g.size() == 1) g = mx::broadcast_to(mx::reshape(g, {1}, cpu_stream()), {w.shape.experts}, cpu_stream());
    in.push_back(scale_input(f, g, w.shape.experts));
  }
  auto call = std::make_shared<Call>(cpu_stream(), "ArrieroPackedGather");
  call->plan = [w, exact, has = global_scale.has_value()](const Arrays& in, Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    PackedProduct p{packed_at(w, in[1]), 1, nullptr, has ? in[3].data<float>() : nullptr, out[0].data<char>(),
                          (size_t)w.shape.N, nullptr, 0};
    const int rows = (int)in[2].size();
    PackedJob job{in[0].data<char>(), type_of(in[0].dtype()), rows, w.shape.K, exact || rows < kFastRows,
                        nullptr, 1, nullptr, 0, nullptr, nullptr};
    return [p, job, index = in[2].data<int>(), rows, per_x = rows / in[0].shape(0)]() mutable {
      job.products = &p;
      packed_experts(job, index, rows, per_x);
    };
  };
  auto shape = indices.shape();
  shape.push_back(w.shape.N);
  return mx::array(shape, x.dtype(), call, std::move(in));
}

mx::array take_packed(const PackedArray& w, const mx::array& ids, const std::optional<mx::array>& global_scale,
                      mx::Dtype dtype) {
  const char* f = "packed_rows";
  if (w.shape.experts) bad(f, "the weights are a stack of experts, not one matrix");
  if (ids.ndim() != 1 || !is_float(dtype)) bad(f, "ids [T] and a float dtype are needed");
  Arrays in{mx::astype(ids, mx::int32, cpu_stream()), w.bytes};
  if (global_scale) in.push_back(scale_input(f, *global_scale, 1));
  auto call = std::make_shared<Call>(cpu_stream(), "ArrieroPackedRows");
  call->plan = [w, has = global_scale.has_value()](const Arrays& in, Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    return [p = packed_at(w, in[1]), ids = in[0].data<int>(), T = in[0].shape(0), y = out[0].data<char>(),
            type = type_of(out[0].dtype()), g = scaled(in, has)] {
      packed_rows(p, ids, T, g.one ? *g.one : 1.f, y, type);
    };
  };
  return mx::array({ids.shape(0), w.shape.K}, dtype, call, std::move(in));
}

}  // namespace arriero
