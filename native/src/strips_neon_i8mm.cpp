#include <arm_neon.h>
#include <cmath>
#include <cstring>
#include <utility>

#include "packed.h"
#include "pool.h"
#include "successors.h"

namespace arriero {
extern const PackedRun strips_neon;
namespace {
constexpr bool kElsewhere = true;  // floats gain nothing here
static inline void floats_elsewhere(const PackedJob& job) { strips_neon(job); }

#include "simd_neon.h"

#include "strip_ints.h"

#include "strips.inc"
}  // namespace

extern const PackedRun strips_neon_i8mm;
constinit const PackedRun strips_neon_i8mm = run_strips;
}  // namespace arriero
