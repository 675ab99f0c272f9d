#!/usr/bin/env bash
# Installs what the tests of Slurm run, where it lacks. Debian or Ubuntu, as root; starts no service of the system's.
set -euo pipefail

packages=(
    slurmctld slurmd slurm-client munge openmpi-bin iproute2
    libpmix-dev # Slurm's pmix plugin opens libpmix.so, a name that libpmix2 does not have
)
exec "$(dirname "${BASH_SOURCE[0]}")/../../install-packages.sh" "${packages[@]}"
