# The kernels, free of MLX and Python, and the flags of each instruction set's units. Shared by the module and by the
# test driver in tests/.
set(source_dir ${CMAKE_CURRENT_LIST_DIR}/src)
set(kernel_sources ${source_dir}/pool.cpp ${source_dir}/dispatch.cpp ${source_dir}/pack.cpp ${source_dir}/bandwidth.cpp
  ${source_dir}/successors.cpp)
# Without contraction a multiply-add is one rounding only where the source says so, in every instantiation alike.
set(ARRIERO_OPTIMISE -O3 CACHE STRING "Optimisation of the kernels; sanitizers take forever to compile at -O3")
set(kernel_flags ${ARRIERO_OPTIMISE} -ffp-contract=off -fno-math-errno -Wno-psabi)

function(add_unit name)
  set_source_files_properties(${source_dir}/${name}.cpp PROPERTIES COMPILE_OPTIONS "${kernel_flags};${ARGN}")
  set(kernel_sources ${kernel_sources} ${source_dir}/${name}.cpp PARENT_SCOPE)
endfunction()

add_unit(portable)
add_unit(strips_portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  add_compile_definitions(ARRIERO_X86)
  set(avx2_flags -mavx2 -mfma -mf16c)
  # The last two because g++ 12 warns about its own AVX-512 headers.
  set(avx512_flags ${avx2_flags} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512
    -Wno-uninitialized -Wno-maybe-uninitialized)
  add_unit(avx2 ${avx2_flags})
  add_unit(avx512 ${avx512_flags})
  add_unit(strips_avx2 ${avx2_flags})
  add_unit(strips_avx2_vnni ${avx2_flags} -mavxvnni)
  add_unit(strips_avx512 ${avx512_flags})
  add_unit(strips_avx512_vnni ${avx512_flags} -mavx512vnni)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$" AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
  add_compile_definitions(ARRIERO_ARM64)
  add_unit(neon)
  add_unit(strips_neon)
  add_unit(strips_neon_dotprod -march=armv8.2-a+dotprod)
  add_unit(strips_neon_i8mm -march=armv8.2-a+dotprod+i8mm)
endif()
