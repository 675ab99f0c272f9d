#!/usr/bin/env bash
# Installs kubectl, and where KUBECONFIG names no cluster also what tools/kube starts one with, each where this machine has none; only that
# needs root.
set -euo pipefail
PATH=$PATH:/usr/sbin:/usr/lib/cni

needs=(kubectl:kubernetes-client)
[[ -n ${KUBECONFIG:-} ]] || needs+=(containerd:containerd gcc:gcc host-local:containernetworking-plugins ip:iproute2 iptables:iptables
    openssl:openssl runc:runc sysctl:procps)
packages=()
for need in "${needs[@]}"; do
    [[ -n $(command -v "${need%:*}") ]] || packages+=("${need#*:}")
done
[[ -n ${KUBECONFIG:-} || -e /usr/include/stdio.h ]] || packages+=(libc6-dev) # what pods begin with is compiled
exec "$(dirname "${BASH_SOURCE[0]}")/../../install-packages.sh" "${packages[@]}"
