#!/usr/bin/env bash
# Makes an environment and installs pinned requirements: tools/venv.sh PYTHON FOLDER MARK REQUIREMENTS...
# MARK is a file FOLDER/pinned-*, which says that this was done to its end.
set -euo pipefail
python=$1 venv=$2 mark=$3
shift 3

if ! grep -qs "$(pwd -P)/$venv/" "$venv/bin/pip"; then # none, or one that was copied from another folder
    if [[ -z $python ]]; then
        echo 'No Python >= 3.11 with the module venv was found: install python3.11 and python3.11-venv,' \
            'or name one with make PYTHON=/path/to/python3' >&2
        exit 2
    fi
    echo "making $venv with $python"
    "$python" -m venv --clear "$venv"
fi
install=(pip install --require-hashes "${@/#/--requirement=}")
export PIP_DISABLE_PIP_VERSION_CHECK=1
pip=("$venv/bin/python" -m)
"${pip[@]}" pip install --quiet --require-hashes --requirement=docker/requirements-uv.txt
if [[ $("${pip[@]}" pip config list) == *index* ]] ||
    ! "$venv/bin/uv" "${install[@]}" --python "$venv/bin/python" --no-cache --compile-bytecode; then
    echo 'pip installs them, since it is told of an index of its own or uv cannot: some minutes'
    "${pip[@]}" "${install[@]}"
fi
rm -f "$venv"/pinned-*
touch "$mark"
