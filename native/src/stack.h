// Layers in a row as one operation, which writes into their caches' own memory.
#pragma once
#include "attention_part.h"
#include "gated_part.h"

namespace arriero {

class Stack {
 public:
  explicit Stack(std::vector<std::pair<AttentionPart, GatedPart>> layers);
  bool ready() const;  // whether all weights are computed, without which it cannot be called
  // x [T, hidden] behind the last layer. For each layer: angles; for each of its spans: keys, values, base. Whoever
  // reads the buffers next must depend on the result; after: what must be computed before them.
  mx::array operator()(const mx::array& x, std::vector<std::optional<mx::array>> angles, Arrays buffers,
                       const std::vector<int>& lengths, const std::vector<long long>& positions,
                       const std::vector<long long>& bases, const Arrays& after) const;

 private:
  std::vector<std::pair<AttentionPart, GatedPart>> layers_;
};

}  // namespace arriero
