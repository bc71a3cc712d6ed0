#!/usr/bin/env bash
# Loads the images that scenarios and benchmarks use onto every node of the cluster that is up.
#   scripts/cluster-images.sh target/debug/evenkeel
set -euo pipefail
cd "$(dirname "$0")/.."
kit=$PWD/tests/cluster/kit
state=${CLUSTER_STATE:-/tmp/evenkeel-cluster}

load() { # NAME ENTRYPOINT FILE:PATH …: an image of these files
  "$kit/image" "$state/image.tar" "$@"
  "$kit/cluster" load "$state/image.tar"
}

# The program, and the libraries that it is linked with.
strip -o "$state/evenkeel" "$1"
libraries=()
for library in $(ldd "$state/evenkeel" | grep -o '/[^ ]*' | sort -u); do
  libraries+=("$(realpath "$library"):${library#/}")
done
load evenkeel.test/evenkeel:1 '["/bin/evenkeel"]' "$state/evenkeel:bin/evenkeel" "${libraries[@]}"
# The same under another tag, for what happens when images are edited.
load evenkeel.test/evenkeel:2 '["/bin/evenkeel"]' "$state/evenkeel:bin/evenkeel" "${libraries[@]}"
# Somebody else's program, in an image without this one (but with the C library: it is copied in).
load evenkeel.test/busybox:1 '["/bin/busybox"]' /bin/busybox:bin/busybox "${libraries[@]}"
