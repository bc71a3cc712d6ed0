#!/usr/bin/env bash
# A real Kubernetes on this machine with the chart installed on it, for scenarios and benchmarks; one
# that is up already is used. Needs root, Go and a Debian-like system; says so where it cannot run.
#
#   scripts/cluster-up.sh target/release/evenkeel                       three nodes
#   NODE_GRACE=50s scripts/cluster-up.sh target/release/evenkeel 1      one, with Kubernetes' own grace
#   tests/cluster/kit/cluster down                                      the end of it
set -euo pipefail
cd "$(dirname "$0")/.."
kit=$PWD/tests/cluster/kit/cluster
state=${CLUSTER_STATE:-/tmp/evenkeel-cluster}
bin=${CLUSTER_BIN:-$state-bin}

cannot() {
  echo "cannot run a cluster here: $*" >&2
  exit 3
}
[ "$(id -u)" = 0 ] || cannot "namespaces, cgroups and containers need root"
command -v go >/dev/null || cannot "Go builds Kubernetes, and is not installed"
command -v apt-get >/dev/null || cannot "the tools around it come from Debian's packages"

[ -x "$bin/containerd" ] && [ -x "$bin/kubelet" ] && [ -x "$bin/helm" ] || "$kit" build
export PATH=$bin:$PATH KUBECONFIG=$state/admin.kubeconfig
[ -e "$state/etcd.pid" ] || "$kit" up "${2:-3}"
scripts/cluster-images.sh "$1"
helm upgrade --install evenkeel charts/evenkeel --namespace evenkeel-system --create-namespace \
  --set image=evenkeel.test/evenkeel:1 --set replicas=1 --wait --timeout 60s
# Helm changes no CRDs that are there, and starts nothing new for an image of the same name.
kubectl apply --server-side --force-conflicts -f charts/evenkeel/crds
kubectl -n evenkeel-system rollout restart deployment
kubectl -n evenkeel-system rollout status deployment --timeout 60s
