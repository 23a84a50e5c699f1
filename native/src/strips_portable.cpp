#include <cmath>
#include <cstring>
#include <utility>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "packed.h"
#include "pool.h"
#include "successors.h"

namespace arriero {
namespace {
constexpr bool kElsewhere = false;
static inline void floats_elsewhere(const PackedJob&) {}

#include "simd_8.h"

#include "strip_ints.h"

#include "strips.inc"
}  // namespace

extern const PackedRun strips_portable;
constinit const PackedRun strips_portable = run_strips;
}  // namespace arriero
