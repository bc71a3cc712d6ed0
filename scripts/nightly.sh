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

command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
cargo deny check licenses bans sources
# Needs network access for the advisory database.
timeout 120 cargo deny check advisories 2>/dev/null || echo "SKIPPED: advisories (cannot fetch the advisory database)"

# The fuzz crate compiles the readers from source, so a new import in a reader can break it. libFuzzer needs a C++
# compiler.
if command -v c++ >/dev/null; then
  cargo check --locked --manifest-path fuzz/Cargo.toml --bins
else
  echo "SKIPPED: the fuzz targets (no C++ compiler)"
fi

cargo test --locked --workspace --test cuda_launch -- --ignored --nocapture
EVENKEEL_THOROUGH=1 cargo test --locked --workspace --test attention -- --include-ignored
# Each planted mistake of a kernel must be caught by a test of it.
cargo test --locked --workspace --test mutations -- --ignored
EVENKEEL_THOROUGH=1 EVENKEEL_PYTHON=${EVENKEEL_PYTHON:-$PWD/target/python/bin/python} \
  cargo test --locked --workspace --test endurance accelerate_launch_and

# Twenty runs of 500 steps and more through random worlds and faults end in one checksum, from a new seed every day.
EVENKEEL_THOROUGH=1 EVENKEEL_SEED=$(date +%Y%m%d) \
  cargo test --locked --workspace --test endurance determinism -- --nocapture

# The tests of the chart's alerts. promtool takes minutes to compile. Needs helm, which the cluster tests build.
if ! command -v promtool >/dev/null; then
  GOBIN=$PWD/target/go go install github.com/prometheus/prometheus/cmd/promtool@v0.316.0
fi
PATH=$PWD/target/go:${CLUSTER_BIN:-/tmp/evenkeel-cluster-bin}:$PATH scripts/manifests.sh --check

# An hour of faults on a real Kubernetes, from a new seed every day. Every second day the jobs must keep their bits.
code=0
[ $(($(date +%s) / 86400 % 2)) = 0 ] || export EVENKEEL_STORM_BITS=1
EVENKEEL_STORM_ALL=1 EVENKEEL_STORM_MINUTES=60 EVENKEEL_STORM_SEED=$(date +%Y%m%d) \
  scripts/cluster-tests.sh jobs_survive_a_storm || code=$?
[ "$code" = 0 ] || [ "$code" = 3 ] || exit "$code"
[ "$code" = 0 ] || echo "SKIPPED: the storm (see above for the reason)"

# Scenarios on a real Kubernetes that the suite leaves out.
if [ -z "${EVENKEEL_PYTHON:-}" ] && [ -x target/python/bin/python ]; then
  export EVENKEEL_PYTHON=$PWD/target/python/bin/python
fi
code=0
scripts/cluster-tests.sh --ignored || code=$?
[ "$code" = 0 ] || [ "$code" = 3 ] || exit "$code"

# Launches commands of upstream's READMEs, and the long tests of hosts. The programs that no package has are checkouts in the folder
# EVENKEEL_UPSTREAM: alignment-handbook and transformers. NAME.venv beside a checkout is the environment with the
# versions that it needs.
if [ -z "${EVENKEEL_UPSTREAM:-}" ]; then
  echo "SKIPPED: the commands of the handbook's and transformers' READMEs (set EVENKEEL_UPSTREAM)"
fi
cargo test --locked --workspace --test endurance -- --ignored --nocapture readmes a_program_with_dcp ten_faults_of_slurm higher_qos \
  hosts_without_a_common_disk a_submitted_run_keeps_its_checkpoints_in_a_bucket

# What the wheels of TRL and transformers say about their fields; a new version of them fails here.
python3 scripts/upstream-versions.py --check
