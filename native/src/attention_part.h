// The attention half of a decoder's layer as one operation.
#pragma once
#include <memory>
#include <vector>

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
// A call with every pointer known but those of x and y.
struct AttentionWork {
  std::shared_ptr<const AttentionSteps> steps;
  std::shared_ptr<const AttentionWeights> weights;  // kept alive until the task is done
  std::vector<Span> spans;
  Attention a;
  const float* angles;
  int rows, hidden, rot, type;
  bool interleaved, fast;
  size_t normed, row, q, total;  // places in the task's memory

  void operator()(const char* x, char* y);

 private:
  void rotate(const char* from, char* to, int heads, const float* by) const;
  void place(int t, const Span& s, char* token, char* query) const;
};
class AttentionPart {
 public:
  explicit AttentionPart(AttentionShape shape);
  // The spans of a call, which is checked: keys and values of each in buffers, the pointers to them still missing.
  std::vector<Span> spans(const mx::array& x, const std::optional<mx::array>& angles, const mx::array* buffers,
                          const std::vector<int>& lengths, const std::vector<long long>& positions,
                          const long long* bases) const;
  bool ready() const;  // whether the weights are computed
  // For weights that are: the call for spans of so many rows, whose buffers have memory.
  AttentionWork work(int rows, int type, const std::optional<mx::array>& angles, std::vector<Span> spans,
                     const mx::array* buffers) const;
  const std::shared_ptr<AttentionWeights>& weights() const { return weights_; }
  // The result [T, hidden], then the buffers (keys and values of each span) with the new tokens in them.
  Arrays operator()(const mx::array& x, const std::optional<mx::array>& angles, const Arrays& buffers,
                    const std::vector<int>& lengths, const std::vector<long long>& positions,
                    const std::vector<long long>& bases) const;

 private:
  std::shared_ptr<AttentionWeights> weights_;
};

}  // namespace arriero
