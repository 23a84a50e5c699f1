// The largest of each piece of a row, sorted: descending, equal ones by ascending index, NaN after all else.
//
// A threadgroup of NT threads sorts one piece of PIECE values of a row of dims[0] (bitonic, in threadgroup memory), and
// writes the first dims[1]: their indices to `best` and their keys to `keys`, [rows, pieces, dims[1]] both. Run again
// over these, with KEYED (values are keys, places their indices), until one piece is left.
// Keys are those of order.h; what lies past a row's end has 0.
// Template: T, KEYED, PIECE, NT. Grid (NT, pieces, rows), threadgroup (NT, 1, 1).
//: inputs values places dims
//: outputs best keys
//: include order.h
//: header
inline uint order_of(uint key) { return key; }
//: body
  threadgroup uint key_of[PIECE], index_of[PIECE];

  const uint thread_number = thread_position_in_threadgroup.x;
  const uint piece = threadgroup_position_in_grid.y, row = threadgroup_position_in_grid.z;
  const uint length = dims[0], kept = dims[1];

  for (uint j = thread_number; j < uint(PIECE); j += NT) {
    const uint at = piece * PIECE + j;
    uint key = 0u, index = 0xffffffffu;
    if (at < length) {
      const size_t from = size_t(row) * length + at;
      key = order_of(values[from]);
      index = KEYED ? uint(places[from]) : uint(at);
    }
    key_of[j] = key;
    index_of[j] = index;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint run = 2; run <= uint(PIECE); run *= 2) {
    for (uint stride = run / 2; stride > 0; stride /= 2) {
      for (uint pair = thread_number; pair < uint(PIECE) / 2; pair += NT) {
        const uint low = 2 * pair - (pair & (stride - 1)), high = low + stride;
        const uint low_key = key_of[low], high_key = key_of[high];
        const uint low_index = index_of[low], high_index = index_of[high];
        const bool high_first = high_key > low_key || (high_key == low_key && high_index < low_index);
        if (high_first == ((low & run) == 0)) {
          key_of[low] = high_key;
          key_of[high] = low_key;
          index_of[low] = high_index;
          index_of[high] = low_index;
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  const size_t to = (size_t(row) * threadgroups_per_grid.y + piece) * kept;
  for (uint j = thread_number; j < kept; j += NT) {
    best[to + j] = index_of[j];
    keys[to + j] = key_of[j];
  }
