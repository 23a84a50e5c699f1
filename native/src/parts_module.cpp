#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "attention_part.h"
#include "gated_part.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace arriero {

void bind_parts(nb::module_& m) {
  nb::class_<Matrix>(m, "Matrix")
      .def(nb::init<const mx::array&, const std::optional<mx::array>&, const std::optional<mx::array>&, int, int,
                    const std::string&, const std::optional<mx::array>&, const std::optional<mx::array>&>(),
           "w"_a, "scales"_a.none(), "biases"_a.none(), "group_size"_a, "bits"_a, "mode"_a, "global_scale"_a.none(),
           "bias"_a.none());
  nb::class_<AttentionPart>(m, "AttentionPart")
      .def(
          "__init__",
          [](AttentionPart* self, const std::optional<Gain>& before, const std::vector<Matrix>& qkv,
             const std::optional<Gain>& query_norm, const std::optional<Gain>& key_norm, const Matrix& out,
             const std::optional<Gain>& after, int heads, int kv_heads, int head_dim, float scale, float softcap,
             int window, bool interleaved) {
            new (self) AttentionPart({before, qkv, query_norm, key_norm, out, after, heads, kv_heads, head_dim, scale,
                                      softcap, window, interleaved});
          },
          "before"_a.none(), "qkv"_a, "query_norm"_a.none(), "key_norm"_a.none(), "out"_a, "after"_a.none(), "heads"_a,
          "kv_heads"_a, "head_dim"_a, "scale"_a, "softcap"_a, "window"_a, "interleaved"_a)
      .def("__call__", &AttentionPart::operator(), "x"_a, "angles"_a.none(), "buffers"_a, "lengths"_a, "positions"_a,
           "bases"_a);
  nb::class_<GatedPart>(m, "GatedPart")
      .def(
          "__init__",
          [](GatedPart* self, const Gain& before, const std::vector<Matrix>& gate_up, const Matrix& down,
             const std::optional<Gain>& after, bool gelu) {
            new (self) GatedPart({before, gate_up, down, after, gelu});
          },
          "before"_a, "gate_up"_a, "down"_a, "after"_a.none(), "gelu"_a)
      .def("__call__", &GatedPart::operator(), "x"_a, "branch"_a);
}

}  // namespace arriero
