#!/usr/bin/env bash
# Pins every requirement anew, with hashes: `make lock`. Options are uv's: `make lock LOCK_ARGS=--upgrade`.
#   requirements*.in -> requirements*.txt   packages that do not depend on the version of torch
#   stacks.toml      -> torch/VERSION.txt   torch, torchvision and the libraries that they pin, for each row
#                                           on which the trainer runs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools"
"$tools/bin/pip" install --disable-pip-version-check --quiet uv

# compile OUTPUT SOURCE...: for the oldest Python on which the trainer runs; pins in OUTPUT stay where they can
compile() {
    local output=$1
    shift
    "$tools/bin/uv" pip compile --quiet --python-version 3.11 --generate-hashes --allow-unsafe --no-header \
        --no-annotate --no-emit-index-url --no-emit-find-links --output-file "$output" "${options[@]}" "$@" \
        >/dev/null
}
options=("$@")

# A lock file's entry begins with the package's name; its hashes are indented.
entries() { # entries (torch|other) FILE
    awk -v want="$1" '
        /^[^ ]/ { torch = $0 ~ /^(torch|torchvision|triton|sympy|mpmath|networkx|cuda-|nvidia-)/ && $0 !~ /^nvidia-ml-py/ }
        (want == "torch") == torch' "$2"
}

value() { sed -n "s/^$1 = \"\(.*\)\".*/\1/p" docker/stacks.toml; }
default=$(value default) oldest=$(value trainer_torch_min)

whole=$tools/whole.txt
cat docker/requirements.txt "docker/torch/$default.txt" >"$whole" 2>/dev/null || true
versions() { # versions TORCH: this torch and its torchvision, as requirements
    awk -v row="torch = \"$1\"" '
        $0 == row { print "torch==" $3; in_row = 1 }
        in_row && /^torchvision/ { print "torchvision==" $3; exit }' docker/stacks.toml | tr -d '"'
}
versions "$default" >"$tools/torch.in"
compile "$whole" docker/requirements.in "$tools/torch.in"
entries other "$whole" >docker/requirements.txt
entries torch "$whole" >"docker/torch/$default.txt"

mapfile -t rows < <(value torch)
for file in docker/torch/*.txt; do # files of removed rows
    [[ " ${rows[*]} " == *" $(basename "$file" .txt) "* ]] || rm "$file"
done
for torch in "${rows[@]}"; do
    printf '%s\n%s\n' "$oldest" "$torch" | sort -CV || continue
    [[ $torch != "$default" ]] || continue
    versions "$torch" >"$tools/torch.in"
    cp "docker/torch/$torch.txt" "$tools/row.txt" 2>/dev/null || rm -f "$tools/row.txt"
    compile "$tools/row.txt" --constraint docker/requirements.txt "$tools/torch.in"
    entries torch "$tools/row.txt" >"docker/torch/$torch.txt"
    comm -23 <(entries other "$tools/row.txt" | grep -o '^[^ ]*==[^ ]*' | sort) \
        <(grep -o '^[^ ]*==[^ ]*' docker/requirements.txt | sort) >"$tools/more"
    if [[ -s $tools/more ]]; then
        echo "lock: torch $torch also needs $(paste -sd ' ' "$tools/more"): add it to docker/requirements.in" >&2
        exit 1
    fi
done

for source in docker/requirements-*.in docs/requirements.in; do
    compile "${source%.in}.txt" "$source"
done
# swanlab wants another release of a package on Python 3.14: with a pin for each Python where they differ.
compile tests/requirements.txt --universal tests/requirements.in
