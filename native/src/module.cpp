#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bandwidth.h"
#include "call.h"
#include "kernels.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace arriero;

namespace arriero {
void bind_parts(nb::module_& m);
void bind_sequence(nb::module_& m);
}

NB_MODULE(_native, m) {
  bind_parts(m);
  bind_sequence(m);
  m.def("quantized_matmul", &quantized_matmul, "x"_a, "w"_a, "scales"_a, "biases"_a.none(), "group_size"_a, "bits"_a,
        "mode"_a, "global_scale"_a.none());
  m.def("matmul", &matmul, "x"_a, "w"_a);
  m.def("gather_qmm", &gather_qmm, "x"_a, "w"_a, "scales"_a, "biases"_a.none(), "indices"_a, "group_size"_a, "bits"_a,
        "mode"_a, "global_scale"_a.none());
  m.def("gather_mm", &gather_mm, "x"_a, "w"_a, "indices"_a);
  m.def("supports", &supports, "mode"_a, "bits"_a, "group_size"_a, "x_dtype"_a);
  m.def("attention", &attention, "q"_a, "keys"_a, "values"_a, "scale"_a, "lengths"_a, "counts"_a, "positions"_a,
        "bases"_a.none(), "window"_a.none(), "softcap"_a.none(), "sinks"_a.none(), "causal"_a);
  m.def("kv_append", &kv_append, "buffer"_a, "update"_a, "start"_a);
  m.def("rms_norm", &rms_norm, "x"_a, "w"_a.none(), "eps"_a);
  m.def("add_rms_norm", &add_rms_norm, "x"_a, "r"_a, "w"_a.none(), "eps"_a);
  m.def("rope", &rope, "x"_a, "table"_a, "positions"_a.none(), "interleaved"_a);
  m.def("rope_table", static_cast<mx::array (*)(const mx::array&, const mx::array&, float)>(&rope_table),
        "positions"_a, "frequencies"_a, "scale"_a);
  m.def("glu", &glu, "gate"_a, "up"_a, "gelu"_a);
  m.def("argmax", &argmax, "x"_a);
  m.def("take_rows", &take_rows, "w"_a, "scales"_a, "biases"_a.none(), "ids"_a, "group_size"_a, "bits"_a, "mode"_a,
        "global_scale"_a.none(), "dtype"_a);
  m.def("isa", [] { return std::string(isa_name()); });
  m.def("isa_problem", [] { return std::string(isa_problem()); });
  m.def("pool_problem", [] { return std::string(pool_problem()); });
  m.def(
      "quota_cores", [](const std::string& root) { return quota_cores(root.c_str()); }, "root"_a);
  m.def("read_bandwidth", &read_bandwidth, "seconds"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("threads", &pool_threads);
  m.def("set_threads", &pool_resize, "n"_a);
  m.def("set_spin_us", &pool_set_spin, "us"_a);
}
