#!/bin/bash
# The Python module under the address and undefined-behaviour sanitizers, with the tests of tests/:
# sanitize_module.sh PYTHON [build folder] [pytest arguments]. PYTHON has what building and testing need.
set -eu
python=$(command -v "${1:?usage: sanitize_module.sh PYTHON [build folder] [pytest arguments]}")
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
build=${2:-$(mktemp -d)}
shift $(($# < 2 ? $# : 2))
native=$(cd "$(dirname "$0")/.." && pwd)

# Without vptr: classes of MLX have their type information in a library that is built without it. The kernels' own units
# are checked for undefined behaviour by sanitize.sh. They take minutes each to compile with that, or with checks of
# addresses that are no calls.
flags="-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer -O1"
kernels="-O1;-fno-sanitize=undefined;--param;asan-instrumentation-with-call-threshold=0"
cmake -S "$native" -B "$build" -DCMAKE_BUILD_TYPE=None "-DARRIERO_OPTIMISE=$kernels" \
  -DCMAKE_CXX_FLAGS="$flags" -DPython_EXECUTABLE="$python" >/dev/null
cmake --build "$build" -j"${JOBS:-2}" >/dev/null
mkdir -p "$build/package/arriero_cpu"
cp "$native"/python/arriero_cpu/* "$build"/_native*.so "$build/package/arriero_cpu/"

# Left out: what reads the instructions of the module, which those of the sanitizers are among. Python itself leaks.
export LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH="$build/package"
export ARRIERO_THREADS="${ARRIERO_THREADS:-4}"
cd "$native"
for isa in ${SETS:-avx512-vnni avx2-plain portable}; do
  echo "== address,undefined $isa"
  ARRIERO_CPU_ISA=$isa "$python" -m pytest tests -q -p no:cacheprovider \
    --ignore tests/test_isa.py --ignore tests/test_package.py "$@"
done
