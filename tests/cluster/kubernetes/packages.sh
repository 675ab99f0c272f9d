#!/usr/bin/env bash
# Installs Debian's kubectl where this machine has none; only that needs root. The cluster is whatever KUBECONFIG names.
set -euo pipefail

command -v kubectl >/dev/null || exec "$(dirname "${BASH_SOURCE[0]}")/../../install-packages.sh" kubernetes-client
