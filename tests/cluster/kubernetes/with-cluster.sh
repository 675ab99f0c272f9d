#!/usr/bin/env bash
# Runs a Python on the cluster that KUBECONFIG names; where it names none, on one of tools/kube with the tests' images in it, which goes after.
# Usage: with-cluster.sh PYTHON [WORD ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

cluster=tools/kube/cluster
if [[ -z ${KUBECONFIG:-} ]]; then
    if "$cluster" is-up; then
        echo "a cluster is up already: KUBECONFIG=\$($cluster up) runs the tests on it, if it has their images; \`$cluster down\` ends it" >&2
        exit 2
    fi
    trap '"$cluster" down --all' EXIT
    KUBECONFIG=$("$cluster" up)
    export KUBECONFIG
    "$1" -m tests.cluster.kubernetes.images "$cluster" load
fi
"$@"
