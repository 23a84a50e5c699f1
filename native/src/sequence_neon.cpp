#include <algorithm>
#include <arm_neon.h>
#include <cmath>
#include <cstring>

#include "pool.h"
#include "sequence.h"

namespace arriero {
namespace {
#include "simd_neon.h"

#include "math.inc"

#include "recurrent.inc"

#include "choose.inc"

#include "indexed.inc"
}  // namespace

extern const SequenceTable sequence_neon;
const SequenceTable sequence_neon = {delta, conv, indexed, select, top_k};
}  // namespace arriero
