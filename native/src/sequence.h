// Kernels of models that keep a state instead of, or beside, a cache of keys: plain structures, as in kernels.h.
#pragma once
#include "kernels.h"

namespace arriero {

struct Cut {  // a state that is wanted after so many tokens of its span
  int after;
  void* to;
};

// S <- decay S + u k^T with u = beta (v - decay S k), y = S q; q and k are scaled to length 1, q then by Dk^-1/2;
// decay = exp(-rate softplus(a + bias)), beta = 1 / (1 + exp(-b)).
struct DeltaSpan {
  int first, length;
  const float* from;  // [Hv, Dv, Dk]
  const Cut* cuts;    // rising; the last one is the span's end
  int ncuts;
};
struct Delta {
  const DeltaSpan* spans;
  int nspans;
  int Hk, Hv, Dk, Dv;
  const void *q, *k, *v;
  size_t qt, qh, kt, kh, vt, vh;  // strides of token and head, in elements
  int xt;
  const void *a, *b;
  size_t a_token, b_token;
  int a_type, b_type;
  const float *rate, *bias;
  float eps;
  void* y;
};

// y[t, c] = sum over j of w[j, c] x[t - (K - 1 - j) dilation, c], plus bias, then silu.
struct ConvSpan {
  int first, length;
  const void* tail;  // [(K - 1) dilation, C]
  const Cut* cuts;
  int ncuts;
};
struct Conv {
  const ConvSpan* spans;
  int nspans;
  int C, K, dilation;
  const void* x;
  size_t x_token;
  int xt;
  const void *w, *bias;  // bias may be null
  int wt, bt;
  void* y;
  bool silu;
};

struct IndexedSpan {
  int first, queries;
  int count;           // keys in use
  long long position;  // of the first query
  const void *k, *v;
  size_t kh, kt, vh, vt;
};
struct Indexed {
  const IndexedSpan* spans;
  int nspans;
  int Hq, Hkv, Dk, Dv;
  const void* q;
  int qt, kt;
  const int* blocks;  // [rows of q, width], -1 for none
  int width, block;
  void* o;
  float scale;
};

struct SelectSpan {
  int first, queries;
  long long position;
  const void* k;  // [blocks, D]
  size_t k_block;
};
struct Select {
  const SelectSpan* spans;
  int nspans;
  int H, D;
  const void* q;  // [rows, H, D]
  int qt, kt;
  int block, width;
  float scale;
  int* out;  // [rows, width]
};

struct SequenceTable {
  void (*delta)(const Delta&);
  void (*conv)(const Conv&);
  void (*indexed)(const Indexed&);
  void (*select)(const Select&);
  void (*top_k)(const void* x, int xt, size_t rows, size_t n, int k, int* out);
};
const SequenceTable& sequence_table();  // of the instruction set that table() chose

}  // namespace arriero
