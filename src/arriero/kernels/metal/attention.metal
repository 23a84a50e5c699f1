// Attention of each query over keys of one cache, softmax and sums in one pass.
//
// q [T, HQ, D]; k [1, HK, K, D] and v [1, HK, K, DV] of any strides; the query of row t stands at position dims[0] + t.
// LISTED: it reads the BS keys of each block in its row of blocks [T, dims[3]] that is complete at its position (-1
// stands for none), then the incomplete block up to itself. Otherwise it reads from its window's first key (dims[4]
// keys, 0 for all) up to itself, or to the last key where not CAUSAL; the cache begins at position dims[1] and holds
// dims[2] keys. knobs: scale, softcap. sinks [HQ]: with SINKS, one more logit for each head, without a value.
//
// A threadgroup takes one query and HG heads of one key head, and its NSG simdgroups take keys in turn. In a simdgroup
// eight lanes share a key, so that four keys are under way: lane = 8 * slot + part.
// PARTIAL: several threadgroups share the keys of a query, and each writes DV sums, the largest score and the sum of
// weights to out [T, HQ, parts, DV + 2] of float, which attention_join.metal brings together.
// Template: O (of out), D, DV, HQ, HK, HG, NSG, LISTED, BS, CAUSAL, SOFTCAP, SINKS, PARTIAL.
// Grid (32 * NSG * parts, T, HQ / HG), threadgroup (32 * NSG, 1, 1).
//: inputs q k v blocks sinks dims knobs
//: outputs out
//: option ensure_row_contiguous=false
//: header
// The i-th of the numbers that lane `part` of eight holds of WIDTH: fours side by side where that divides.
template <int WIDTH> inline int held_at(int i, int part) {
  constexpr int SIDE = WIDTH % 32 == 0 ? 4 : 1;
  return (i / SIDE) * 8 * SIDE + part * SIDE + i % SIDE;
}
//: body
  constexpr int SLOTS = 4, PK = D / 8, PV = DV / 8;
  threadgroup float most[NSG * HG], total[NSG * HG], sums[NSG * HG * DV];

  const int lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
  const int slot = lane / 8, part = lane % 8;
  const int t = threadgroup_position_in_grid.y, head = threadgroup_position_in_grid.z * HG;
  const int key_head = head / (HQ / HK);
  const int here = dims[0] + t;

  const auto keys = k + key_head * k_strides[1];
  const auto values = v + key_head * v_strides[1];
  const auto list = blocks + (LISTED ? size_t(t) * dims[3] : 0);

  const int complete = LISTED ? (here + 1) / BS : 0;
  const int listed = LISTED ? dims[3] * BS : 0;
  int first = 0, reads = 0;
  if (LISTED) {
    first = complete * BS;
    reads = listed + here + 1 - first;
  } else {
    first = dims[4] > 0 ? metal::max(0, here + 1 - dims[4] - dims[1]) : 0;
    reads = (CAUSAL ? here + 1 - dims[1] : dims[2]) - first;
  }

  const size_t place = size_t(t) * HQ + head, from = place * D;
  float query[HG][PK], sum[HG][PV], high[HG], weight[HG];
  for (int g = 0; g < HG; ++g) {
    for (int i = 0; i < PK; ++i) query[g][i] = knobs[0] * float(q[from + g * D + held_at<D>(i, part)]);
    for (int i = 0; i < PV; ++i) sum[g][i] = 0.0f;
    high[g] = Limits<float>::finite_min;
    weight[g] = 0.0f;
  }

  const int which = PARTIAL ? threadgroup_position_in_grid.x : 0, parts = PARTIAL ? threadgroups_per_grid.x : 1;
  for (int start = (which * NSG + group) * SLOTS; start < reads; start += parts * NSG * SLOTS) {
    const int j = start + slot;
    int key = -1;
    if (j < listed) {
      const int block = list[j / BS];
      key = block >= 0 && block < complete ? block * BS + j % BS : -1;
    } else if (j < reads) {
      key = first + j - listed;
    }
    if (!simd_any(key >= 0)) continue;

    float score[HG];
    for (int g = 0; g < HG; ++g) score[g] = 0.0f;
    if (key >= 0) {
      for (int i = 0; i < PK; ++i) {
        const float one = float(keys[key * k_strides[2] + held_at<D>(i, part) * k_strides[3]]);
        for (int g = 0; g < HG; ++g) score[g] += query[g][i] * one;
      }
    }
    for (int g = 0; g < HG; ++g) {
      score[g] += simd_shuffle_xor(score[g], 1);
      score[g] += simd_shuffle_xor(score[g], 2);
      score[g] += simd_shuffle_xor(score[g], 4);
    }
    if (key >= 0) {
      for (int g = 0; g < HG; ++g) {
        const float s = SOFTCAP ? knobs[1] * metal::tanh(score[g] / knobs[1]) : score[g];
        const float now = metal::max(high[g], s);
        const float keep = metal::exp(high[g] - now);
        score[g] = metal::exp(s - now);
        weight[g] = weight[g] * keep + score[g];
        for (int i = 0; i < PV; ++i) sum[g][i] *= keep;
        high[g] = now;
      }
      for (int i = 0; i < PV; ++i) {
        const float one = float(values[key * v_strides[2] + held_at<DV>(i, part) * v_strides[3]]);
        for (int g = 0; g < HG; ++g) sum[g][i] += score[g] * one;
      }
    }
  }

  // The four keys under way in a simdgroup meet, then the simdgroups.
  for (int g = 0; g < HG; ++g) {
    const float all = simd_max(high[g]);
    const float share = metal::exp(high[g] - all);
    float part_weight = weight[g] * share;
    part_weight += simd_shuffle_xor(part_weight, 8);
    part_weight += simd_shuffle_xor(part_weight, 16);
    if (lane == 0) {
      most[group * HG + g] = all;
      total[group * HG + g] = part_weight;
    }
    for (int i = 0; i < PV; ++i) {
      float one = sum[g][i] * share;
      one += simd_shuffle_xor(one, 8);
      one += simd_shuffle_xor(one, 16);
      if (slot == 0) sums[(group * HG + g) * DV + held_at<DV>(i, part)] = one;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int at = thread_index_in_threadgroup; at < HG * DV; at += 32 * NSG) {
    const int g = at / DV, d = at % DV;
    const bool sink = SINKS && which == 0;
    float all = sink ? float(sinks[head + g]) : float(Limits<float>::finite_min);
    for (int n = 0; n < NSG; ++n) all = metal::max(all, most[n * HG + g]);
    float weights = sink ? metal::exp(sinks[head + g] - all) : 0.0f;
    float made = 0.0f;
    for (int n = 0; n < NSG; ++n) {
      const float share = metal::exp(most[n * HG + g] - all);
      weights += total[n * HG + g] * share;
      made += sums[(n * HG + g) * DV + d] * share;
    }
    if (PARTIAL) {
      const size_t to = ((place + g) * parts + which) * (DV + 2);
      out[to + d] = O(made);
      if (d == 0) {
        out[to + DV] = O(all);
        out[to + DV + 1] = O(weights);
      }
    } else {
      out[(place + g) * DV + d] = O(weights == 0.0f ? 0.0f : made / weights);
    }
  }
