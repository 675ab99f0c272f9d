#!/usr/bin/env bash
# Installs what tests between machines and under Open MPI 4 run. Where it cannot, as it is not root on Debian or Ubuntu, those are skipped.
set -euo pipefail

packages=(iproute2 libopenmpi-dev openmpi-bin openssh-client openssh-server)
((EUID == 0)) && [[ -e /etc/debian_version ]] || exit 0
exec "$(dirname "${BASH_SOURCE[0]}")/../install-packages.sh" "${packages[@]}"
