#include <algorithm>
#include <cmath>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "pool.h"
#include "sequence.h"

namespace arriero {
namespace {
#include "simd_8.h"

#include "math.inc"

#include "recurrent.inc"

#include "choose.inc"

#include "indexed.inc"
}  // namespace

extern const SequenceTable sequence_portable;
const SequenceTable sequence_portable = {delta, conv, indexed, select, top_k};
}  // namespace arriero
