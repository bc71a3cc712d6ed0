#!/usr/bin/env bash
# Runs the scenarios of tests/cluster one after the other on a real Kubernetes on this machine, with
# the chart installed. Needs root, Go and a Debian-like system; exits with 3 if these are missing.
#
#   scripts/cluster-tests.sh                all scenarios
#   scripts/cluster-tests.sh cordon         scenarios with `cordon` in their names
#   KEEP=1 scripts/cluster-tests.sh …       keep the cluster running afterwards
set -euo pipefail
cd "$(dirname "$0")/.."
kit=$PWD/tests/cluster/kit/cluster
state=${CLUSTER_STATE:-/tmp/evenkeel-cluster}
bin=${CLUSTER_BIN:-$state-bin}
export PATH=$bin:$PATH KUBECONFIG=$state/admin.kubeconfig

finish() {
  local code=$?
  if [ -n "${KEEP:-}" ]; then
    echo "the cluster keeps running: export KUBECONFIG=$KUBECONFIG PATH=$bin:\$PATH; stop it with $kit down"
  elif [ -e "$state" ]; then
    "$kit" down
  fi
  exit $code
}
trap finish EXIT
# Builds the binary together with the tests: a separate build would recompile half of its dependencies.
cargo test --locked --workspace --test cluster --no-run
scripts/cluster-up.sh target/debug/evenkeel
# One scenario also trains on hosts by SSH and on Slurm.
scripts/hosts.sh
helm lint --quiet charts/evenkeel
scripts/manifests.sh --check
kubectl kustomize manifests/overlays/single >/dev/null
# Enforce the `restricted` standard for all pods in the scenarios' namespace.
kubectl label --overwrite namespace default pod-security.kubernetes.io/enforce=restricted

cargo test --locked --workspace --test cluster -- --test-threads=1 --nocapture "$@"
if [ $# = 0 ]; then
  # Only the whole suite uses all rights.
  roles=$(mktemp)
  kubectl get clusterroles,roles -A -l app.kubernetes.io/name=evenkeel-controller -o json >"$roles"
  scripts/unused-rights.py "$state/audit.log" "$roles"
fi
