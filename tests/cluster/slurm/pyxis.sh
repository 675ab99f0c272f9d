#!/usr/bin/env bash
# Builds pyxis and enroot into PREFIX, which `Cluster(pyxis=PREFIX)` gives to its nodes. Debian, as root. Does nothing if PREFIX has them.
# Usage: pyxis.sh PREFIX. The sources are the commits below; PYXIS_SOURCE and ENROOT_SOURCE name checkouts where no forge can be reached.
set -euo pipefail

pyxis=107519944221822ea1dace4db8e7234b2eaa4cd5 # 0.24.0
enroot=8ea147d337da60cb1c557140f3a85cdf0d620968 # 4.1.2, and fixes after it
forge=https://github.com/NVIDIA
prefix=$(realpath --canonicalize-missing "${1:?which PREFIX?}")
built=$prefix/built-$(cat "${BASH_SOURCE[0]}" <(printf '%s\n' "${PYXIS_SOURCE:-}" "${ENROOT_SOURCE:-}") | sha256sum | cut -c 1-16)
[[ ! -e $built ]] || exit 0

source_of() { # NAME COMMIT CHECKOUT FOLDER
    if [[ -n $3 ]]; then
        cp --archive "$3" "$4"
        return
    fi
    git init --quiet "$4"
    git -C "$4" fetch --quiet --depth 1 "$forge/$1" "$2" ||
        { echo "$forge/$1 cannot be reached: name a checkout of it with ${1^^}_SOURCE" >&2; exit 1; }
    git -C "$4" checkout --quiet FETCH_HEAD
}

# What enroot and its hooks call, and what builds the two.
"$(dirname "${BASH_SOURCE[0]}")/../../install-packages.sh" \
    debootstrap squashfs-tools parallel jq zstd curl bsdextrautils fuse-overlayfs libslurm-dev gcc libc6-dev make musl-tools git

build=$(mktemp -d /var/tmp/pyxis-XXXXXX)
trap 'rm -rf "$build"' EXIT

source_of enroot "$enroot" "${ENROOT_SOURCE:-}" "$build/enroot"
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
mkdir "$build/bin"
ln -s /bin/true "$build/bin/git" # it would fetch what enroot builds
PATH=$build/bin:$PATH make --silent prefix="$prefix" install
install -m 755 conf/hooks/extra/50-slurm-pmi.sh "$prefix/etc/enroot/hooks.d/" # Horovod by srun wants it
cat >"$prefix/etc/enroot/enroot.conf.d/nodes.conf" <<'CONF'
ENROOT_RUNTIME_PATH /tmp/enroot-$(id -u)/run
ENROOT_CONFIG_PATH /tmp/enroot-$(id -u)/config
ENROOT_CACHE_PATH /tmp/enroot-$(id -u)/cache
ENROOT_DATA_PATH /tmp/enroot-$(id -u)/data
ENROOT_TEMP_PATH /tmp
CONF

source_of pyxis "$pyxis" "${PYXIS_SOURCE:-}" "$build/pyxis"
cd "$build/pyxis"
make --silent prefix="$prefix" install
rm -f "$prefix"/built-*
touch "$built"
