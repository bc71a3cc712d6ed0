#!/usr/bin/env bash
# Runs the tests that take too long for scripts/test.sh. Needs what that script has installed.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${EVENKEEL_CUDA_LIBRARIES:-}" ] && [ -x target/nvrtc/bin/python ]; then
  packages='import sysconfig; print(sysconfig.get_path("platlib"))'
  EVENKEEL_CUDA_LIBRARIES=$(target/nvrtc/bin/python -c "$packages")
  export EVENKEEL_CUDA_LIBRARIES
fi
if [ -z "${EVENKEEL_CUDA_LIBRARIES:-}" ]; then
  echo "missing: NVRTC (run scripts/test.sh first, or set EVENKEEL_CUDA_LIBRARIES)" >&2
  exit 1
fi

cargo test --locked --test cuda_launch -- --ignored --nocapture
