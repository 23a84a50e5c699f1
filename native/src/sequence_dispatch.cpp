// The sequence kernels of the instruction set that table() chose.
#include <cstring>

#include "sequence.h"

namespace arriero {

extern const SequenceTable sequence_portable;
#if defined(ARRIERO_X86)
extern const SequenceTable sequence_avx2, sequence_avx512;
#elif defined(ARRIERO_ARM64)
extern const SequenceTable sequence_neon;
#endif

const SequenceTable& sequence_table() {
  [[maybe_unused]] auto begins = [](const char* what) { return !std::strncmp(table().name, what, std::strlen(what)); };
#if defined(ARRIERO_X86)
  if (begins("avx512")) return sequence_avx512;
  if (begins("avx2")) return sequence_avx2;
#elif defined(ARRIERO_ARM64)
  if (begins("neon")) return sequence_neon;
#endif
  return sequence_portable;
}

}  // namespace arriero
