#!/bin/sh
# Installs libfabric and aws-ofi-nccl with AWS's installer, in its form for containers: aws-ofi-nccl.sh URL SHA256.
set -eu
export DEBIAN_FRONTEND=noninteractive
work=$(mktemp -d)
python3 /docker/fetch.py "$1" "$2" "$work/installer.tar.gz"
tar -xzf "$work/installer.tar.gz" -C "$work"
apt-get update -qq
# It implies --yes, --skip-kmod, --skip-limit-conf and --no-verify; the image has an MPI already.
(cd "$work/aws-efa-installer" && ./efa_installer.sh --build-ngc --skip-mpi)
rm -rf "$work"
printf '%s\n' /opt/amazon/efa/lib /opt/amazon/ofi-nccl/lib >/etc/ld.so.conf.d/aws-efa.conf
ldconfig
# NCCL goes on over TCP where it cannot open the plugin.
library=$(ldconfig -p | sed -n 's/.*libnccl-net-ofi\.so .*=> //p' | head -n 1)
[ -n "$library" ] || { echo 'aws-ofi-nccl: the installer left no libnccl-net-ofi.so'; exit 1; }
missing=$(ldd "$library" | sed -n 's/ => not found//p')
[ -z "$missing" ] || { echo "aws-ofi-nccl: $library lacks $missing"; exit 1; }
