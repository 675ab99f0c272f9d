#!/bin/sh
# Installs Debian's own CUDA toolkit (non-free) and lays it out as NVIDIA's: one folder with bin, include and lib64.
set -eu
export DEBIAN_FRONTEND=noninteractive
find /etc/apt \( -name '*.list' -o -name '*.sources' \) -exec \
    sed -i -e '/^deb /s/ main\b/ main contrib non-free/' -e '/^Components:/s/ main\b/ main contrib non-free/' {} +
apt-get update -qq
apt-get install -qq --no-install-recommends nvidia-cuda-toolkit
# Half of the layer: the packages that are unpacked by now, and static libraries that neither Horovod nor nvcc links.
apt-get clean
rm -f /usr/lib/*/libcublas*.a /usr/lib/*/libcufft*.a /usr/lib/*/libcurand*.a /usr/lib/*/libcusolver*.a /usr/lib/*/libcusparse*.a /usr/lib/*/libnpp*.a

home=/opt/cuda
mkdir -p $home/include
ln -s /usr/lib/nvidia-cuda-toolkit/bin $home/bin
ln -s "/usr/lib/$(uname -m)-linux-gnu" $home/lib64
# Its own headers alone: with all of /usr/include the compiler would search the system's in the wrong order.
dpkg-query --show --showformat '${Package}\n' nvidia-cuda-toolkit 'nvidia-*-dev' 'libcu*-dev' libthrust-dev 2>/dev/null |
    xargs dpkg-query --listfiles | sed -n 's|^\(/usr/include/[^/]*\)$|\1|p' | sort -u | xargs ln -s -t $home/include
