#include <cmath>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kernels.h"
#include "pool.h"

namespace arriero {
namespace {
#include "simd_8.h"

#include "products.inc"

#include "glue.inc"

#include "attention.inc"
}  // namespace

extern const Table table_portable;
const Table table_portable = {"portable", product, attention, norm, rope, glu, argmax};
}  // namespace arriero
