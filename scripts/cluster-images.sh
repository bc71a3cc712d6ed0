#!/usr/bin/env bash
# Loads the images of the scenarios and benchmarks onto every node of the running cluster.
#   scripts/cluster-images.sh target/debug/evenkeel
set -euo pipefail
cd "$(dirname "$0")/.."
kit=$PWD/tests/cluster/kit
state=${CLUSTER_STATE:-/tmp/evenkeel-cluster}

load() { # NAME ENTRYPOINT FILE:PATH …: builds an image from these files and loads it
  "$kit/image" "$state/image.tar" "$@"
  "$kit/cluster" load "$state/image.tar"
}

# The program and its shared libraries.
strip -o "$state/evenkeel" "$1"
libraries=()
for library in $(ldd "$state/evenkeel" | grep -o '/[^ ]*' | sort -u); do
  libraries+=("$(realpath "$library"):${library#/}")
done
# The storm steps the clocks of controllers and agents with it.
libraries+=("$(compgen -G '/usr/lib/*/faketime/libfaketime.so.1'):lib/faketime.so")
load evenkeel.test/evenkeel:1 '["/bin/evenkeel"]' "$state/evenkeel:bin/evenkeel" "${libraries[@]}"
# The same image under another tag, for scenarios that edit the image.
load evenkeel.test/evenkeel:2 '["/bin/evenkeel"]' "$state/evenkeel:bin/evenkeel" "${libraries[@]}"
# An external trainer in an image without this program. It needs the C library, since the program is copied in.
load evenkeel.test/busybox:1 '["/bin/busybox"]' /bin/busybox:bin/busybox /bin/busybox:bin/sh "${libraries[@]}"

# The program with emulated GPUs and the compiler of their kernels, if NVRTC is there.
IFS=: read -ra places <<<"${EVENKEEL_CUDA_LIBRARIES:-}"
nvrtc=$(find "${places[@]:-/nonexistent}" -name 'libnvrtc.so.1[23]' -printf '%f %p\n' 2>/dev/null | sort | tail -1 || true)
nvrtc=${nvrtc#* }
emulated=$(dirname "$1")/deps/libemulated_gpu.so
if [ -n "$nvrtc" ]; then
  [ -e "$emulated" ] || { echo "missing: $emulated, for the image of emulated GPUs; run cargo test --no-run" >&2; exit 1; }
  strip -o "$state/emulated.so" "$emulated"
  gpu=("$state/emulated.so:cuda/emulated.so")
  for name in libcuda.so.1 libnvidia-ml.so.1 libcublasLt.so.13 libnccl.so.2; do
    ln -sf emulated.so "$state/$name"
    gpu+=("$state/$name:cuda/$name")
  done
  for compiler in "$nvrtc" "$(dirname "$nvrtc")"/libnvrtc-builtins.so.*; do
    gpu+=("$compiler:cuda/$(basename "$compiler")")
    for library in $(ldd "$compiler" | grep -o '/[^ ]*'); do
      file=$(realpath "$library"):${library#/}
      [[ " ${libraries[*]} ${gpu[*]} " = *" $file "* ]] || gpu+=("$file")
    done
  done
  load evenkeel.test/gpu:1 '["/bin/evenkeel"]' "$state/evenkeel:bin/evenkeel" "${libraries[@]}" "${gpu[@]}"
fi
