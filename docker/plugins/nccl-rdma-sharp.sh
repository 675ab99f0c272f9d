#!/bin/sh
# Looks for the plugin that NVIDIA's HPC-X brings: it is in a base, and not installed here.
set -eu
for folder in /opt/hpcx/nccl_rdma_sharp_plugin/lib $(echo "${LD_LIBRARY_PATH:-}" | tr : ' '); do
    [ ! -e "$folder/libnccl-net.so" ] || { echo "nccl-rdma-sharp: $folder/libnccl-net.so"; exit 0; }
done
echo 'base: it has no nccl-rdma-sharp plugin (libnccl-net.so of HPC-X), which image.plugins names: take another base'
exit 1
