# The sequence kernels; after units.cmake.
add_unit(sequence_portable)
if(DEFINED avx512_flags)
  add_unit(sequence_avx2 ${avx2_flags})
  add_unit(sequence_avx512 ${avx512_flags})
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$" AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
  add_unit(sequence_neon)
endif()
list(APPEND kernel_sources ${source_dir}/sequence_dispatch.cpp)
