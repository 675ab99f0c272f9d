#!/usr/bin/env bash
# Pins every requirement anew, with hashes: `make lock`. Options are uv's: `make lock LOCK_ARGS=--upgrade`.
#   requirements*.in -> requirements*.txt   what goes with any torch
#   stacks.toml      -> torch/VERSION.txt   torch, torchvision and the libraries that they pin, for each row that the trainer runs on
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools"
"$tools/bin/pip" install --disable-pip-version-check --quiet uv

compile() { # compile OUTPUT SOURCE...: for the oldest Python that the trainer runs on; what OUTPUT has pinned stays where it can
    local output=$1
    shift
    "$tools/bin/uv" pip compile --quiet --python-version 3.11 --generate-hashes --allow-unsafe --no-header --no-annotate \
        --no-emit-index-url --no-emit-find-links --output-file "$output" "${options[@]}" "$@" >/dev/null
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
versions() { # versions TORCH: it and its torchvision, as requirements
    awk -v row="torch = \"$1\"" '$0 == row { print "torch==" $3; found = 1 } found && /^torchvision/ { print "torchvision==" $3; exit }' \
        docker/stacks.toml | tr -d '"'
}
versions "$default" >"$tools/torch.in"
compile "$whole" docker/requirements.in "$tools/torch.in"
entries other "$whole" >docker/requirements.txt
entries torch "$whole" >"docker/torch/$default.txt"

mapfile -t rows < <(value torch)
for file in docker/torch/*.txt; do # of rows that are gone
    [[ " ${rows[*]} " == *" $(basename "$file" .txt) "* ]] || rm "$file"
done
for torch in "${rows[@]}"; do
    printf '%s\n%s\n' "$oldest" "$torch" | sort -CV || continue
    [[ $torch != "$default" ]] || continue
    versions "$torch" >"$tools/torch.in"
    cp "docker/torch/$torch.txt" "$tools/row.txt" 2>/dev/null || rm -f "$tools/row.txt"
    compile "$tools/row.txt" --constraint docker/requirements.txt "$tools/torch.in"
    entries torch "$tools/row.txt" >"docker/torch/$torch.txt"
    comm -23 <(entries other "$tools/row.txt" | grep -o '^[^ ]*==[^ ]*' | sort) <(grep -o '^[^ ]*==[^ ]*' docker/requirements.txt | sort) >"$tools/more"
    [[ ! -s $tools/more ]] || { echo "lock: torch $torch also needs $(paste -sd ' ' "$tools/more"): name it in docker/requirements.in" >&2; exit 1; }
done

for source in docker/requirements-*.in docs/requirements.in tests/requirements.in; do
    compile "${source%.in}.txt" "$source"
done
