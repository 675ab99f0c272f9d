#!/usr/bin/env bash
# Has the programs of a target's tests open what they open, where nothing but that target's own Debian packages is installed: what a
# machine has by accident is not there. Each target gets a copy of a minimal Debian of this machine's release.
# Usage: alone.sh [ci|faults|pyxis|slurm|image|kubernetes ...]; where none is given, the last three: ci is a browser and faults a
# compiler, minutes of unpacking, and .ci/run installs these lists anyway; pyxis is built, from PYXIS_SOURCE and ENROOT_SOURCE where
# these are set. Debian, as root; the minimal Debian and the packages' files are kept in ~/.cache/clipship.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cache=${XDG_CACHE_HOME:-$HOME/.cache}/clipship
suite=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
base=$cache/minimal-$suite
root=$cache/alone

main() {
    minimal_debian
    trap 'rm -rf --one-file-system "$root"' EXIT
    (($#)) || set -- slurm image kubernetes
    for target in "$@"; do
        alone "$target"
    done
}

minimal_debian() { # Python is what every target begins with; certificates are for a mirror behind https
    [[ ! -e $base/complete ]] || return 0
    tests/install-packages.sh debootstrap
    local address
    # shellcheck disable=SC2016 # apt's own variable
    address=$(apt-get indextargets --format '$(REPO_URI)' | grep -m 1 '/debian/\?$')
    rm -rf --one-file-system "$base"
    mkdir -p "$base" "$cache/packages-$suite/partial"
    debootstrap --variant=minbase --include=python3,ca-certificates "$suite" "$base" "$address"
    mkdir "$base/checkout" "$base/.before"
    touch "$base/complete"
}

alone() { # TARGET
    local target=$1 packages=tests/cluster/$1/packages.sh start=$SECONDS source
    case $target in
        ci) packages=tests/packages.sh ;;
        faults) packages=tests/integration/packages.sh ;;
        pyxis) packages=tests/cluster/slurm/packages.sh ;;
    esac
    rm -rf --one-file-system "$root"
    cp --archive --reflink=auto "$base" "$root"
    echo "127.0.0.1 localhost $(hostname)" >"$root/etc/hosts"
    echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/alone" # the copy need not outlive a loss of power
    for source in PYXIS_SOURCE ENROOT_SOURCE; do
        [[ $target != pyxis || -z ${!source:-} ]] || cp --archive "${!source}" "$root/$source"
    done
    inside "$packages"
    # getaddrinfo as Slurm calls it knows no address where there is only a loopback interface; pyxis.sh installs what it builds with.
    if [[ $target == slurm || $target == pyxis ]]; then
        inside tests/alone-inside.sh "$target"
    else # docker's bridge and rules, and ports of ssh, are not this machine's
        inside --net tests/alone-inside.sh "$target"
    fi
    echo "== the packages of $target are enough: $((SECONDS - start)) s"
}

inside() { # [--net] COMMAND ...: in the copy, with mounts and processes of its own; --net: and a network of its own
    local spaces=(--mount --pid --fork --kill-child --uts --ipc)
    [[ $1 != --net ]] || { spaces+=(--net) && shift; }
    # shellcheck disable=SC2016 # the inner shell expands it
    unshare "${spaces[@]}" bash -c '
        set -euo pipefail
        root=$1 debs=$2
        shift 2
        mount --make-rprivate /
        mount --bind "$root" "$root" # pivot_root wants a mount
        mount -t proc proc "$root/proc"
        mount --rbind /sys "$root/sys"
        mount --rbind /dev "$root/dev"
        mount -t tmpfs tmpfs "$root/dev/shm"
        mount -t tmpfs tmpfs "$root/run"
        mount --bind "$debs" "$root/var/cache/apt/archives"
        mount --bind "$PWD" "$root/checkout"
        mount -o remount,bind,ro "$root/checkout"
        cd "$root"
        pivot_root . .before # Slurm of the tests makes / private, which a chroot has not
        umount --lazy /.before
        cd /checkout
        exec env --ignore-environment PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 \
            PYXIS_SOURCE="${PYXIS_SOURCE:+/PYXIS_SOURCE}" ENROOT_SOURCE="${ENROOT_SOURCE:+/ENROOT_SOURCE}" "$@"
    ' alone "$root" "$cache/packages-$suite" "$@"
}

main "$@"
