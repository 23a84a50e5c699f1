// How fast this machine's memory can be read.
#pragma once

namespace arriero {

// Bytes a second that the pool's threads read together: the best of several access patterns over 512 MiB on large
// pages, each tried for an equal part of the time.
double read_bandwidth(double seconds);

}  // namespace arriero
