// The index of the largest of each row: the first of equal ones, NaN after all else.
//
// scores [rows, dims[0]] of T, out [rows]. A threadgroup of NT threads takes one row.
// Template: T, NT. Grid (NT, rows, 1), threadgroup (NT, 1, 1).
//: inputs scores dims
//: outputs out
//: include order.h
//: body
  threadgroup uint keys[NT / 32], places[NT / 32];
  const uint number = thread_position_in_threadgroup.x, group = simdgroup_index_in_threadgroup;
  const uint lane = thread_index_in_simdgroup, row = threadgroup_position_in_grid.y, length = dims[0];

  uint best = 0u, place = 0xffffffffu;
  for (uint i = number; i < length; i += NT) {
    const uint key = order_of(scores[size_t(row) * length + i]);
    if (key > best) {
      best = key;
      place = i;
    }
  }
  uint most = simd_max(best);
  place = simd_min(best == most ? place : 0xffffffffu);
  if (lane == 0) {
    keys[group] = most;
    places[group] = place;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (group == 0) {
    best = lane < NT / 32 ? keys[lane] : 0u;
    place = lane < NT / 32 ? places[lane] : 0xffffffffu;
    most = simd_max(best);
    place = simd_min(best == most ? place : 0xffffffffu);
    if (lane == 0) out[row] = place;
  }
