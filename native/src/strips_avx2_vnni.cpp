#include <cmath>
#include <cstring>
#include <immintrin.h>
#include <utility>

#include "packed.h"
#include "pool.h"
#include "successors.h"

namespace arriero {
extern const PackedRun strips_avx2;
namespace {
constexpr bool kElsewhere = true;  // floats gain nothing here
static inline void floats_elsewhere(const PackedJob& job) { strips_avx2(job); }

#include "simd_8.h"

#include "strip_ints.h"

#include "strips.inc"
}  // namespace

extern const PackedRun strips_avx2_vnni;
constinit const PackedRun strips_avx2_vnni = run_strips;
}  // namespace arriero
