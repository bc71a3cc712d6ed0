#!/usr/bin/env bash
# Writes manifests/base from the chart, for those who use kustomize rather than Helm.
#   scripts/manifests.sh            write it
#   scripts/manifests.sh --check    fail if it is not what the chart gives
# Needs helm.
set -euo pipefail
cd "$(dirname "$0")/.."
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
chart=charts/evenkeel
cp "$chart/crds/trainingjobs.yaml" "$made/crd.yaml"
helm template evenkeel "$chart" --namespace evenkeel-system >"$made/controller.yaml"
for file in crd controller; do
  case ${1:-} in
    --check) diff -u "manifests/base/$file.yaml" "$made/$file.yaml" ||
      { echo "manifests/base/$file.yaml is not what the chart gives: scripts/manifests.sh writes it" >&2; exit 1; } ;;
    *) cp "$made/$file.yaml" "manifests/base/$file.yaml" ;;
  esac
done
