#include <arm_neon.h>
#include <cmath>
#include <cstring>
#include <utility>

#include "packed.h"
#include "pool.h"
#include "successors.h"

namespace arriero {
namespace {
constexpr bool kElsewhere = false;
static inline void floats_elsewhere(const PackedJob&) {}

#include "simd_neon.h"

#include "strip_ints.h"

#include "strips.inc"
}  // namespace

extern const PackedRun strips_neon;
constinit const PackedRun strips_neon = run_strips;
}  // namespace arriero
