// The attention half of a decoder's layer as one operation.
#pragma once
#include <memory>

#include "matrix.h"

namespace arriero {

struct AttentionShape {
  std::optional<Gain> before;
  std::vector<Matrix> qkv;  // their rows, one after another, are the heads of q, of k and of v
  std::optional<Gain> query_norm, key_norm;
  Matrix out;
  std::optional<Gain> after;
  int heads, kv_heads, head_dim;
  float scale, softcap;  // softcap 0: none
  int window;            // 0: none
  bool interleaved;
  bool exact;
};
struct AttentionSteps;
// The weights as arrays, and as pointers from when they are computed.
struct AttentionWeights {
  AttentionShape shape;
  Arrays arrays;
  std::shared_ptr<const AttentionSteps> steps;
};
class AttentionPart {
 public:
  explicit AttentionPart(AttentionShape shape);
  // The result [T, hidden], then the buffers (keys and values of each span) with the new tokens in them.
  Arrays operator()(const mx::array& x, const std::optional<mx::array>& angles, const Arrays& buffers,
                    const std::vector<int>& lengths, const std::vector<long long>& positions,
                    const std::vector<long long>& bases) const;

 private:
  std::shared_ptr<AttentionWeights> weights_;
};

}  // namespace arriero
