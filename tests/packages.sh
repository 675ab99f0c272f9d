#!/usr/bin/env bash
# Installs what `make check` and `make test` run for CI: tests/debian-packages.txt, one a line, and what integration tests need.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

mapfile -t packages < <(grep -v '^#' debian-packages.txt)
./install-packages.sh "${packages[@]}"
integration/packages.sh
