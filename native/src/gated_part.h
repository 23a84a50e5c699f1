// The feed-forward half of a decoder's layer as one operation.
#pragma once
#include <memory>

#include "matrix.h"

namespace arriero {

struct GatedShape {
  Gain before;
  std::vector<Matrix> gate_up;  // their rows, one after another, are those of gate and of up
  Matrix down;
  std::optional<Gain> after;
  bool gelu;
  bool exact;
};
struct GatedSteps;
// The weights as arrays, and as pointers from when they are computed.
struct GatedWeights {
  GatedShape shape;
  Arrays arrays;
  std::shared_ptr<const GatedSteps> steps;
};
// A call with every pointer known but those of x, branch and y; y may be x.
struct GatedWork {
  std::shared_ptr<const GatedSteps> steps;
  std::shared_ptr<const GatedWeights> weights;  // kept alive until the task is done
  int rows, hidden, type;
  bool gelu, fast;
  size_t sum, normed, both, product, total;  // places in the task's memory

  void operator()(const char* x, const char* branch, char* y) const;
};
class GatedPart {
 public:
  explicit GatedPart(GatedShape shape);
  mx::array operator()(const mx::array& x, const mx::array& branch) const;
  void check(const mx::array& x) const;      // whether it takes x
  bool ready() const;                        // whether the weights are computed
  GatedWork work(int rows, int type) const;  // for weights that are
  const std::shared_ptr<GatedWeights>& weights() const { return weights_; }

 private:
  std::shared_ptr<GatedWeights> weights_;
};

}  // namespace arriero
