#include "call.h"

#include <cstring>

#include "kernels.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/device.h"
#include "mlx/stream.h"

namespace arriero {
namespace {

struct Copy {
  mx::array from, to;
};
void fill(Copy& c) {
  const int nd = (int)c.from.ndim(), es = (int)c.from.itemsize();
  if (c.from.size() == 0) return;
  std::vector<int> ix(nd, 0);
  const char* s = c.from.data<char>();
  char* d = c.to.data<char>();
  const int last = nd ? c.from.shape(nd - 1) : 1;
  const int64_t ls = nd ? c.from.strides()[nd - 1] : 1;
  for (size_t done = 0, n = c.from.size(); done < n; done += last) {
    int64_t off = 0;
    for (int i = 0; i + 1 < nd; i++) off += ix[i] * c.from.strides()[i];
    const char* r = s + off * es;
    if (ls == 1) std::memcpy(d, r, (size_t)last * es);
    else
      for (int i = 0; i < last; i++) std::memcpy(d + (size_t)i * es, r + i * ls * es, es);
    d += (size_t)last * es;
    for (int i = nd - 2; i >= 0; i--) {
      if (++ix[i] < c.from.shape(i)) break;
      ix[i] = 0;
    }
  }
}

}  // namespace

// An mx::contiguous node per input would cost more than most of these kernels, so the check is made here.
void Call::eval_cpu(const Arrays& in, Arrays& out) {
  auto& enc = mx::cpu::get_command_encoder(stream());
  for (size_t i = 0; i < out.size(); i++) {
    if (i - shared_to < shared) out[i].copy_shared_buffer(in[shared_from + i - shared_to]);
    else out[i].set_data(mx::allocator::malloc(out[i].nbytes()));
  }
  auto fits = [&](size_t i) {
    const auto& a = in[i];
    if (a.flags().row_contiguous || i - shared_from < shared) return true;  // unsigned: below shared_from is far above
    return i >= strided_from && i < strided_to && a.ndim() > 0 && a.strides().back() == 1;
  };
  bool all = true;
  for (size_t i = 0; i < in.size(); i++) all = all && fits(i);
  if (all) return enc.dispatch(plan(in, out));
  Arrays dense;
  std::vector<Copy> copies;
  for (size_t i = 0; i < in.size(); i++) {
    if (fits(i)) {
      dense.push_back(in[i]);
      continue;
    }
    mx::array t(in[i].shape(), in[i].dtype(), nullptr, {});
    t.set_data(mx::allocator::malloc(t.nbytes()));
    enc.add_temporary(t);
    copies.push_back({mx::array::unsafe_weak_copy(in[i]), mx::array::unsafe_weak_copy(t)});
    dense.push_back(std::move(t));
  }
  enc.dispatch([copies = std::move(copies), task = plan(dense, out)]() mutable {
    for (auto& c : copies) fill(c);
    task();
  });
}

mx::Stream cpu_stream() {
  const auto d = mx::default_device();
  if (d.type != mx::Device::cpu)
    throw std::invalid_argument("[arriero_cpu] the default device is a GPU; these kernels run on the CPU only");
  return mx::default_stream(d);
}
bool is_float(mx::Dtype d) { return d == mx::float32 || d == mx::float16 || d == mx::bfloat16; }
int type_of(mx::Dtype d) {
  if (d == mx::float32) return F32;
  if (d == mx::float16) return F16;
  if (d == mx::bfloat16) return BF16;
  if (d == mx::uint8) return U8;
  throw std::invalid_argument("[arriero_cpu] unsupported dtype");
}

}  // namespace arriero
