#!/bin/sh
# Lays Debian's CUDA toolkit, which its packages spread over /usr, out as NVIDIA's own: one folder with bin, include and lib64.
set -eu
home=/opt/cuda
mkdir -p $home/include
ln -s /usr/lib/nvidia-cuda-toolkit/bin $home/bin
ln -s "/usr/lib/$(uname -m)-linux-gnu" $home/lib64
# Its own headers alone: with all of /usr/include the compiler would search the system's in the wrong order.
dpkg-query --show --showformat '${Package}\n' nvidia-cuda-toolkit 'nvidia-*-dev' 'libcu*-dev' libthrust-dev 2>/dev/null |
    xargs dpkg-query --listfiles | sed -n 's|^\(/usr/include/[^/]*\)$|\1|p' | sort -u | xargs ln -s -t $home/include
