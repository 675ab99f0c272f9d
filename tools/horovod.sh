#!/usr/bin/env bash
# Builds Horovod for an environment's torch, or takes it from the cache: tools/horovod.sh FOLDER CACHE [OPTIONS]
# FOLDER/horovod-wheel names the wheel that is installed, FOLDER/horovod-missing says why there is none.
set -euo pipefail
venv=$1 cache=$2
shift 2
installed=$venv/horovod-wheel missing=$venv/horovod-missing

status=0
wheel=$(docker/build-horovod.sh --python "$venv/bin/python" --cache "$cache" "$@") || status=$?
if ((status == 3)); then
    echo "Horovod cannot be built on this machine; \`make horovod\` says what it lacks" | tee "$missing"
elif ((status)); then
    exit "$status"
elif [[ ! -e $installed || $(<"$installed") != "$wheel" || ! -x $venv/bin/horovodrun ]]; then
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps --force-reinstall "$wheel"
    rm -f "$missing"
    echo "$wheel" >"$installed"
fi
