// One MLX primitive for all kernels: it allocates the outputs and hands a closure to the CPU stream.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "mlx/primitives.h"

namespace arriero {

namespace mx = mlx::core;
using Arrays = std::vector<mx::array>;
using Task = std::function<void()>;

struct Call : mx::Primitive {
  const char* label = "";
  // Makes the task that the stream's thread runs. Memory is allocated by then, inputs are not yet computed; the task
  // holds pointers and parameters by value, because arrays cost a microsecond to carry and the primitive may be gone.
  std::function<Task(const Arrays& in, Arrays& out)> plan;
  std::function<std::vector<mx::Shape>(const Arrays& in)> shapes;  // for shapeless mx.compile; optional
  // Inputs from strided_from on may have any strides but in their last axis; the others come row-contiguous.
  size_t strided_from = ~size_t(0), strided_to = ~size_t(0);
  // Outputs [shared_to, shared_to + shared) are the buffers of the inputs from shared_from on, written in place.
  size_t shared = 0, shared_from = 0, shared_to = 0;

  Call(mx::Stream s, const char* label) : mx::Primitive(s), label(label) {}
  void eval_cpu(const Arrays& in, Arrays& out) override;
  void eval_gpu(const Arrays&, Arrays&) override { throw std::runtime_error("[arriero_cpu] runs on the CPU only"); }
  const char* name() const override { return label; }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    return shapes ? shapes(in) : mx::Primitive::output_shapes(in);
  }
};

mx::Stream cpu_stream();  // of the default device, which must be the CPU
int type_of(mx::Dtype d);
bool is_float(mx::Dtype d);

mx::array quantized_matmul(const mx::array& x, const mx::array& w, const mx::array& scales,
                           const std::optional<mx::array>& biases, int group_size, int bits, const std::string& mode,
                           const std::optional<mx::array>& global_scale);
mx::array matmul(const mx::array& x, const mx::array& w);
mx::array gather_qmm(const mx::array& x, const mx::array& w, const mx::array& scales,
                     const std::optional<mx::array>& biases, const mx::array& indices, int group_size, int bits,
                     const std::string& mode, const std::optional<mx::array>& global_scale);
mx::array gather_mm(const mx::array& x, const mx::array& w, const mx::array& indices);
mx::array take_rows(const mx::array& w, const mx::array& scales, const std::optional<mx::array>& biases,
                    const mx::array& ids, int group_size, int bits, const std::string& mode,
                    const std::optional<mx::array>& global_scale, mx::Dtype dtype);
bool supports(const std::string& mode, int bits, int group_size, mx::Dtype x);

mx::array attention(const mx::array& q, const Arrays& keys, const Arrays& values, float scale,
                    const std::vector<int>& lengths, const std::vector<int>& counts,
                    const std::vector<long long>& positions, const std::optional<std::vector<long long>>& bases,
                    const std::optional<int>& window, const std::optional<float>& softcap,
                    const std::optional<mx::array>& sinks, bool causal);
mx::array kv_append(const mx::array& buffer, const mx::array& update, int start);

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& w, float eps);
Arrays add_rms_norm(const mx::array& x, const mx::array& r, const std::optional<mx::array>& w, float eps);
mx::array rope(const mx::array& x, const mx::array& table, const std::optional<mx::array>& positions, bool interleaved);
mx::array rope_table(const mx::array& positions, const mx::array& frequencies, float scale);
mx::array glu(const mx::array& gate, const mx::array& up, bool gelu);
mx::array argmax(const mx::array& x);

}  // namespace arriero
