#include <cmath>
#include <cstring>
#include <immintrin.h>

#include "kernels.h"
#include "pool.h"

namespace arriero {
namespace {
#include "simd_8.h"

#include "products.inc"

#include "glue.inc"

#include "attention.inc"
}  // namespace

extern const Table table_avx2;
const Table table_avx2 = {"avx2", product, attention, norm, rope, glu, argmax};
}  // namespace arriero
