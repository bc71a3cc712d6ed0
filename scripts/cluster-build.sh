#!/usr/bin/env bash
# Builds the programs of the test cluster from Go modules, unless they are there (minutes, once).
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${CLUSTER_BIN:-${CLUSTER_STATE:-/tmp/evenkeel-cluster}-bin}
for program in disk helm kubelet versitygw containerd; do
  [ -x "$bin/$program" ] || exec tests/cluster/kit/cluster build
done
