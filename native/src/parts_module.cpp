#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "attention_part.h"
#include "gated_part.h"
#include "stack.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace arriero {

void bind_parts(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<PackedArray>(m, "Packed")
      .def_prop_ro("rows", [](const PackedArray& p) { return p.shape.N; })
      .def_prop_ro("columns", [](const PackedArray& p) { return p.shape.K; })
      .def_prop_ro("experts", [](const PackedArray& p) { return p.shape.experts; })
      .def_prop_ro("symmetric", [](const PackedArray& p) { return p.shape.format == AFFINE && !p.shape.biased; })
      .def_prop_ro("nbytes", &PackedArray::nbytes)
      .def_prop_ro("arrays", [](const PackedArray& p) { return Arrays{p.bytes}; });
  m.def("pack", &pack, "w"_a, "scales"_a, "biases"_a.none(), "group_size"_a, "bits"_a, "mode"_a, Release());
  m.def("packable", &packable, "mode"_a, "bits"_a, "group_size"_a);
  m.def("packed_matmul", &packed_matmul, "x"_a, "packed"_a, "global_scale"_a.none(), "exact"_a);
  m.def("packed_gather", &packed_gather, "x"_a, "packed"_a, "indices"_a, "global_scale"_a.none(), "exact"_a);
  m.def("packed_rows", &take_packed, "packed"_a, "ids"_a, "global_scale"_a.none(), "dtype"_a);
  nb::class_<Matrix>(m, "Matrix")
      .def(nb::init<const mx::array&, const std::optional<mx::array>&, const std::optional<mx::array>&, int, int,
                    const std::string&, const std::optional<mx::array>&, const std::optional<mx::array>&>(),
           "w"_a, "scales"_a.none(), "biases"_a.none(), "group_size"_a, "bits"_a, "mode"_a, "global_scale"_a.none(),
           "bias"_a.none())
      .def(nb::init<const PackedArray&, const std::optional<mx::array>&, const std::optional<mx::array>&, bool>(),
           "packed"_a, "global_scale"_a.none(), "bias"_a.none(), "exact"_a);
  nb::class_<AttentionPart>(m, "AttentionPart")
      .def(
          "__init__",
          [](AttentionPart* self, const std::optional<Gain>& before, const std::vector<Matrix>& qkv,
             const std::optional<Gain>& query_norm, const std::optional<Gain>& key_norm, const Matrix& out,
             const std::optional<Gain>& after, int heads, int kv_heads, int head_dim, float scale, float softcap,
             int window, bool interleaved, bool exact) {
            new (self) AttentionPart({before, qkv, query_norm, key_norm, out, after, heads, kv_heads, head_dim, scale,
                                      softcap, window, interleaved, exact});
          },
          "before"_a.none(), "qkv"_a, "query_norm"_a.none(), "key_norm"_a.none(), "out"_a, "after"_a.none(), "heads"_a,
          "kv_heads"_a, "head_dim"_a, "scale"_a, "softcap"_a, "window"_a, "interleaved"_a, "exact"_a)
      .def("__call__", &AttentionPart::operator(), "x"_a, "angles"_a.none(), "buffers"_a, "lengths"_a, "positions"_a,
           "bases"_a);
  nb::class_<GatedPart>(m, "GatedPart")
      .def(
          "__init__",
          [](GatedPart* self, const Gain& before, const std::vector<Matrix>& gate_up, const Matrix& down,
             const std::optional<Gain>& after, bool gelu, bool exact) {
            new (self) GatedPart({before, gate_up, down, after, gelu, exact});
          },
          "before"_a, "gate_up"_a, "down"_a, "after"_a.none(), "gelu"_a, "exact"_a)
      .def("__call__", &GatedPart::operator(), "x"_a, "branch"_a);
  nb::class_<Stack>(m, "Stack")
      .def(nb::init<std::vector<std::pair<AttentionPart, GatedPart>>>(), "layers"_a)
      .def_prop_ro("ready", &Stack::ready)
      .def("__call__", &Stack::operator(), "x"_a, "angles"_a, "buffers"_a, "lengths"_a, "positions"_a, "bases"_a,
           "after"_a);
}

}  // namespace arriero
