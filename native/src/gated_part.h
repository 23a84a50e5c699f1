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
class GatedPart {
 public:
  explicit GatedPart(GatedShape shape);
  mx::array operator()(const mx::array& x, const mx::array& branch) const;

 private:
  std::shared_ptr<GatedWeights> weights_;
};

}  // namespace arriero
