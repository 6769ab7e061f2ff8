#!/bin/bash
# Builds the native kernels for aarch64 with a cross compiler and, where QEMU's user emulation is
# installed, runs their tests: the same ones, at all levels (neon, dotprod, i8mm), on shorter
# sequences where they are long (tests/helpers/emulation.py).
#
#   scripts/check-aarch64.sh [pytest arguments]     default: the kernels' tests, some at a time
#
#   PYTHON   interpreter with nanobind; its version is the one that is built for (default: python3)
#   BUILD    where everything goes (default: build/aarch64)
#   JOBS     so many parts of the tests at a time (default: 2)
#   COMPILE_ONLY=1   do not run tests
#
# On Debian and Ubuntu: apt-get install g++-aarch64-linux-gnu qemu-user-static. What runs under
# emulation, an aarch64 Python with torch, is fetched into BUILD; the machine stays as it is.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
build=$(mkdir -p "${BUILD:-build/aarch64}" && cd "${BUILD:-build/aarch64}" && pwd)
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# Newer wheels of torch for aarch64 need CUDA.
wheels=(torch==2.8.0 numpy typing_extensions sympy mpmath networkx jinja2 markupsafe filelock fsspec
        msgspec pytest pluggy iniconfig packaging pygments gguf pyyaml tqdm regex)
# Libraries that Python and torch need beside themselves.
packages=(python$version-minimal libpython$version-minimal libpython$version-stdlib
          libpython$version-dev libc6 libstdc++6 libgcc-s1 libgomp1 zlib1g libexpat1 libffi8
          libssl3 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libcrypt1)

find_tool() {  # name of the first that exists
  for name in "$@"; do
    if command -v "$name" > /dev/null; then echo "$name"; return; fi
  done
}

fetch_sysroot() {
  [[ -e $build/sysroot/.complete ]] && return
  # Lists of packages for another architecture, without telling the machine's own apt of it.
  local state=$build/apt
  mkdir -p "$state"/{lists,cache,debs} "$build/sysroot"
  local options=(-o APT::Architecture=arm64 -o APT::Architectures::=arm64
                 -o Dir::State::Lists="$state/lists" -o Dir::Cache="$state/cache"
                 -o APT::Sandbox::User=root -qq)
  apt-get "${options[@]}" update
  (cd "$state/debs" && apt-get "${options[@]}" download "${packages[@]/%/:arm64}")
  for package in "$state"/debs/*.deb; do dpkg-deb -x "$package" "$build/sysroot"; done
  touch "$build/sysroot/.complete"
}

fetch_wheels() {
  [[ -e $build/site/.complete ]] && return
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
    --target "$build/site" --only-binary=:all: --python-version "$version" \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
    --platform manylinux2014_aarch64 "${wheels[@]}"
  touch "$build/site/.complete"
}

compiler=$(find_tool aarch64-linux-gnu-g++ aarch64-linux-gnu-g++-{15,14,13,12,11})
if [[ -z $compiler ]]; then
  echo "No aarch64-linux-gnu-g++ here. Install g++-aarch64-linux-gnu." >&2
  exit 2
fi
fetch_sysroot
headers=$build/sysroot/usr/include
cmake -S . -B "$build/cmake" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER="$compiler" \
  -DCMAKE_CXX_FLAGS="-isystem $headers -isystem $headers/python$version" \
  -DPython_EXECUTABLE="$(command -v "$python")" -DPython_INCLUDE_DIR="$headers/python$version" \
  -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" > /dev/null
cmake --build "$build/cmake" --parallel 2 -- --quiet
echo "built for aarch64 with $compiler"

qemu=$(find_tool qemu-aarch64-static qemu-aarch64)
if [[ -n ${COMPILE_ONLY:-} ]]; then exit 0; fi
if [[ -z $qemu ]]; then
  echo "not run: install qemu-user-static for that"
  exit 0
fi
fetch_wheels
# The package beside the module that was built. CMake gave that the suffix of this machine.
rm -rf "$build/tokenmill"
mkdir -p "$build/tokenmill"
cp -r src/tokenmill "$build/tokenmill/"
rm -f "$build"/tokenmill/tokenmill/_native*.so
cp "$build"/cmake/_native.*.so \
  "$build/tokenmill/tokenmill/_native.cpython-${version/./}-aarch64-linux-gnu.so"

export PYTHONPATH=$build/tokenmill:$build/site PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
export TOKENMILL_EMULATED=1 qemu build version
run() {  # on a processor
  local processor=$1
  shift
  "$qemu" -cpu "$processor" -L "$build/sysroot" "$build/sysroot/usr/bin/python$version" "$@"
}
for expected in cortex-a72:neon neoverse-n1:dotprod max:i8mm; do
  found=$(run "${expected%:*}" -c 'from tokenmill import _native; print(_native.detected_isa())')
  echo "${expected%:*}: $found"
  [[ $found == "${expected#*:}" ]]
done
if [[ $# != 0 ]]; then
  run max -m pytest -q -p no:cacheprovider "$@"
  exit
fi

run_part() {  # a part of the tests: what it printed if it fails, else its last line
  local begin=$SECONDS output
  # shellcheck disable=SC2086  # its arguments
  if output=$(run max -m pytest -q -p no:cacheprovider $1 2>&1); then
    echo "$1: $((SECONDS - begin)) s"
  else
    printf '%s\n' "$1 failed" "$output"
    return 1
  fi
}
export -f run run_part
parts=()
for level in i8mm dotprod neon; do
  for file in attention latents experts; do
    parts+=("tests/kernels/test_native_$file.py -k $level")
  done
done
for file in native_{gemm,fused,blocks,lora} bitmask state_space; do
  parts+=("tests/kernels/test_$file.py")
done
begin=$SECONDS
printf '%s\n' "${parts[@]}" | xargs -P "${JOBS:-2}" -I{} bash -c 'run_part "{}"'
echo "all tests of the kernels passed in $((SECONDS - begin)) s"
