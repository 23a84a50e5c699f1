#include <cmath>
#include <cstring>
#include <immintrin.h>

#include "kernels.h"
#include "pool.h"

namespace arriero {
namespace {
#include "simd_avx512.h"

#include "kernels.inc"
}  // namespace

extern const Table table_avx512;
constinit const Table table_avx512 = make_table("avx512");
}  // namespace arriero
