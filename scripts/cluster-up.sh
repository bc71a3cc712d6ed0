#!/usr/bin/env bash
# Starts a real Kubernetes on this machine and installs the chart, for scenarios and benchmarks. Uses
# a running cluster if there is one. Needs root, Go and a Debian-like system; exits with 3 if these are missing.
#
#   scripts/cluster-up.sh target/release/evenkeel                       three nodes
#   NODE_GRACE=50s scripts/cluster-up.sh target/release/evenkeel 1      one node, with Kubernetes' default grace period
#   tests/cluster/kit/cluster down                                      stops it
set -euo pipefail
cd "$(dirname "$0")/.."
kit=$PWD/tests/cluster/kit/cluster
state=${CLUSTER_STATE:-/tmp/evenkeel-cluster}
bin=${CLUSTER_BIN:-$state-bin}

cannot() {
  echo "cannot run a cluster here: $*" >&2
  exit 3
}
[ "$(id -u)" = 0 ] || cannot "network namespaces, cgroups and containers need root; run it as root"
command -v go >/dev/null || cannot "Go is not installed, it is needed to build Kubernetes"
command -v apt-get >/dev/null || cannot "apt-get is missing, it is needed to install the tools"

scripts/cluster-build.sh
export PATH=$bin:$PATH KUBECONFIG=$state/admin.kubeconfig
[ -e "$state/etcd.pid" ] || "$kit" up "${2:-3}"
scripts/cluster-images.sh "$1"
# Before the controller, which would create it: scenarios run controllers as processes with the same key.
if ! kubectl get namespace evenkeel-system >/dev/null 2>&1; then
  kubectl create namespace evenkeel-system
  (umask 077 && od -An -tx1 -N32 /dev/urandom | tr -d ' \n' >"$state/controller.key")
  kubectl -n evenkeel-system create secret generic evenkeel-controller-key --from-file=key="$state/controller.key"
fi
helm upgrade --install evenkeel charts/evenkeel --namespace evenkeel-system \
  --set image=evenkeel.test/evenkeel:1 --set replicas=1 --wait --timeout 60s
# Helm does not update existing CRDs, and does not restart pods for an image of the same name.
kubectl apply --server-side --force-conflicts -f charts/evenkeel/crds
kubectl -n evenkeel-system rollout restart deployment
kubectl -n evenkeel-system rollout status deployment --timeout 60s
