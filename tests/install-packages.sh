#!/usr/bin/env bash
# Installs those of the named Debian packages that this machine lacks; only that needs root. Starts no service of the system's.
# Usage: install-packages.sh PACKAGE ...
set -euo pipefail

missing=()
for package in "$@"; do
    [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
done
((${#missing[@]})) || exit 0
if ((EUID)); then
    echo "these packages are needed, and only root can install them: ${missing[*]}" >&2
    exit 2
fi
export DEBIAN_FRONTEND=noninteractive
# Tests start daemons of their own: the packages' are not to run.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}"
