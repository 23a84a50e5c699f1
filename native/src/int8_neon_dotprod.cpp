#include <arm_neon.h>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "pool.h"

namespace arriero {
namespace {
#include "simd_neon.h"

#include "int8_neon.h"

#include "int8.inc"
}  // namespace

extern const Fast int8_neon_dotprod;
constinit const Fast int8_neon_dotprod = fast;
}  // namespace arriero
