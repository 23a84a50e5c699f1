// What is read when products run in the order in which they ran before: a step of decoding has the same ones as the last.
#pragma once
#include <cstdint>

#include "pool.h"

namespace arriero {

// The calling thread begins a job, named by its first weights. Returns room for what each thread reads first in it, kept
// for the job before; null where that is known.
Coming* beginning_of(const uint8_t* job, int threads);
// What each thread reads first in the job that came behind this one the last time, or null.
const Coming* successor_of(const uint8_t* job, int threads);

}  // namespace arriero
