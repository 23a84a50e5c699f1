// A packed matrix, or a stack of them for experts, in memory that MLX counts.
#pragma once
#include <optional>
#include <string>

#include "call.h"
#include "packed.h"

namespace arriero {

// MLX's layout, checked.
struct Quant {
  int format, bits, group;
};
Quant check_weights(const char* where, long long K, const mx::array& w, const mx::array& scales,
                    const std::optional<mx::array>& biases, int group, int bits, const std::string& mode, size_t lead);
void check_rowwise(const char* where, const Quant& q);  // whether products take it without packing
mx::array scale_input(const char* where, const mx::array& scale, int n);

struct PackedArray {
  Packed shape;    // without its data
  mx::array bytes;
  size_t nbytes() const { return packed_bytes(shape); }
};
Packed packed_at(const PackedArray& p, const mx::array& bytes);  // with its data, from the array as it is computed

bool packable(const std::string& mode, int bits, int group_size);
// Computes its arguments, and the result at once.
PackedArray pack(const mx::array& w, const mx::array& scales, const std::optional<mx::array>& biases, int group_size,
                 int bits, const std::string& mode);
mx::array packed_matmul(const mx::array& x, const PackedArray& w, const std::optional<mx::array>& global_scale,
                        bool exact);
mx::array packed_gather(const mx::array& x, const PackedArray& w, const mx::array& indices,
                        const std::optional<mx::array>& global_scale, bool exact);
mx::array take_packed(const PackedArray& w, const mx::array& ids, const std::optional<mx::array>& global_scale,
                      mx::Dtype dtype);

}  // namespace arriero
