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
load evenkeel.test/evenkeel:1 '["/bin/evenkeel"]' "$state/evenkeel:bin/evenkeel" "${libraries[@]}"
# The same image under another tag, for scenarios that edit the image.
load evenkeel.test/evenkeel:2 '["/bin/evenkeel"]' "$state/evenkeel:bin/evenkeel" "${libraries[@]}"
# An external trainer in an image without this program. It needs the C library, since the program is copied in.
load evenkeel.test/busybox:1 '["/bin/busybox"]' /bin/busybox:bin/busybox "${libraries[@]}"
