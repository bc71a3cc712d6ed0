#!/usr/bin/env bash
# Everything that is checked about this tree, on a machine that has rustup and nothing else of ours.
# What is not there is installed; what cannot be run is said.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n== %s\n' "$*"; }

if ! command -v cargo >/dev/null; then
  echo "cargo is not installed: get rustup (https://rustup.rs), then run this again" >&2
  exit 2
fi

say "recipe corpus"
corpus=${EVENKEEL_RECIPES:-../shared/recipes}
if [ -f "$corpus/manifest.csv" ]; then
  echo "found: upstream recipes and golden tables are tested where they lie"
elif [ "${CI:-}" = true ]; then
  echo "missing: $corpus/manifest.csv (set EVENKEEL_RECIPES)" >&2
  exit 1
else
  echo "skipped: no corpus at $corpus (set EVENKEEL_RECIPES); its tests say so below"
fi

say "rustfmt"
cargo fmt --check

say "clippy"
cargo clippy --locked --all-targets --test endurance --test cluster -- -D warnings

say "fuzz targets"
# They compile the readers from their own sources, so a new import there can break them unseen.
if command -v c++ >/dev/null; then
  cargo check --locked --manifest-path fuzz/Cargo.toml --bins
elif [ "${CI:-}" = true ]; then
  echo "missing: a C++ compiler, which libFuzzer is built with" >&2
  exit 1
else
  echo "SKIPPED: the fuzz targets are not compiled (no C++ compiler, which libFuzzer is built with)"
fi

say "cargo-deny"
command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
cargo deny check licenses bans sources
# The advisory database is fetched over the network, which not every machine has.
timeout 120 cargo deny check advisories 2>/dev/null || echo "skipped: advisories (no advisory database to be had here)"

say "NVRTC, which compiles the CUDA kernels without a GPU"
# Its wheel, in an environment of its own, unless EVENKEEL_CUDA_LIBRARIES says where libraries are.
if [ -z "${EVENKEEL_CUDA_LIBRARIES:-}" ] && command -v python3 >/dev/null; then
  if { [ -x target/nvrtc/bin/python ] || python3 -m venv target/nvrtc; } &&
    timeout 600 target/nvrtc/bin/python -m pip install --quiet -r tests/cuda/requirements.txt; then
    packages='import sysconfig; print(sysconfig.get_path("platlib"))'
    EVENKEEL_CUDA_LIBRARIES=$(target/nvrtc/bin/python -c "$packages")
    export EVENKEEL_CUDA_LIBRARIES
  fi
fi
if [ -n "${EVENKEEL_CUDA_LIBRARIES:-}" ]; then
  echo "found: $EVENKEEL_CUDA_LIBRARIES"
elif [ "${CI:-}" = true ]; then
  echo "missing: the wheel of tests/cuda/requirements.txt could not be installed" >&2
  exit 1
else
  echo "SKIPPED: the CUDA kernels are not compiled (set EVENKEEL_CUDA_LIBRARIES)"
fi
echo "SKIPPED: nothing of CUDA runs on a GPU, here or anywhere yet (docs/cuda.md)"

say "tests"
cargo test --locked -- --nocapture

say "a Python for the tests of other people's trainers"
# torch, transformers and accelerate: EVENKEEL_PYTHON, python3, or an environment of our own.
needs="import torch, transformers, accelerate"
python=${EVENKEEL_PYTHON:-python3}
if ! "$python" -c "$needs" 2>/dev/null && [ -z "${EVENKEEL_PYTHON:-}" ]; then
  python=target/python/bin/python
  if ! "$python" -c "$needs" 2>/dev/null && command -v python3 >/dev/null; then
    echo "installing them into target/python (some gigabytes, once)"
    python3 -m venv target/python &&
      timeout 600 "$python" -m pip install --quiet -r tests/trainers/requirements.txt ||
      echo "they could not be installed"
  fi
fi
if "$python" -c "$needs" 2>/dev/null; then
  export EVENKEEL_PYTHON=$python
  echo "found: $("$python" -c "$needs; print('torch', torch.__version__, 'transformers', transformers.__version__, 'accelerate', accelerate.__version__)")"
elif [ "${CI:-}" = true ]; then
  echo "missing: what tests/trainers/requirements.txt names could not be installed (set EVENKEEL_PYTHON)" >&2
  exit 1
else
  echo "SKIPPED: PyTorch's DDP and Hugging Face's Trainer under evenkeel (set EVENKEEL_PYTHON)"
fi

say "endurance: real processes, killed and moved"
cargo test --locked --test endurance -- --nocapture

say "cluster: a real Kubernetes on this machine"
code=0
scripts/cluster-tests.sh || code=$?
if [ "$code" = 3 ] && [ "${CI:-}" != true ]; then
  echo "SKIPPED: the cluster's scenarios (the reason is above)"
elif [ "$code" != 0 ]; then
  exit "$code"
fi
