// Weights packed in strips of sixteen output columns. A strip holds all of its columns' inner size in one run: for
// each group of k the codes, then sixteen scales, then (unless symmetric) sixteen biases.
//
// Codes come in vectors of 64 bytes whose four-byte lane c belongs to column c. A quad is four consecutive k, one in
// each byte of a lane; a block of 32 k (16 in groups of 16) has a quad j for each four of them. Codes of 8 bits fill a
// vector per quad. Narrower ones are cut into planes of 4, 2 and 1 bits, the wider plane holding the lower bits, and a byte of
// a plane of W bits holds the quads j of 8 / W in its fields, the first the lowest: a block of 32 has as many vectors as
// a code has bits, first those of the 4-bit plane, then of the 2-bit and of the 1-bit plane.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace arriero {

constexpr int kStrip = 16;     // columns
constexpr int kFastRows = 13;  // the fast setting is for so many rows and more

struct Packed {
  int format, bits, group;
  int N, K;
  int experts;  // stacked matrices, 0: a single one
  int st;       // type of scales and biases
  bool biased;
  int zero;  // without biases: a code's value is (code - zero) * scale; fp4 codes stand for 2 w + 12
  const uint8_t* data;  // 64-byte aligned
};
static constexpr size_t packed_codes(const Packed& p) { return (size_t)p.group * 2 * p.bits; }  // bytes of a group's
static constexpr size_t packed_group(const Packed& p) {
  return packed_codes(p) + (size_t)kStrip * bytes_of(p.st) * (p.biased ? 2 : 1);
}
static constexpr size_t packed_strip(const Packed& p) { return (packed_group(p) * (p.K / p.group) + 63) / 64 * 64; }
static constexpr int packed_strips(const Packed& p) { return (p.N + kStrip - 1) / kStrip; }
static constexpr size_t packed_expert(const Packed& p) { return packed_strip(p) * packed_strips(p); }
static constexpr size_t packed_bytes(const Packed& p) { return packed_expert(p) * (p.experts ? p.experts : 1); }

// Rows of MLX's layout, one matrix behind the other.
struct Rowwise {
  const uint8_t* w;
  const void *scales, *biases;
};
// The integer z for which every bias is -z times its scale, or -1.
int symmetric_zero(const void* scales, const void* biases, int type, size_t n);
void pack_strips(const Packed& p, const Rowwise& from, uint8_t* to);
// y[m, :] = row ids[m] times gscale, zeros where there is no such row
void packed_rows(const Packed& p, const int* ids, int M, float gscale, void* y, int yt);

// Products of rows of x with packed matrices: everything that shares x runs in one go.
struct PackedProduct {
  Packed w;
  float gscale;
  const float* row_scales;  // one per column, or null
  const float* gscales;     // one per expert, or null
  void* y;
  size_t ldy;
  const void* bias;  // one per column, added after the rounding to y's type, or null
  int bias_type;
};
struct Segment {  // rows that take the same matrix
  int expert, first, rows;
};
struct PackedJob {
  const void* x;
  int type;  // of x and y
  int M, K;
  bool exact;  // false: 7-bit activations where the set has them and x is not of 32 bits
  const PackedProduct* products;
  int n;
  // Without segments every row takes the (only) matrix. With them, row i of the list reads x[xrows[i]] and writes
  // y[yrows[i]]; all products must have the experts.
  const Segment* segments;
  int nsegments;
  const int *xrows, *yrows;
};
// Rows with the experts that index names: row i reads x[i / per_x]; zeros where there is no such expert.
void packed_experts(const PackedJob& job, const int* index, int rows, int per_x);
using PackedRun = void (*)(const PackedJob&);
PackedRun packed_run();  // of the chosen instruction set

}  // namespace arriero
