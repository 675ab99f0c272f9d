#!/usr/bin/env bash
# Installs what CI needs beside the packages of single targets: tests/debian-packages.txt, one a line.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

mapfile -t packages < <(grep -v '^#' debian-packages.txt)
exec ./install-packages.sh "${packages[@]}"
