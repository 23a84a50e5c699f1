// Products as MLX operations: checks, then a Call.
#include <cstring>

#include "kernels.h"
#include "matrix.h"
#include "mlx/ops.h"

namespace arriero {
namespace {

[[noreturn]] void bad(const char* where, const std::string& what) {
  throw std::invalid_argument("[arriero_cpu." + std::string(where) + "] " + what);
}
int format_of(const std::string& mode) {
  return mode == "affine" ? AFFINE : mode == "nvfp4" ? NVFP4 : mode == "mxfp4" ? MXFP4 : mode == "mxfp8" ? MXFP8 : -1;
}
bool known(int format, int bits, int group) {
  switch (format) {
    case AFFINE:
      return (group == 32 || group == 64 || group == 128) && bits >= 1 && bits <= 8 && bits != 7;
    case NVFP4: return bits == 4 && group == 16;
    case MXFP4: return bits == 4 && group == 32;
    case MXFP8: return bits == 8 && group == 32;
  }
  return false;
}
void check(const char* f, const mx::array& x, const mx::array& w, const mx::array& scales,
           const std::optional<mx::array>& biases, int group, int bits, const std::string& mode, size_t lead) {
  if (!is_float(x.dtype()) || x.ndim() < 1) bad(f, "x must be float32, float16 or bfloat16 and have an axis");
  check_rowwise(f, check_weights(f, x.shape(-1), w, scales, biases, group, bits, mode, lead));
}
Product make(const Arrays& in, const mx::array& out) {
  const auto &x = in[0], &w = in[1];
  Product p{};
  p.gscale = 1;
  p.K = x.shape(-1), p.N = w.shape(-2), p.ldy = p.N;
  p.M = p.K ? (int)(x.size() / p.K) : 0;
  p.x = x.data<char>(), p.xt = type_of(x.dtype());
  p.w = w.data<uint8_t>(), p.wrow = (size_t)w.shape(-1) * w.itemsize();
  if (is_float(w.dtype())) p.format = DENSE, p.wt = type_of(w.dtype());
  else p.format = MXFP8, p.scales = in[2].data<char>();
  p.y = const_cast<char*>(out.data<char>()), p.yt = type_of(out.dtype());
  return p;
}
mx::array product_call(const char* label, const mx::array& x, const mx::array& w, Arrays in, bool scaled) {
  auto call = std::make_shared<Call>(cpu_stream(), label);
  call->plan = [scaled](const Arrays& in, Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    if (in[0].size() == 0) return [p = out[0].data<char>(), n = out[0].nbytes()] { std::memset(p, 0, n); };
    const float* g = scaled ? in.back().data<float>() : nullptr;
    return [p = make(in, out[0]), g, by_row = scaled && in.back().size() > 1]() mutable {
      if (by_row) p.row_scales = g;
      else if (g) p.gscale = *g;
      table().product(p);
    };
  };
  call->shapes = [](const Arrays& in) {
    auto s = in[0].shape();
    s.back() = in[1].shape(-2);
    return std::vector<mx::Shape>{s};
  };
  auto shape = x.shape();
  shape.back() = w.shape(-2);
  return mx::array(shape, x.dtype(), call, std::move(in));
}
mx::array experts_call(const char* label, const mx::array& x, const mx::array& w, Arrays in,
                       const mx::array& indices, bool scaled) {
  if (x.ndim() != 2 || (indices.ndim() != 1 && indices.ndim() != 2) || indices.shape(0) != x.shape(0))
    bad(label, "x must be [T, K] and indices [T] or [T, k]");
  auto call = std::make_shared<Call>(cpu_stream(), label);
  call->plan = [scaled](const Arrays& in, Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    if (in[0].size() == 0) return [p = out[0].data<char>(), n = out[0].nbytes()] { std::memset(p, 0, n); };
    const auto& index = in[in.size() - 1 - scaled];
    Experts e{};
    e.p = make(in, out[0]);
    e.rows = (int)index.size(), e.experts = in[1].shape(0);
    e.per_x = e.rows / in[0].shape(0);
    e.index = index.data<int>();
    e.gscales = scaled ? in.back().data<float>() : nullptr;
    return [e] { experts(e); };
  };
  auto shape = indices.shape();
  shape.push_back(w.shape(-2));
  return mx::array(shape, x.dtype(), call, std::move(in));
}

}  // namespace

// lead: axes of w before [N, packed K]
Quant check_weights(const char* f, long long K, const mx::array& w, const mx::array& scales,
                    const std::optional<mx::array>& biases, int group, int bits, const std::string& mode, size_t lead) {
  const int format = format_of(mode);
  if (!known(format, bits, group))
    bad(f, "unsupported format: " + mode + ", " + std::to_string(bits) + " bits, groups of " + std::to_string(group));
  if (w.ndim() != lead + 2 || w.dtype() != mx::uint32)
    bad(f, "w must be uint32 with " + std::to_string(lead + 2) + " axes");
  if (K % group || (long long)w.shape(-1) * 32 != K * bits) bad(f, "x and w disagree about the inner size");
  if ((format == AFFINE) != biases.has_value()) bad(f, "biases go with mode 'affine', and only with it");
  auto shape = w.shape();
  shape.back() = (int)(K / group);
  if (scales.shape() != shape || (biases && biases->shape() != shape)) bad(f, "scales or biases have the wrong shape");
  if (format == AFFINE ? !is_float(scales.dtype()) || scales.dtype() != biases->dtype() : scales.dtype() != mx::uint8)
    bad(f, "scales (and biases) have the wrong dtype");
  return {format, bits, group};
}
void check_rowwise(const char* f, const Quant& q) {
  if (q.format != MXFP8) bad(f, "only mxfp8 is multiplied as it lies; pack() the weights of other formats first");
}
mx::array scale_input(const char* f, const mx::array& g, int n) {
  if ((int)g.size() != n) bad(f, "global_scale must hold " + std::to_string(n) + " value(s)");
  return mx::astype(g, mx::float32, cpu_stream());
}

bool packable(const std::string& mode, int bits, int group_size) {
  const int format = format_of(mode);
  return format != MXFP8 && known(format, bits, group_size);
}
bool supports(const std::string& mode, int bits, int group_size, mx::Dtype x) {
  return is_float(x) && format_of(mode) == MXFP8 && known(MXFP8, bits, group_size);
}

mx::array quantized_matmul(const mx::array& x, const mx::array& w, const mx::array& scales,
                           const std::optional<mx::array>& biases, int group_size, int bits, const std::string& mode,
                           const std::optional<mx::array>& global_scale) {
  check("quantized_matmul", x, w, scales, biases, group_size, bits, mode, 0);
  Arrays in{x, w, scales};
  if (global_scale)
    in.push_back(scale_input("quantized_matmul", *global_scale, global_scale->size() > 1 ? w.shape(0) : 1));
  return product_call("ArrieroQuantizedMatmul", x, w, std::move(in), global_scale.has_value());
}

mx::array matmul(const mx::array& x, const mx::array& w) {
  if (!is_float(x.dtype()) || !is_float(w.dtype())) bad("matmul", "x and w must be float32, float16 or bfloat16");
  if (x.ndim() < 1 || w.ndim() != 2 || x.shape(-1) != w.shape(1)) bad("matmul", "x [..., K] and w [N, K] disagree");
  return product_call("ArrieroMatmul", x, w, {x, w}, false);
}

mx::array gather_qmm(const mx::array& x, const mx::array& w, const mx::array& scales,
                     const std::optional<mx::array>& biases, const mx::array& indices, int group_size, int bits,
                     const std::string& mode, const std::optional<mx::array>& global_scale) {
  check("gather_qmm", x, w, scales, biases, group_size, bits, mode, 1);
  Arrays in{x, w, scales};
  in.push_back(mx::astype(indices, mx::int32, cpu_stream()));
  if (global_scale) {
    auto g = *global_scale;
    if (g.size() == 1) g = mx::broadcast_to(mx::reshape(g, {1}, cpu_stream()), {w.shape(0)}, cpu_stream());
    in.push_back(scale_input("gather_qmm", g, w.shape(0)));
  }
  return experts_call("gather_qmm", x, w, std::move(in), indices, global_scale.has_value());
}

mx::array gather_mm(const mx::array& x, const mx::array& w, const mx::array& indices) {
  if (!is_float(x.dtype()) || !is_float(w.dtype())) bad("gather_mm", "x and w must be float32, float16 or bfloat16");
  if (x.ndim() != 2 || w.ndim() != 3 || x.shape(-1) != w.shape(2))
    bad("gather_mm", "x [T, K] and w [E, N, K] disagree");
  Arrays in{x, w, mx::astype(indices, mx::int32, cpu_stream())};
  return experts_call("gather_mm", x, w, std::move(in), indices, false);
}

mx::array take_rows(const mx::array& w, const mx::array& scales, const std::optional<mx::array>& biases,
                    const mx::array& ids, int group_size, int bits, const std::string& mode,
                    const std::optional<mx::array>& global_scale, mx::Dtype dtype) {
  const char* f = "take_rows";
  if (w.ndim() != 2 || bits < 1 || ids.ndim() != 1 || !is_float(dtype))
    bad(f, "w [N, packed K], ids [T] and a float dtype are needed");
  const int K = (int)((long long)w.shape(1) * 32 / bits);
  check_rowwise(f, check_weights(f, K, w, scales, biases, group_size, bits, mode, 0));
  Arrays in{w, scales};
  in.push_back(mx::astype(ids, mx::int32, cpu_stream()));
  if (global_scale) in.push_back(scale_input(f, *global_scale, 1));
  auto call = std::make_shared<Call>(cpu_stream(), "ArrieroTakeRows");
  call->plan = [K, scaled = global_scale.has_value()](const Arrays& in, Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    const auto& ids = in[in.size() - 1 - scaled];
    Product p{};
    p.format = MXFP8;
    p.M = ids.shape(0), p.N = in[0].shape(0), p.K = K, p.ldy = K, p.gscale = 1;
    p.w = in[0].data<uint8_t>(), p.wrow = (size_t)in[0].shape(1) * in[0].itemsize();
    p.scales = in[1].data<char>();
    p.y = out[0].data<char>(), p.yt = type_of(out[0].dtype()), p.xrows = ids.data<int>();
    return [p, g = scaled ? in.back().data<float>() : nullptr]() mutable {
      if (g) p.gscale = *g;
      table().take(p);
    };
  };
  return mx::array({ids.shape(0), K}, dtype, call, std::move(in));
}

}  // namespace arriero
