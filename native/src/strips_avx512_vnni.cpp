#include <cmath>
#include <cstring>
#include <immintrin.h>
#include <utility>

#include "packed.h"
#include "pool.h"

namespace arriero {
namespace {
#include "simd_avx512.h"

#include "strip_ints.h"

#include "strips.inc"
}  // namespace

extern const PackedRun strips_avx512_vnni;
constinit const PackedRun strips_avx512_vnni = run_strips;
}  // namespace arriero
