#include "matrix.h"

#include "mlx/ops.h"

namespace arriero {

Step::Step(const Matrix& m, const Arrays& in, size_t& at) : p_{} {
  const auto& w = in[at++];
  p_.format = m.quant.format, p_.bits = m.quant.bits, p_.group = m.quant.group, p_.exact = m.quant.exact;
  p_.K = m.columns, p_.N = m.rows, p_.gscale = 1;
  p_.w = w.data<uint8_t>(), p_.wrow = (size_t)w.shape(-1) * w.itemsize();
  if (p_.format == DENSE) p_.wt = type_of(w.dtype());
  else {
    p_.scales = in[at].data<char>(), p_.st = type_of(in[at].dtype()), at++;
    if (p_.format == AFFINE) p_.biases = in[at++].data<char>();
  }
  if (m.scaled) by_row_ = in[at].size() > 1, scale_ = in[at++].data<float>();
  if (m.shifted) bias_ = in[at++].data<char>();
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
