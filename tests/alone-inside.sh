#!/usr/bin/env bash
# Within the minimal Debian of alone.sh: programs of one target's tests, each made to open what it opens in a test.
# Usage: alone-inside.sh TARGET
set -euo pipefail
PATH=$PATH:/usr/sbin
# What `ip link set lo up` does, for not every target has `ip`: SIOCSIFFLAGS, IFF_UP | IFF_RUNNING.
python3 -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 0x41))'
scratch=$(mktemp -d /var/tmp/alone-XXXXXX)

ci() {
    chromium --headless --no-sandbox --disable-gpu --user-data-dir="$scratch/chromium" --dump-dom 'data:text/html,<p>drawn</p>' 2>"$scratch/said" |
        grep drawn || { cat "$scratch/said" >&2 && return 1; }
    fish --version
    gcc -fPIC -shared tools/nullgpu/src/kept.c -o "$scratch/kept.so"
    g++ --version
    shellcheck --version
}

faults() {
    mpicxx -show
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe -n 2 true
    ip netns add clipship-alone
    ip netns exec clipship-alone unshare -m -u true
    ssh_to_itself
}

ssh_to_itself() {
    ssh-keygen -q -N '' -t ed25519 -f "$scratch/key"
    mkdir -p /run/sshd
    "$(command -v sshd)" -p 2022 -h "$scratch/key" -o "AuthorizedKeysFile=$scratch/key.pub" -o StrictModes=no
    ssh -p 2022 -i "$scratch/key" -o BatchMode=yes -o StrictHostKeyChecking=no 127.0.0.1 true
}

slurm() {
    python3 -m tests.cluster.slurm.alone
}

pyxis() {
    tests/cluster/slurm/pyxis.sh "$scratch/pyxis"
    ldd "$scratch/pyxis/lib/slurm/spank_pyxis.so"
    mkdir "$scratch/system"
    ldd /usr/bin/true | grep -o '/[^ ]*' | tar --dereference --files-from=- -c /usr/bin/true /bin/sh | tar -x -C "$scratch/system"
    mksquashfs "$scratch/system" "$scratch/system.sqsh" -quiet -no-progress
    export PATH=$scratch/pyxis/bin:$PATH
    enroot create --name system "$scratch/system.sqsh"
    enroot start --rw system /usr/bin/true
}

image() {
    ssh -V
    debootstrap --print-debs --help >/dev/null
    docker-registry --version
    dockerd >"$scratch/dockerd.log" 2>&1 &
    for ((try = 0; try < 60; try++)); do
        docker info >"$scratch/info" 2>&1 && break
        sleep 1
    done
    ldd /usr/bin/true | grep -o '/[^ ]*' | tar --dereference --files-from=- -c /usr/bin/true | docker import - of-this-system ||
        { tail "$scratch/dockerd.log" >&2 && return 1; }
    docker run --rm --network=bridge of-this-system /usr/bin/true
    podman --version
    buildah --version
    command -v newuidmap slirp4netns
}

kubernetes() {
    kubectl version --client
    containerd --version
    runc --version
    ls /usr/lib/cni/bridge /usr/lib/cni/host-local
    iptables --version
    ip link add onenode0 type bridge
    sysctl -n net.ipv4.ip_forward
    openssl version
    gcc -static -o "$scratch/pause" tools/kube/pause.c
}

"$1"
