#!/usr/bin/env bash
# Installs the Debian packages that the image's tests need, where this machine lacks one; only that needs root.
set -euo pipefail
packages=(debootstrap docker-registry docker.io iptables openssh-client)
if ! dpkg-query --show "${packages[@]}" >/dev/null 2>&1; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${packages[@]}"
fi
