#include <cmath>
#include <cstring>
#include <immintrin.h>

#include "kernels.h"
#include "pool.h"

namespace arriero {
namespace {
#include "simd_8.h"

#include "kernels.inc"
}  // namespace

extern const Table table_avx2;
constinit const Table table_avx2 = make_table("avx2");
}  // namespace arriero
