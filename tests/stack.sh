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

pins=docker/torch/$row.txt
[[ -e $pins ]] || { echo "the trainer does not run on torch $row; \`clipship stacks explain $row\` says why" >&2; exit 2; }
python=$(command -v "${PYTHON:-python3.11}") || { echo "there is no ${PYTHON:-python3.11} here: make test-torch STACK=$row PYTHON=/path/to/python3" >&2; exit 2; }
environment=.stacks/$row
installed=$environment/installed-$(cat "$pins" docker/requirements*.txt tests/requirements.txt | sha256sum | head -c 16)
if [[ ! -e $installed ]]; then
    "$python" -m venv --clear "$environment"
    pip=("$environment/bin/python" -m pip install --disable-pip-version-check --quiet)
    "${pip[@]}" --require-hashes --requirement "$pins" --requirement docker/requirements.txt --requirement docker/requirements-mpi.txt \
        --requirement docker/requirements-build.txt --requirement docker/requirements-launch.txt --requirement docker/requirements-text.txt --requirement tests/requirements.txt
    "${pip[@]}" --no-deps --no-build-isolation --editable .
    wheel=$(docker/build-horovod.sh --python "$environment/bin/python" --cache "${XDG_CACHE_HOME:-$HOME/.cache}/clipship/wheels" --ops cpu)
    "${pip[@]}" --no-deps "$wheel"
    touch "$installed"
fi
exec env PATH="$PWD/$environment/bin:$PATH" "$environment/bin/python" -m pytest --ignore=tests/cluster --ignore=tests/lint --ignore-glob='*/test_ends_*' \
    -m 'not gpu and not full' "$@"
