// What a layer holds for its life: handed over once, so that a step carries only what changes.
#pragma once
#include <optional>
#include <string>

#include "call.h"
#include "kernels.h"
#include "packed_array.h"

namespace arriero {

// A matrix with the scale and the additive bias of its layer, and nothing computed yet.
struct Matrix {
  Matrix(const PackedArray& packed, const std::optional<mx::array>& global_scale, const std::optional<mx::array>& bias,
         bool exact);
  Matrix(const mx::array& w, const std::optional<mx::array>& scales, const std::optional<mx::array>& biases,
         int group_size, int bits, const std::string& mode, const std::optional<mx::array>& global_scale,
         const std::optional<mx::array>& bias);
  void check(const char* where, mx::Dtype x) const;  // whether activations of this type suit it
  Arrays arrays;
  Quant quant;
  std::optional<PackedArray> packed;
  int rows, columns;  // [rows, columns], unpacked
  bool scaled, shifted;  // whether there is a global scale, a bias
  bool exact = true;     // no 7-bit activations

 private:
  void add_rest(const std::optional<mx::array>& global_scale, const std::optional<mx::array>& bias);
};
// A norm's gain and epsilon.
using Gain = std::pair<mx::array, float>;

// A matrix with the memory that its arrays have once they are computed.
class Step {
 public:
  Step(const Matrix& m, const Arrays& in, size_t& at);  // takes its arrays from `at` on
  void run(const void* x, int rows, int type, void* y, size_t ldy) const;  // unless packed
  int width() const { return p_.N; }
  bool packed() const { return packed_.data != nullptr; }
  PackedProduct product(void* y, size_t ldy) const;  // if packed
  int inner() const { return p_.K; }
  bool exact() const { return exact_; }

 private:
  Product p_;
  Packed packed_{};
  int bias_type_ = F32;
  bool exact_ = true;
  const float* scale_ = nullptr;
  bool by_row_ = false;
  const void* bias_ = nullptr;
};
// The products of the same x, side by side in y's rows: those of packed weights in one parallel region. fast allows
// 7-bit activations, as does a matrix that is not exact.
void run_steps(const std::vector<Step>& steps, const void* x, int rows, int type, void* y, size_t ldy, bool fast);
class NormStep {
 public:
  NormStep() = default;
  NormStep(const std::optional<Gain>& gain, const Arrays& in, size_t& at);
  explicit operator bool() const { return p_.w != nullptr; }
  void run(const void* x, void* y, int rows, int type) const;
  void run_sum(const void* x, const void* r, void* h, void* y, int rows, int type) const;

 private:
  Norm p_{};
};
void add(const void* x, const void* r, void* y, int rows, int n, int type);  // y may be x

// Places in the memory of one task.
struct Room {
  size_t bytes = 0;
  size_t take(size_t n) {
    const size_t at = bytes;
    bytes += (n + 63) / 64 * 64;
    return at;
  }
};

// Whether arrays have the memory that they will keep, so that pointers into it can be kept too.
bool settled(const Arrays& arrays);
void check_gain(const char* where, const std::optional<Gain>& gain, int width);
void append(Arrays& in, const std::optional<Gain>& gain);
void append(Arrays& in, const Matrix& m);

}  // namespace arriero
