#!/usr/bin/env bash
# A real Kubernetes on this machine, the chart installed on it, the scenarios of tests/cluster run
# one after the other. Needs root, Go and a Debian-like system; says so where it cannot run.
#
#   scripts/cluster-tests.sh                all scenarios
#   scripts/cluster-tests.sh cordon         those with `cordon` in their names
#   KEEP=1 scripts/cluster-tests.sh …       leave the cluster up afterwards
set -euo pipefail
cd "$(dirname "$0")/.."
kit=$PWD/tests/cluster/kit/cluster
state=${CLUSTER_STATE:-/tmp/evenkeel-cluster}
bin=${CLUSTER_BIN:-$state-bin}
export PATH=$bin:$PATH KUBECONFIG=$state/admin.kubeconfig

finish() {
  local code=$?
  if [ -n "${KEEP:-}" ]; then
    echo "the cluster stays up: export KUBECONFIG=$KUBECONFIG PATH=$bin:\$PATH; $kit down ends it"
  elif [ -e "$state" ]; then
    "$kit" down
  fi
  exit $code
}
trap finish EXIT
# The binary as the tests have it: a build without them would compile half of what it stands on anew.
cargo test --locked --test cluster --no-run
scripts/cluster-up.sh target/debug/evenkeel
helm lint --quiet charts/evenkeel
scripts/manifests.sh --check
kubectl kustomize manifests/overlays/single >/dev/null
# The scenarios' namespace: every pod in it satisfies `restricted`, or is not made.
kubectl label --overwrite namespace default pod-security.kubernetes.io/enforce=restricted

cargo test --locked --test cluster -- --test-threads=1 --nocapture "$@"
