#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "sequence_call.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace arriero {

void bind_sequence(nb::module_& m) {
  m.def("gated_delta", &gated_delta, "q"_a, "k"_a, "v"_a, "a"_a, "b"_a, "rate"_a, "bias"_a, "states"_a, "lengths"_a,
        "stops"_a, "eps"_a);
  m.def("depthwise_conv", &depthwise_conv, "x"_a, "w"_a, "bias"_a.none(), "tails"_a, "lengths"_a, "stops"_a,
        "dilation"_a, "silu"_a);
  m.def("top_k", &top_k, "x"_a, "k"_a);
  m.def("indexed_attention", &indexed_attention, "q"_a, "keys"_a, "values"_a, "blocks"_a, "scale"_a, "lengths"_a,
        "positions"_a, "block"_a);
  m.def("select_blocks", &select_blocks, "q"_a, "keys"_a, "scale"_a, "lengths"_a, "positions"_a, "block"_a, "width"_a);
}

}  // namespace arriero
