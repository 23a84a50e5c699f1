#include <cmath>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kernels.h"
#include "pool.h"

namespace arriero {
namespace {
#include "simd_8.h"

#include "kernels.inc"
}  // namespace

extern const Table table_portable;
constinit const Table table_portable = make_table("portable");
}  // namespace arriero
