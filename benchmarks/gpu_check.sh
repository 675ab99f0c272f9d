#!/usr/bin/env bash
# bash check [SECONDS [OPTION...]]: measures this project on the GPUs of this machine. Results: $OUT, or gpu-results.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
site=$here/site
if [[ ! -e $site ]]; then
    rm -rf "$site.part"
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
        --target "$site.part" "$here"/wheels/*.whl
    mv "$site.part" "$site"
fi
out=$(realpath -m "${OUT:-gpu-results}")
cd "$here/clipship"
export PYTHONPATH=$site:$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m benchmarks.gpu_check --seconds "${1:-3600}" --out "$out" "${@:2}"
