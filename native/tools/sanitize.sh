#!/bin/bash
# The kernel drivers under the address, undefined-behaviour and thread sanitizers, in every instruction set that this
# machine has: sanitize.sh [build folder]. KINDS and SETS name fewer sanitizers and sets.
set -u
tests=$(cd "$(dirname "$0")/../tests" && pwd)
build=${1:-$(mktemp -d)}
status=0

for kind in ${KINDS:-address,undefined thread}; do
  folder=$build/${kind//,/-}
  cmake -S "$tests" -B "$folder" -DCMAKE_BUILD_TYPE=None -DARRIERO_OPTIMISE=-O1 \
    -DCMAKE_CXX_FLAGS="-fsanitize=$kind -fno-sanitize-recover=all -fno-omit-frame-pointer -g1 -O1" >/dev/null || exit 1
  cmake --build "$folder" -j"${JOBS:-2}" >/dev/null || exit 1
  for isa in ${SETS:-avx512-vnni avx512-plain avx2-vnni avx2-plain neon-i8mm neon-dotprod neon-plain portable}; do
    [ "$(ARRIERO_CPU_ISA=$isa "$folder/driver" isa)" = "$isa " ] || continue
    for driver in driver strip_driver sequence_driver; do
      echo "== $kind $isa $driver"
      ARRIERO_CPU_ISA=$isa ARRIERO_THREADS=4 UBSAN_OPTIONS=print_stacktrace=1 "$folder/$driver" || status=1
    done
  done
done
exit $status
