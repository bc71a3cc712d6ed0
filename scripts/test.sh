#!/usr/bin/env bash
# Runs all checks of this repository; needs only rustup. Installs missing tools and reports the checks
# that it skips.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n== %s\n' "$*"; }

# Runs a command: within SECONDS COMMAND…. One that takes longer fails, after the stacks of its tests are printed.
# The command is in the foreground: one in the background would ignore SIGINT, and so would its tests.
within() {
  local limit=$1 code=0 watch
  shift
  setsid bash -c '
    sleep "$1"
    echo "no end after $1 s" >&2
    for test in $(pgrep -f "^$PWD/target/debug/deps/"); do
      ps -o pid=,args= "$test"
      timeout 120 gdb -p "$test" -batch -ex "thread apply all backtrace 16" 2>/dev/null | grep -E "^(Thread|#)"
    done
    pkill -P "$2" -x "$3"
    pkill -f "^$PWD/target/debug/deps/"' within "$limit" $$ "$1" &
  watch=$!
  "$@" || code=$?
  # A command may end before the watch has its session.
  until kill -- "-$watch" 2>/dev/null; do
    kill -0 "$watch" 2>/dev/null || break
    sleep 0.1
  done
  return "$code"
}

if ! command -v cargo >/dev/null; then
  echo "cargo is not installed; install rustup (https://rustup.rs) and run this again" >&2
  exit 2
fi

# Compiling Kubernetes takes minutes. It begins now, with what the steps below leave of the processors; the cluster tests
# repeat what fails.
kubernetes=
if [ "$(id -u)" = 0 ] && command -v go >/dev/null && command -v apt-get >/dev/null; then
  mkdir -p target
  setsid nice -n 19 scripts/cluster-build.sh >target/cluster-build.log 2>&1 &
  kubernetes=$!
  trap 'kill -- "-$kubernetes" 2>/dev/null || true' EXIT
fi

say "recipe corpus"
corpus=${EVENKEEL_RECIPES:-../shared/recipes}
if [ -f "$corpus/manifest.csv" ]; then
  echo "found: testing upstream recipes and golden tables in $corpus"
elif [ "${CI:-}" = true ]; then
  echo "missing: $corpus/manifest.csv (set EVENKEEL_RECIPES)" >&2
  exit 1
else
  echo "skipped: no corpus at $corpus (set EVENKEEL_RECIPES)"
fi

say "rustfmt"
cargo fmt --all --check

say "clippy"
# Always the whole workspace: another choice of packages has other features, and compiles dependencies again.
cargo clippy --locked --workspace --all-targets -- -D warnings
# "All targets" leaves out tests that `cargo test` does not run, and named ones beside it.
cargo clippy --locked --workspace --test endurance --test cluster -- -D warnings

say "cargo-deny"
if command -v cargo-deny >/dev/null; then
  cargo deny check licenses bans sources
else
  echo "SKIPPED: licences and sources of dependencies (no cargo-deny; scripts/nightly.sh installs it, which takes minutes)"
fi

say "NVRTC: compile the CUDA kernels without a GPU"
# Installs the wheels of NVRTC 12 and 13 into a virtual environment, unless EVENKEEL_CUDA_LIBRARIES names the libraries.
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
  echo "missing: cannot install the wheels of tests/cuda/requirements.txt" >&2
  exit 1
else
  echo "SKIPPED: the CUDA kernels are not compiled (set EVENKEEL_CUDA_LIBRARIES)"
fi
echo "SKIPPED: CUDA tests run on the emulated GPU only; benches/first_contact.sh runs on hardware"

say "tests"
# With NVRTC the emulated GPU runs the kernels of the repository.
within 2700 cargo test --locked --workspace -- --nocapture

echo "SKIPPED: the tests that take minutes, and the fuzz targets (scripts/nightly.sh)"

say "Python for the tests of external trainers"
# torch, transformers, accelerate, trl and deepspeed: EVENKEEL_PYTHON, python3, or a virtual environment in target/python.
needs="import torch, transformers, accelerate, trl, deepspeed"
python=${EVENKEEL_PYTHON:-python3}
if ! "$python" -c "$needs" 2>/dev/null && [ -z "${EVENKEEL_PYTHON:-}" ]; then
  python=target/python/bin/python
  if ! "$python" -c "$needs" 2>/dev/null && command -v python3 >/dev/null; then
    echo "installing torch, transformers, accelerate, trl and deepspeed into target/python (several gigabytes, once)"
    python3 -m venv target/python &&
      timeout 600 "$python" -m pip install --quiet -r tests/trainers/requirements.txt ||
      echo "cannot install tests/trainers/requirements.txt"
  fi
fi
if "$python" -c "$needs" 2>/dev/null; then
  export EVENKEEL_PYTHON=$python
  echo "found: $("$python" -c "$needs; print('torch', torch.__version__, 'transformers', transformers.__version__, 'accelerate', accelerate.__version__, 'trl', trl.__version__, 'deepspeed', deepspeed.__version__)")"
elif [ "${CI:-}" = true ]; then
  echo "missing: cannot install tests/trainers/requirements.txt (set EVENKEEL_PYTHON)" >&2
  exit 1
else
  echo "SKIPPED: PyTorch's DDP, Hugging Face's Trainer and TRL under evenkeel (set EVENKEEL_PYTHON)"
fi

say "first contact: what a GPU would run, on the emulated one"
if [ -n "${EVENKEEL_CUDA_LIBRARIES:-}" ] && command -v "${EVENKEEL_PYTHON:-python3}" >/dev/null; then
  # Its own table says what it skips and why.
  EMULATE=1 PYTHON=${EVENKEEL_PYTHON:-python3} benches/first_contact.sh
else
  echo "SKIPPED: first contact (needs Python, and NVRTC in EVENKEEL_CUDA_LIBRARIES)"
fi

say "S3 server for the tests of buckets"
[ -z "$kubernetes" ] || wait "$kubernetes" || true
code=0
server=$(scripts/s3-server.sh) || code=$?
if [ "$code" = 0 ]; then
  export EVENKEEL_S3_SERVER=$server
  echo "found: $(grep -om1 'versitygw v[0-9.]*' tests/s3-server/go.mod)"
elif [ "${CI:-}" = true ]; then
  exit "$code"
else
  echo "SKIPPED: buckets on a real S3 server (see above for the reason)"
fi

say "endurance: real processes, killed and moved"
within 1500 cargo test --locked --workspace --test endurance -- --nocapture

say "cluster: a real Kubernetes on this machine"
code=0
scripts/cluster-tests.sh || code=$?
if [ "$code" = 3 ] && [ "${CI:-}" != true ]; then
  echo "SKIPPED: the cluster scenarios (see above for the reason)"
elif [ "$code" != 0 ]; then
  exit "$code"
fi
