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

cannot() {
  echo "cannot run the cluster's scenarios: $*" >&2
  exit 3
}
[ "$(id -u)" = 0 ] || cannot "namespaces, cgroups and containers need root"
command -v go >/dev/null || cannot "Go builds Kubernetes, and is not installed"
command -v apt-get >/dev/null || cannot "the tools around it come from Debian's packages"

[ -x "$bin/containerd" ] && [ -x "$bin/kubelet" ] && [ -x "$bin/helm" ] || "$kit" build
export PATH=$bin:$PATH KUBECONFIG=$state/admin.kubeconfig
helm lint --quiet charts/evenkeel
scripts/manifests.sh --check
kubectl kustomize manifests/overlays/single >/dev/null
cargo build --locked

finish() {
  local code=$?
  if [ -n "${KEEP:-}" ]; then
    echo "the cluster stays up: export KUBECONFIG=$KUBECONFIG PATH=$bin:\$PATH; $kit down ends it"
  else
    "$kit" down
  fi
  exit $code
}
trap finish EXIT
[ -e "$state/etcd.pid" ] || "$kit" up 3

scripts/cluster-images.sh target/debug/evenkeel

helm upgrade --install evenkeel charts/evenkeel --namespace evenkeel-system --create-namespace \
  --set image=evenkeel.test/evenkeel:1 --set replicas=1 --wait --timeout 60s

cargo test --locked --test cluster -- --test-threads=1 --nocapture "$@"
