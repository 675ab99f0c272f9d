#!/usr/bin/env bash
# Installs the Debian packages that the image's tests need, where this machine lacks one; only that needs root.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/../../install-packages.sh" buildah debootstrap docker-registry docker.io iptables openssh-client podman \
    slirp4netns squashfs-tools uidmap
