#include <cmath>
#include <cstring>
#include <immintrin.h>
#include <utility>

#include "packed.h"
#include "pool.h"
#include "successors.h"

namespace arriero {
namespace {
constexpr bool kElsewhere = false;
static inline void floats_elsewhere(const PackedJob&) {}

#include "simd_avx512.h"

#include "strip_ints.h"

#include "strips.inc"
}  // namespace

extern const PackedRun strips_avx512;
constinit const PackedRun strips_avx512 = run_strips;
}  // namespace arriero
