#!/usr/bin/env bash
# Installs what the tests of Slurm run, where it lacks. Debian or Ubuntu, as root; starts no service of the system's.
set -euo pipefail

packages=(slurmctld slurmd slurm-client munge openmpi-bin libpmix2 iproute2)

if dpkg-query --show "${packages[@]}" >/dev/null 2>&1; then
    exit 0
fi
if ((EUID)); then
    echo "these packages are needed, and only root can install them: ${packages[*]}" >&2
    exit 2
fi
export DEBIAN_FRONTEND=noninteractive
# The tests start daemons of their own: the packages' are not to run.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${packages[@]}"
