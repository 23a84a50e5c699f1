#include "matrix.h"

#include "mlx/ops.h"

namespace arriero {
namespace {

[[noreturn]] void bad(const std::string& what) { throw std::invalid_argument("[arriero_cpu.matrix] " + what); }

}  // namespace

Matrix::Matrix(const mx::array& w, const std::optional<mx::array>& scales, const std::optional<mx::array>& biases,
               int group_size, int bits, const std::string& mode, const std::optional<mx::array>& global_scale,
               const std::optional<mx::array>& bias)
    : arrays{w}, scaled(global_scale), shifted(bias) {
  if (w.ndim() != 2) bad("w must have two axes");
  rows = w.shape(0);
  if (scales) {
    if (bits < 1) bad("no number of bits");
    columns = (int)((long long)w.shape(1) * 32 / bits);
    quant = check_weights("matrix", columns, w, *scales, biases, group_size, bits, mode, 0);
    check_rowwise("matrix", quant);
    arrays.push_back(*scales);
  } else {
    if (!is_float(w.dtype()) || biases) bad("a dense matrix holds floats, and no scales");
    columns = w.shape(1);
    quant = Quant{DENSE, 0, 1};
  }
  add_rest(global_scale, bias);
}
Matrix::Matrix(const PackedArray& p, const std::optional<mx::array>& global_scale, const std::optional<mx::array>& bias,
               bool exact)
    : arrays{p.bytes},
      quant{p.shape.format, p.shape.bits, p.shape.group},
      packed(p),
      rows(p.shape.N),
      columns(p.shape.K),
      scaled(global_scale),
      shifted(bias),
      exact(exact) {
  if (p.shape.experts) bad("a stack of experts is no matrix");
  add_rest(global_scale, bias);
}
void Matrix::add_rest(const std::optional<mx::array>& global_scale, const std::optional<mx::array>& bias) {
  if (scaled) arrays.push_back(scale_input("matrix", *global_scale, global_scale->size() > 1 ? rows : 1));
  if (!shifted) return;
  if (!is_float(bias->dtype()) || bias->ndim() != 1 || bias->shape(0) != rows) bad("bias does not fit");
  arrays.push_back(*bias);
}
void Matrix::check(const char* where, mx::Dtype x) const {
  if (!packed && shifted && arrays.back().dtype() != x)
    throw std::invalid_argument("[arriero_cpu." + std::string(where) + "] a bias must have x's dtype");
}

Step::Step(const Matrix& m, const Arrays& in, size_t& at) : p_{} {
  const auto& w = in[at++];
  p_.format = m.quant.format, exact_ = m.exact;
  p_.K = m.columns, p_.N = m.rows, p_.gscale = 1;
  if (m.packed) packed_ = packed_at(*m.packed, w);
  else p_.w = w.data<uint8_t>(), p_.wrow = (size_t)w.shape(-1) * w.itemsize();
  if (p_.format == DENSE) p_.wt = type_of(w.dtype());
  else if (!m.packed) p_.scales = in[at++].data<char>();
  if (m.scaled) by_row_ = in[at].size() > 1, scale_ = in[at++].data<float>();
  if (m.shifted) bias_ = in[at].data<char>(), bias_type_ = type_of(in[at].dtype()), at++;
}
PackedProduct Step::product(void* y, size_t ldy) const {
  PackedProduct p{packed_, 1, nullptr, nullptr, y, ldy, bias_, bias_type_};
  if (by_row_) p.row_scales = scale_;
  else if (scale_) p.gscale = *scale_;
  return p;
}
void run_steps(const std::vector<Step>& steps, const void* x, int rows, int type, void* y, size_t ldy, bool fast) {
  constexpr size_t most = 16;
  PackedProduct list[most];
  size_t n = 0, column = 0;
  bool all = rows >= kFastRows;
  for (const Step& s : steps) all = all && !(s.packed() && s.exact());
  fast = fast || all;
  auto flush = [&] {
    if (n) packed_run()({x, type, rows, steps[0].inner(), !fast, list, (int)n, nullptr, 0, nullptr, nullptr});
    n = 0;
  };
  for (const Step& s : steps) {
    void* to = (char*)y + column * bytes_of(type);
    column += s.width();
    if (!s.packed()) s.run(x, rows, type, to, ldy);
    else if (list[n++] = s.product(to, ldy); n == most) flush();
  }
  flush();
}
void Step::run(const void* x, int rows, int type, void* y, size_t ldy) const {
  Product p = p_;
  p.M = rows, p.x = x, p.xt = type, p.y = y, p.yt = type, p.ldy = ldy;
  if (by_row_) p.row_scales = scale_;
  else if (scale_) p.gscale = *scale_;
  table().product(p);
  if (!bias_) return;
  for (int m = 0; m < rows; m++) {
    char* row = (char*)y + m * ldy * bytes_of(type);
    add(row, bias_, row, 1, p.N, type);
  }
}

NormStep::NormStep(const std::optional<Gain>& gain, const Arrays& in, size_t& at) {
  if (!gain) return;
  p_.w = in[at].data<char>(), p_.wt = type_of(in[at].dtype()), p_.n = in[at].shape(0), p_.eps = gain->second;
  at++;
}
void NormStep::run(const void* x, void* y, int rows, int type) const {
  Norm p = p_;
  p.x = x, p.y = y, p.rows = rows, p.xt = type;
  table().norm(p);
}
void NormStep::run_sum(const void* x, const void* r, void* h, void* y, int rows, int type) const {
  Norm p = p_;
  p.x = x, p.r = r, p.h = h, p.y = y, p.rows = rows, p.xt = type;
  table().norm(p);
}
void add(const void* x, const void* r, void* y, int rows, int n, int type) {
  Norm p{};
  p.x = x, p.r = r, p.h = y, p.rows = rows, p.n = n, p.xt = type;
  table().norm(p);
}

bool settled(const Arrays& arrays) {
  for (const auto& a : arrays)
    if (!a.is_available() || !a.flags().row_contiguous) return false;
  return true;
}
void check_gain(const char* where, const std::optional<Gain>& gain, int width) {
  if (gain && (!is_float(gain->first.dtype()) || gain->first.ndim() != 1 || gain->first.shape(0) != width))
    throw std::invalid_argument("[arriero_cpu." + std::string(where) + "] a gain must hold " + std::to_string(width) +
                                " floats");
}
void append(Arrays& in, const std::optional<Gain>& gain) {
  if (gain) in.push_back(gain->first);
}
void append(Arrays& in, const Matrix& m) { in.insert(in.end(), m.arrays.begin(), m.arrays.end()); }

}  // namespace arriero
