#!/usr/bin/env bash
# Runs the trainer's tests on another row of docker/stacks.toml, in an environment of its own: tests/stack.sh 2.6.0 [pytest's options]
# The environments lie in .stacks/, 6 GB each; a second run finds its environment there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

row=${1:-}
known=$(sed -n 's/^torch = "\(.*\)"/\1/p' docker/stacks.toml)
if ! grep -Fqx -- "${row:-none}" <<<"$known"; then
    echo "which stack? make test-torch STACK=... with one of ${known//$'\n'/, }" >&2
    exit 2
fi
shift

vision=$(awk -v row="torch = \"$row\"" '$0 == row { found = 1 } found && /^torchvision/ { gsub(/[^0-9.]/, ""); print; exit }' docker/stacks.toml)
python=$(command -v "${PYTHON:-python3.11}")
environment=.stacks/$row
if [[ ! -e $environment/done ]]; then
    "$python" -m venv --clear "$environment"
    pip=("$environment/bin/python" -m pip install --disable-pip-version-check --quiet)
    # The row's torch and what it pins itself; everything else as it is pinned.
    sed -n 's/^\([A-Za-z0-9._-]*==[^ ]*\).*/\1/p' docker/requirements*.txt tests/requirements.txt |
        grep -vE '^(torch|torchvision|triton|sympy|nvidia-|cuda-)' | sort -u >"$environment/rest.txt"
    "${pip[@]}" "torch==$row" "torchvision==$vision" --requirement "$environment/rest.txt"
    "${pip[@]}" --no-deps --no-build-isolation --editable .
    wheel=$(docker/build-horovod.sh --python "$environment/bin/python" --cache "${XDG_CACHE_HOME:-$HOME/.cache}/clipship/wheels" --ops cpu)
    "${pip[@]}" --no-deps "$wheel"
    touch "$environment/done"
fi
exec env PATH="$PWD/$environment/bin:$PATH" "$environment/bin/python" -m pytest -m 'not gpu and not full' \
    tests/unit tests/integration "$@"
