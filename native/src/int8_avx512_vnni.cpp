#include <cmath>
#include <cstring>
#include <immintrin.h>

#include "kernels.h"
#include "pool.h"

namespace arriero {
namespace {
#include "simd_avx512.h"

#include "int8_512.h"

#include "int8.inc"
}  // namespace

extern const Fast int8_avx512_vnni;
constinit const Fast int8_avx512_vnni = fast;
}  // namespace arriero
