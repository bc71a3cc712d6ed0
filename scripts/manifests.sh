#!/usr/bin/env bash
# Generates manifests/base from the chart, for use with kustomize instead of Helm.
#   scripts/manifests.sh            write it
#   scripts/manifests.sh --check    fail if it differs from the chart
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
      { echo "manifests/base/$file.yaml differs from the chart; run scripts/manifests.sh" >&2; exit 1; } ;;
    *) cp "$made/$file.yaml" "manifests/base/$file.yaml" ;;
  esac
done
