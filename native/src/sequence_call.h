// The sequence kernels as MLX operations.
#pragma once
#include "call.h"
#include "sequence.h"

namespace arriero {

namespace {
[[noreturn, maybe_unused]] void bad(const char* where, const std::string& what) {
  throw std::invalid_argument("[arriero_cpu." + std::string(where) + "] " + what);
}
}  // namespace

// Both return the rows' result, then per span its states after each stop and at its end.
Arrays gated_delta(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& a, const mx::array& b,
                   const mx::array& rate, const mx::array& bias, const Arrays& states, const std::vector<int>& lengths,
                   const std::vector<std::vector<int>>& stops, float eps);
Arrays depthwise_conv(const mx::array& x, const mx::array& w, const std::optional<mx::array>& bias,
                      const Arrays& tails, const std::vector<int>& lengths, const std::vector<std::vector<int>>& stops,
                      int dilation, bool silu);
mx::array top_k(const mx::array& x, int k);
mx::array indexed_attention(const mx::array& q, const Arrays& keys, const Arrays& values, const mx::array& blocks,
                            float scale, const std::vector<int>& lengths, const std::vector<long long>& positions,
                            int block);
mx::array select_blocks(const mx::array& q, const Arrays& keys, float scale, const std::vector<int>& lengths,
                        const std::vector<long long>& positions, int block, int width);

}  // namespace arriero
