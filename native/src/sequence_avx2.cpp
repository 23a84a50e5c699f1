#include <algorithm>
#include <cmath>
#include <cstring>
#include <immintrin.h>

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

extern const SequenceTable sequence_avx2;
const SequenceTable sequence_avx2 = {delta, conv, indexed, select, top_k};
}  // namespace arriero
