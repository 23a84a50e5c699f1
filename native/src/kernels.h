// The kernels' interface: plain structures, no MLX type. What is behind a Table is compiled once per instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

namespace arriero {

enum DType : int { F32 = 0, F16 = 1, BF16 = 2, U8 = 3 };
enum Format : int { AFFINE = 0, NVFP4 = 1, MXFP4 = 2, MXFP8 = 3, DENSE = 4 };

static constexpr size_t bytes_of(int t) { return t == F32 ? 4 : t == U8 ? 1 : 2; }

// y[m, :] = x[m, :] * dequantised(w)^T, w dense or in MLX's layout of mxfp8; x and y are addressed by row. The other
// formats are packed first (packed.h).
struct Product {
  int format;
  int M, N, K;
  const void* x;
  int xt;
  const uint8_t* w;
  size_t wrow;  // bytes in a row of w
  int wt;       // element type of a dense w
  const void* scales;
  float gscale;
  const float* row_scales;  // one per output column (row of w), or null
  void* y;
  int yt;
  size_t ldy;               // distance of y's rows, N or more
  bool exact;               // false allows 7-bit activations in prefill
  const int *xrows, *yrows;  // where row m is read and written; null: row m
};

// A product of every row with the weights of its own expert.
struct Experts {
  Product p;  // w, scales, x and y of expert 0; M unused
  int rows, experts;
  int per_x;  // rows that share one row of x
  const int* index;
  const float* gscales;  // one per expert, or null
};

struct Span {
  int first, queries;  // rows of q
  int count;           // keys in use
  long long base;      // absolute position of the buffer's first key
  long long position;  // absolute position of the first query
  const void *k, *v;
  size_t kh, kt, vh, vt;  // strides of head and token, in elements
};
struct Attention {
  const Span* spans;
  int nspans;
  int Hq, Hkv, Dk, Dv;
  const void* q;
  int qt, kt;
  void* o;
  float scale, softcap;  // softcap 0: none
  int window;            // 0: none
  bool causal;
  const float* sinks;  // one per query head, or null
};

struct Norm {
  const void *x, *r, *w;  // r: added to x first, or null; w may be null
  void *h, *y;            // h: x + r; y null: only that
  int rows, n;
  float eps;
  int xt, wt;
};
struct Rope {
  const void* x;
  void* y;
  const float* table;    // [positions, rot / 2, 2] of (cos, sin)
  const int* positions;  // row of the table for each token; null: the token's number
  int T, H, D, rot, xt;
  bool interleaved;
};
struct Glu {
  const void *gate, *up;
  void* y;
  size_t rows, n, ldg, ldu;
  int xt;
  bool gelu;
};

struct Table {
  const char* name;
  void (*product)(const Product&);
  void (*attention)(const Attention&);
  void (*norm)(const Norm&);
  void (*rope)(const Rope&);
  void (*glu)(const Glu&);
  void (*argmax)(const void* x, uint32_t* y, size_t rows, size_t n, int xt);
  void (*take)(const Product&);  // y[m, :] = w[xrows[m], :] of an mxfp8 w, zeros where there is no such row
};
// The best instruction set for this machine, or the one that ARRIERO_CPU_ISA names.
const Table& table();
const char* isa_name();     // with its integer extension: avx512-vnni
const char* isa_problem();  // why ARRIERO_CPU_ISA is not honoured, or ""

void experts(const Experts&);
// cos and sin of position * frequency, computed in double precision
void rope_table(const int* positions, const float* freqs, float* out, int T, int half, float scale);

}  // namespace arriero
