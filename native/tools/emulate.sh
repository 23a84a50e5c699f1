#!/bin/bash
# Runs the kernel drivers on processors that this machine is not: emulate.sh [build folder]. On Debian:
# apt-get install qemu-user g++-aarch64-linux-gnu. An instruction that an emulated processor lacks ends a driver.
# With PYTHON an interpreter (not a virtual environment's link) that finds the package, its tests of kernels run too.
set -u
tests=$(cd "$(dirname "$0")/../tests" && pwd)
build=${1:-$(mktemp -d)}
status=0

run() {  # expected set, emulator and its arguments, then the folder of the drivers
  local expected=$1 folder=${*: -1}
  local emulator=("${@:2:$#-2}")
  local isa
  isa=$("${emulator[@]}" "$folder/driver" isa 2>/dev/null)
  echo "== ${emulator[*]}: ${isa:-does not run}"
  [ "${isa%% *}" = "$expected" ] || { echo "expected $expected"; status=1; }
  for driver in driver strip_driver sequence_driver; do
    "${emulator[@]}" "$folder/$driver" 2> >(grep -v "TCG doesn't support" >&2) || status=1
  done
}

cmake -S "$tests" -B "$build/x86" >/dev/null && cmake --build "$build/x86" -j2 >/dev/null || exit 1
run portable qemu-x86_64 -cpu core2duo "$build/x86"
run portable qemu-x86_64 -cpu Nehalem "$build/x86"
run portable qemu-x86_64 -cpu SandyBridge "$build/x86"
run avx2-plain qemu-x86_64 -cpu Haswell "$build/x86"
if [ -n "${PYTHON:-}" ]; then
  for cpu in Nehalem Haswell; do
    echo "== $cpu, Python"
    qemu-x86_64 -cpu $cpu "$PYTHON" -m pytest -q -p no:cacheprovider -k "not forced" \
      "$tests"/test_{products,packed,glue,attention}.py 2> >(grep -v "TCG doesn't support" >&2) || status=1
  done
fi

cmake -S "$tests" -B "$build/aarch64" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ >/dev/null && cmake --build "$build/aarch64" -j2 >/dev/null || exit 1
for cpu in plain:cortex-a72 dotprod:cortex-a76 i8mm:max; do
  run neon-${cpu%:*} qemu-aarch64 -cpu ${cpu#*:} -L /usr/aarch64-linux-gnu "$build/aarch64"
done
exit $status
