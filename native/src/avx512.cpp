#include <cmath>
#include <cstring>
#include <immintrin.h>

#include "kernels.h"
#include "pool.h"

namespace arriero {
namespace {
#include "simd_avx512.h"

#define ARRIERO_INT8
#include "products.inc"

#include "glue.inc"

#include "attention.inc"
}  // namespace

extern const Table table_avx512;
const Table table_avx512 = {"avx512", product, attention, norm, rope, glu, argmax};
}  // namespace arriero
