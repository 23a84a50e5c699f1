// Attention over listed blocks and the choice of the blocks, as MLX operations.
#include "mlx/ops.h"
#include "sequence_call.h"

namespace arriero {

mx::array indexed_attention(const mx::array& q, const Arrays& keys, const Arrays& values, const mx::array& blocks,
                            float scale, const std::vector<int>& lengths, const std::vector<long long>& positions,
                            int block) {
  const char* f = "indexed_attention";
  const size_t n = keys.size();
  if (n == 0 || values.size() != n || lengths.size() != n || positions.size() != n)
    bad(f, "one entry per span is needed in keys, values, lengths and positions");
  if (q.ndim() != 3 || !is_float(q.dtype())) bad(f, "q must be [T, Hq, D] of a float dtype");
  if (blocks.ndim() != 2 || blocks.shape(0) != q.shape(0) || block < 1)
    bad(f, "blocks must be [T, width], of blocks of at least one token");
  const auto kt = keys[0].dtype();
  if (!is_float(kt)) bad(f, "keys must have a float dtype");
  const int Hq = q.shape(1), Dk = q.shape(2);
  std::vector<IndexedSpan> spans(n);
  Arrays in{q, mx::astype(blocks, mx::int32, cpu_stream())};
  int Hkv = 0, Dv = 0;
  long long at = 0;
  for (size_t i = 0; i < n; i++) {
    const auto &k = keys[i], &v = values[i];
    if (k.ndim() != 4 || v.ndim() != 4 || k.shape(0) != 1 || v.shape(0) != 1 || k.shape(1) != v.shape(1) ||
        k.shape(2) != v.shape(2) || k.shape(3) != Dk || k.dtype() != kt || v.dtype() != kt)
      bad(f, "keys and values must be [1, Hkv, K, D] of one dtype");
    if (i == 0) Hkv = k.shape(1), Dv = v.shape(3);
    if (k.shape(1) != Hkv || v.shape(3) != Dv) bad(f, "spans disagree about heads or sizes");
    if (lengths[i] < 0 || positions[i] < 0 || (lengths[i] && positions[i] + lengths[i] > k.shape(2)))
      bad(f, "a span's queries stand behind its keys");
    spans[i].first = (int)at, spans[i].queries = lengths[i], spans[i].count = k.shape(2);
    spans[i].position = positions[i];
    at += lengths[i];
    in.push_back(k);
    in.push_back(v);
  }
  if (at != q.shape(0)) bad(f, "lengths do not add up to q's rows");
  if (Hkv == 0 || Hq % Hkv) bad(f, "the number of query heads must be a multiple of the key heads");
  if (Dk < 1 || Dv < 1 || Dk > 1024 || Dv > 1024) bad(f, "head sizes must lie between 1 and 1024");
  auto call = std::make_shared<Call>(cpu_stream(), "ArrieroIndexedAttention");
  call->strided_from = 2, call->strided_to = 2 + 2 * n;
  call->plan = [=](const Arrays& in, Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    auto ss = spans;
    for (size_t i = 0; i < ss.size(); i++) {
      const auto &k = in[2 + 2 * i], &v = in[3 + 2 * i];
      ss[i].k = k.data<char>(), ss[i].v = v.data<char>();
      ss[i].kh = k.strides()[1], ss[i].kt = k.strides()[2], ss[i].vh = v.strides()[1], ss[i].vt = v.strides()[2];
    }
    Indexed p{};
    p.nspans = (int)ss.size();
    p.Hq = Hq, p.Hkv = Hkv, p.Dk = Dk, p.Dv = Dv;
    p.q = in[0].data<char>(), p.qt = type_of(in[0].dtype()), p.kt = type_of(in[2].dtype());
    p.blocks = in[1].data<int>(), p.width = in[1].shape(1), p.block = block;
    p.o = out[0].data<char>(), p.scale = scale;
    return [p, ss = std::move(ss)]() mutable {
      p.spans = ss.data();
      sequence_table().indexed(p);
    };
  };
  return mx::array({q.shape(0), Hq, Dv}, q.dtype(), call, std::move(in));
}

mx::array select_blocks(const mx::array& q, const Arrays& keys, float scale, const std::vector<int>& lengths,
                        const std::vector<long long>& positions, int block, int width) {
  const char* f = "select_blocks";
  const size_t n = keys.size();
  if (n == 0 || lengths.size() != n || positions.size() != n)
    bad(f, "one entry per span is needed in keys, lengths and positions");
  if (q.ndim() != 3 || !is_float(q.dtype()) || q.shape(1) < 1 || q.shape(2) < 1)
    bad(f, "q must be [T, H, D] of a float dtype");
  if (block < 1 || width < 1) bad(f, "a block and a selection need at least one element");
  const auto kt = keys[0].dtype();
  if (!is_float(kt)) bad(f, "keys must have a float dtype");
  const int H = q.shape(1), D = q.shape(2);
  std::vector<SelectSpan> spans(n);
  Arrays in{q};
  long long at = 0;
  for (size_t i = 0; i < n; i++) {
    const auto& k = keys[i];
    if (k.ndim() != 2 || k.shape(1) != D || k.dtype() != kt) bad(f, "keys must be [blocks, D] of one dtype");
    if (lengths[i] < 0 || positions[i] < 0 || (lengths[i] && (positions[i] + lengths[i]) / block > k.shape(0)))
      bad(f, "a span has fewer keys than its last query sees complete blocks");
    spans[i].first = (int)at, spans[i].queries = lengths[i], spans[i].position = positions[i];
    at += lengths[i];
    in.push_back(k);
  }
  if (at != q.shape(0)) bad(f, "lengths do not add up to q's rows");
  auto call = std::make_shared<Call>(cpu_stream(), "ArrieroSelectBlocks");
  call->strided_from = 1, call->strided_to = 1 + n;
  call->plan = [=](const Arrays& in, Arrays& out) -> Task {
    if (out[0].size() == 0) return [] {};
    auto ss = spans;
    for (size_t i = 0; i < ss.size(); i++) ss[i].k = in[1 + i].data<char>(), ss[i].k_block = in[1 + i].strides()[0];
    Select p{};
    p.nspans = (int)ss.size();
    p.H = H, p.D = D, p.block = block, p.width = width, p.scale = scale;
    p.q = in[0].data<char>(), p.qt = type_of(in[0].dtype()), p.kt = type_of(in[1].dtype());
    p.out = out[0].data<int>();
    return [p, ss = std::move(ss)]() mutable {
      p.spans = ss.data();
      sequence_table().select(p);
    };
  };
  return mx::array({q.shape(0), width}, mx::int32, call, std::move(in));
}

}  // namespace arriero
