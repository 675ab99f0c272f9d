#!/usr/bin/env bash
# Runs the tests of models against a checkout of open_clip: tests/open-clip.sh PYTHON CHECKOUT [pytest's options]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$1 checkout=$2
shift 2

if [[ ! -d $checkout/src/open_clip ]]; then
    echo "OPEN_CLIP='$checkout' is no checkout of open_clip: it has no src/open_clip" >&2
    exit 2
fi
modules=(
    begin_with compile data_tokens export from_open_clip fused_block import_weights kernels loading lora naflex
    optimizer step teacher text_towers
)
tests=("${modules[@]/#/tests/unit/test_}")
PYTHONPATH=$(realpath "$checkout/src") exec "$python" -m pytest "${tests[@]/%/.py}" \
    tests/integration/test_trajectory.py -m 'not full' "$@"
