#!/usr/bin/env bash
# Installs Python packages into a virtual environment: scripts/virtualenv.sh DIRECTORY REQUIREMENTS
set -euo pipefail
[ -x "$1/bin/python" ] || python3 -m venv "$1"
# Beside builds it has little of the processors.
timeout 3600 "$1/bin/python" -m pip install --quiet -r "$2"
