#include <arm_neon.h>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "pool.h"

namespace arriero {
namespace {
#include "simd_neon.h"

#include "kernels.inc"
}  // namespace

extern const Table table_neon;
constinit const Table table_neon = make_table("neon");
}  // namespace arriero
