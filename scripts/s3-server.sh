#!/usr/bin/env bash
# Builds the S3 server of the tests from Go modules (Versity S3 Gateway; minutes, once) and prints the path of its
# binary. Exits with 3 if Go is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
binary=$PWD/target/s3-server/versitygw
if [ ! -x "$binary" ]; then
  command -v go >/dev/null || { echo "cannot build the S3 server: Go is not installed" >&2; exit 3; }
  (cd tests/s3-server && CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$binary" github.com/versity/versitygw/cmd/versitygw) >&2
fi
echo "$binary"
