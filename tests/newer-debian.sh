#!/usr/bin/env bash
# Runs tests with the programs of a newer Debian: a root file system of its own, kept in ~/.cache/clipship.
# Usage: newer-debian.sh SUITE PACKAGES PYTHON [WORD ...]: packages stand between commas, the words are pytest's. Root, on Debian;
# debootstrap takes the address from apt's sources.
set -euo pipefail

suite=$1 packages=$2,libssl3t64,libffi8,libsqlite3-0,libreadline8t64 # the last are for Python
python=$(realpath --no-symlinks "$3")
shift 3
root=${XDG_CACHE_HOME:-$HOME/.cache}/clipship/debian-$suite-$(cksum <<<"$packages" | cut -d ' ' -f 1)

if [[ ! -e $root/complete ]]; then
    command -v debootstrap >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends debootstrap
    # shellcheck disable=SC2016 # apt's own variable
    address=$(apt-get indextargets --format '$(REPO_URI)' | grep -m 1 '/debian/\?$')
    rm -rf "$root"
    mkdir -p "$root"
    debootstrap --variant=minbase --include="$packages" "$suite" "$root" "$address"
    touch "$root/complete"
fi

# The folders that hold Python, its packages and this checkout are seen at their places; Debian's own are the newer ones.
mapfile -t seen < <(
    "$python" -c 'import os, sys; print(sys.prefix, sys.base_prefix, os.getcwd(), os.path.expanduser("~"), sep="\n")' |
        cut -d / -f 2 | grep -vxE 'usr|bin|sbin|lib|lib64|etc|var' | sort -u
)
export root python
# shellcheck disable=SC2016 # the inner shell expands it
exec unshare --mount bash -c '
    set -euo pipefail
    mount --make-rprivate /
    mount --bind "$root" "$root" # unshare wants a mount at /
    touch "$root/etc/hosts"
    mount --bind /etc/hosts "$root/etc/hosts"
    for folder in dev proc sys tmp var/tmp "${@:2:$1}"; do
        mkdir -p "$root/$folder"
        mount --rbind "/$folder" "$root/$folder"
    done
    shift $(($1 + 1))
    here=$PWD
    mkdir -p "$root/.before"
    cd "$root"
    pivot_root . .before # apptainer refuses to run behind a chroot
    export PATH=/usr/sbin:/usr/bin:/sbin:/bin
    cd "$here"
    umount --lazy /.before
    # The second: apptainer would ask for every capability, and root may lack one (in a container, on some virtual machines).
    exec env CLIPSHIP_SANDBOX="$root" APPTAINER_NO_PRIVS=1 "$python" -m pytest "$@"
' newer-debian "${#seen[@]}" "${seen[@]}" "$@"
