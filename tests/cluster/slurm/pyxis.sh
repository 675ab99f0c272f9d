#!/usr/bin/env bash
# Builds pyxis and enroot from checkouts of theirs into PREFIX, which `Cluster(pyxis=PREFIX)` gives to its nodes. Debian, as root.
# Usage: PYXIS_SOURCE=FOLDER ENROOT_SOURCE=FOLDER pyxis.sh PREFIX
set -euo pipefail

prefix=$(realpath --canonicalize-missing "${1:?which PREFIX?}")
: "${PYXIS_SOURCE:?names a checkout of github.com/NVIDIA/pyxis}" "${ENROOT_SOURCE:?names a checkout of github.com/NVIDIA/enroot}"
# What enroot and its hooks call, and what builds the two.
"$(dirname "${BASH_SOURCE[0]}")/../../install-packages.sh" \
    debootstrap squashfs-tools parallel jq zstd curl bsdextrautils fuse-overlayfs libslurm-dev gcc libc6-dev make musl-tools

build=$(mktemp -d /var/tmp/pyxis-XXXXXX)
trap 'rm -rf "$build"' EXIT

cp --archive "$ENROOT_SOURCE" "$build/enroot"
cd "$build/enroot"
# Debian's musl and headers take the place of those that enroot builds; bundles, for which makeself would be, are not made here.
mkdir -p deps/dist/{makeself,musl}/bin deps/dist/linux/include
touch deps/dist/makeself/bin/enroot-makeself
cat >deps/dist/musl/bin/musl-gcc <<'GCC'
#!/bin/bash
words=()
for word; do [[ $word == *-pie ]] || words+=("$word"); done
exec musl-gcc -static "${words[@]}"
GCC
chmod +x deps/dist/musl/bin/musl-gcc
ln -s /usr/include/{linux,asm-generic} "/usr/include/$(gcc -print-multiarch)/asm" deps/dist/linux/include/
for other in makeself linux-headers musl; do
    mkdir -p "deps/$other"
    touch "deps/$other/.stamp"
done
make --silent prefix="$prefix" install
install -m 755 conf/hooks/extra/50-slurm-pmi.sh "$prefix/etc/enroot/hooks.d/" # Horovod by srun wants it
cat >"$prefix/etc/enroot/enroot.conf.d/nodes.conf" <<'CONF'
ENROOT_RUNTIME_PATH /tmp/enroot-$(id -u)/run
ENROOT_CONFIG_PATH /tmp/enroot-$(id -u)/config
ENROOT_CACHE_PATH /tmp/enroot-$(id -u)/cache
ENROOT_DATA_PATH /tmp/enroot-$(id -u)/data
ENROOT_TEMP_PATH /tmp
CONF

cp --archive "$PYXIS_SOURCE" "$build/pyxis"
cd "$build/pyxis"
make --silent prefix="$prefix" install
