#!/usr/bin/env bash
# Generates manifests/base from the chart, for use with kustomize instead of Helm.
#   scripts/manifests.sh            write it
#   scripts/manifests.sh --check    fail if it differs from the chart, and test the chart's alerts
# Needs helm; the tests of the alerts need promtool.
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
[ "${1:-}" = --check ] || exit 0

# Kind, namespace and name of each object of a namespaced release.
objects() {
  helm template evenkeel "$chart" --namespace "$1" --set namespaced=true | awk '
    /^kind:/ { kind = $2 }
    /^  name:/ && !name { name = $2 }
    /^  namespace:/ && !namespace { namespace = $2 }
    /^---/ && name { print kind, namespace, name; name = namespace = "" }
    END { print kind, namespace, name }' | sort
}
objects a >"$made/a"
objects b >"$made/b"
[ -z "$(uniq -d "$made/a")" ] && ! comm -12 "$made/a" "$made/b" | grep . ||
  { echo "releases of one name in two namespaces have these objects in common" >&2; exit 1; }

# manifests/base has no monitoring, so it is rendered on its own.
helm template evenkeel "$chart" --set monitoring.serviceMonitor.enabled=true \
  --set monitoring.rules.enabled=true --set monitoring.dashboard.enabled=true >"$made/monitoring.yaml"
for kind in Service ServiceMonitor PrometheusRule ConfigMap; do
  grep -q "^kind: $kind$" "$made/monitoring.yaml" ||
    { echo "the chart's monitoring renders no $kind" >&2; exit 1; }
done
if command -v promtool >/dev/null; then
  promtool check rules --lint-fatal "$chart/alerts.yaml"
  promtool test rules tests/chart/alerts_test.yaml
else
  echo "SKIPPED: the tests of the alerts (no promtool; scripts/nightly.sh installs it)"
fi
