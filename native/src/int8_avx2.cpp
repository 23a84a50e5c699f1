#include <cmath>
#include <cstring>
#include <immintrin.h>

#include "kernels.h"
#include "pool.h"

namespace arriero {
namespace {
#include "simd_8.h"

#include "int8_256.h"

#include "int8.inc"
}  // namespace

extern const Fast int8_avx2;
constinit const Fast int8_avx2 = fast;
}  // namespace arriero
