#!/usr/bin/env bash
# Runs all checks of this repository, the quick ones first; needs only rustup. Installs missing tools and reports the
# checks that it skips. A test that fails is repeated (scripts/repeat-failed.sh); the last lines list the flaky ones and
# the time of each part. ~/.cache/evenkeel/tests.log keeps these of every run.
set -euo pipefail
cd "$(dirname "$0")/.."

# Begins the next part. `times` has a line for each ended one.
say() {
  if [ -n "${part:-}" ]; then
    times+=$(printf '%7d s  %s' $((SECONDS - begun)) "$part")$'\n'
  fi
  part=$1 begun=$SECONDS
  [ -z "$part" ] || printf '\n== %s\n' "$part"
}

# Runs something beside the parts that follow: beside NAME COMMAND…. Its output goes into target/NAME.log.
declare -A running
beside() {
  setsid "${@:2}" >"target/$1.log" 2>&1 &
  running[$1]=$!
}

# The same, with what these parts leave of the processors. Where the kernel groups processes by session, a session has a
# share by its own niceness.
background() {
  beside "$1" bash -c 'echo 19 2>/dev/null >/proc/self/autogroup; exec nice -n 19 "$@"' background "${@:2}"
}

# Waits for it and returns its exit status. Prints its output if it failed.
finish() {
  local code=0
  wait "${running[$1]}" || code=$?
  unset "running[$1]"
  [ "$code" = 0 ] || cat "target/$1.log"
  return "$code"
}

# In CI what cannot run is a failure.
skip() {
  echo "SKIPPED: $*"
  [ "${CI:-}" != true ] || exit 1
}

flaky=$PWD/target/flaky history=${XDG_CACHE_HOME:-$HOME/.cache}/evenkeel
report() {
  local code=$? name line
  for name in "${!running[@]}"; do kill -- "-${running[$name]}" 2>/dev/null || true; done
  say ""
  {
    printf '\n== time\n%s%7d s  all\n' "${times:-}" "$SECONDS"
    if [ -s "$flaky/list" ]; then
      printf '\n== FLAKY: passed when repeated; find the cause, and add it to tests/flaky.md\n'
      while read -r line; do
        name=${line%%: *}
        grep -qF "${name#* }" tests/flaky.md || line+=" (not in tests/flaky.md)"
        echo "$line"
      done <"$flaky/list"
    fi
  } | tee "$flaky/summary"
  # Kept beyond this clone, to compare runs on this machine.
  if mkdir -p "$history" 2>/dev/null; then
    { date -u "+%F %T, exit code $code, $(git rev-parse --short HEAD 2>/dev/null)" && cat "$flaky/summary"; } >>"$history/tests.log" || true
  fi
  if [ -s "$flaky/failed" ]; then cat "$flaky/failed"; fi
  exit "$code"
}

if ! command -v cargo >/dev/null; then
  echo "cargo is not installed; install rustup (https://rustup.rs) and run this again" >&2
  exit 2
fi
rm -rf "$flaky"
mkdir -p "$flaky"
trap report EXIT
# rustup needs a C compiler, and Debian's Python has no virtual environments by itself.
if ! command -v cc >/dev/null || { command -v python3 >/dev/null && ! python3 -c "import ensurepip" 2>/dev/null; }; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing a C compiler and Python's venv with apt-get"
    apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev python3-venv >/dev/null
  else
    echo "install a C compiler, and Python's venv for the tests with Python" >&2
  fi
fi
host=$(rustc -vV | sed -n 's/^host: //p' | tr a-z- A-Z_)
export "CARGO_TARGET_${host}_RUNNER=$PWD/scripts/repeat-failed.sh" FLAKY=$flaky

say "recipe corpus"
corpus=${EVENKEEL_RECIPES:-../shared/recipes}
if [ -f "$corpus/manifest.csv" ]; then
  echo "found: testing upstream recipes and golden tables in $corpus"
else
  skip "no corpus at $corpus (set EVENKEEL_RECIPES)"
fi

say "rustfmt"
cargo fmt --all --check

# The wheels of NVRTC 12 and 13, which compile the CUDA kernels without a GPU.
if [ -z "${EVENKEEL_CUDA_LIBRARIES:-}" ]; then
  background nvrtc scripts/virtualenv.sh target/nvrtc tests/cuda/requirements.txt
fi
# torch, transformers, accelerate, trl, deepspeed, peft and bitsandbytes for tests of external trainers: several gigabytes, once.
needs="import torch, transformers, accelerate, trl, deepspeed, peft, bitsandbytes"
python=${EVENKEEL_PYTHON:-python3}
if [ -z "${EVENKEEL_PYTHON:-}" ] && ! python3 -c "$needs" 2>/dev/null; then
  python=target/python/bin/python
  background python scripts/virtualenv.sh target/python tests/trainers/requirements.txt
fi
# maturin, which builds the wheel, and a validator of JSON schemas.
if [ -z "${PACKAGING_PYTHON:-}" ]; then
  background packaging scripts/virtualenv.sh target/packaging packaging/requirements.txt
  export PACKAGING_PYTHON=target/packaging/bin/python
fi
# Servers for the launches on other hosts.
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  background hosts scripts/hosts.sh
fi
# Compiling the S3 server takes a minute, and Kubernetes twenty on a new machine. The cluster tests repeat what fails.
if command -v go >/dev/null; then
  background s3 scripts/s3-server.sh
fi
if [ "$(id -u)" = 0 ] && command -v go >/dev/null && command -v apt-get >/dev/null; then
  background go scripts/cluster-build.sh
fi

say "import layers and messages"
# Clippy's driver is also a compiler, so one build does both: `cargo clippy` by itself would compile every dependency once
# more, without code. Its arguments are what `cargo clippy -- -D warnings` passes on.
RUSTC_WORKSPACE_WRAPPER=$(rustup which clippy-driver)
export RUSTC_WORKSPACE_WRAPPER CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__
mkdir -p target/tmp
if echo 'pub fn f() -> i32 { return 2; }' |
  "$RUSTC_WORKSPACE_WRAPPER" rustc --crate-type lib --emit metadata --out-dir target/tmp - 2>/dev/null; then
  echo "clippy-driver accepts what clippy refuses: see CLIPPY_ARGS in scripts/test.sh" >&2
  exit 1
fi
cargo test --locked --package source-tests -- --nocapture

say "cargo-deny"
if command -v cargo-deny >/dev/null; then
  cargo deny check licenses bans sources
else
  echo "SKIPPED: licences and sources of dependencies (no cargo-deny; scripts/nightly.sh installs it, which takes minutes)"
fi

say "clippy, and compile the unit tests"
# Always the whole workspace: another choice of packages has other features, and compiles dependencies again.
# The library's tests are slower without optimisation by less than it takes. Programs that train are not.
library=(cargo test --config profile.dev.package.evenkeel.opt-level=0 --locked --workspace --lib)
"${library[@]}" --no-run

say "unit tests and generated files"
# Those of CUDA come later: their kernels take minutes on the emulated GPU.
"${library[@]}" -- --nocapture --skip cuda

say "clippy, and compile the other tests"
mapfile -t programs < <(
  basename -s .rs tests/*.rs emulated-gpu/tests/*.rs
  # Programs of several files, but those of the two last parts.
  dirname tests/*/main.rs | xargs -n 1 basename | grep -vx 'cluster\|endurance'
)
programs=("${programs[@]/#/--test=}")
cargo test --locked --workspace --bins --bench '*' "${programs[@]}" --test=endurance --test=cluster --no-run

say "wait for NVRTC"
if [ -n "${running[nvrtc]:-}" ] && finish nvrtc; then
  EVENKEEL_CUDA_LIBRARIES=$(target/nvrtc/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
  export EVENKEEL_CUDA_LIBRARIES
fi
if [ -n "${EVENKEEL_CUDA_LIBRARIES:-}" ]; then
  echo "found: $EVENKEEL_CUDA_LIBRARIES"
else
  skip "the CUDA kernels are not compiled (set EVENKEEL_CUDA_LIBRARIES)"
fi
[ -z "${running[packaging]:-}" ] || finish packaging
echo "SKIPPED: CUDA tests run on the emulated GPU only; benches/first_contact.sh runs on hardware"

say "tests of CUDA, and of the program"
# With NVRTC the emulated GPU runs the kernels of the repository.
export TEST_LIMIT=1200
beside cuda "${library[@]}" -- --nocapture cuda
cargo test --locked --workspace "${programs[@]}" -- --nocapture
finish cuda
tail -n 5 target/cuda.log
echo "SKIPPED: the tests that take minutes, and the fuzz targets (scripts/nightly.sh)"

say "wait for Python packages"
[ -z "${running[python]:-}" ] || finish python || true
versions="print('torch', torch.__version__, 'transformers', transformers.__version__, 'accelerate', accelerate.__version__, 'trl', trl.__version__, 'deepspeed', deepspeed.__version__)"
if found=$("$python" -c "$needs; $versions" 2>/dev/null); then
  export EVENKEEL_PYTHON=$python
  echo "found: $found"
else
  skip "PyTorch's DDP, Hugging Face's Trainer and TRL under evenkeel (set EVENKEEL_PYTHON)"
fi

say "first contact: what a GPU would run, on the emulated one"
if [ -n "${EVENKEEL_CUDA_LIBRARIES:-}" ] && command -v "${EVENKEEL_PYTHON:-python3}" >/dev/null; then
  # Its own table says what it skips and why.
  EMULATE=1 PYTHON=${EVENKEEL_PYTHON:-python3} benches/first_contact.sh
else
  skip "first contact (needs Python, and NVRTC in EVENKEEL_CUDA_LIBRARIES)"
fi

say "the S3 server"
[ -z "${running[s3]:-}" ] || finish s3 || true
if server=$(scripts/s3-server.sh); then
  export EVENKEEL_S3_SERVER=$server
  echo "found: $(grep -om1 'versitygw v[0-9.]*' tests/s3-server/go.mod)"
else
  skip "buckets on a real S3 server (see above for the reason)"
fi

say "endurance: real processes, killed and moved"
[ -z "${running[hosts]:-}" ] || finish hosts || true
TEST_LIMIT=2400 cargo test --locked --workspace --test endurance -- --nocapture

say "wait for Kubernetes"
[ -z "${running[go]:-}" ] || finish go || true

say "cluster: a real Kubernetes on this machine"
code=0
TEST_LIMIT=3000 scripts/cluster-tests.sh || code=$?
case $code in
0) ;;
3) skip "the cluster scenarios (see above for the reason)" ;;
*) exit "$code" ;;
esac
