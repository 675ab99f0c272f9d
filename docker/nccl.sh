#!/bin/sh
# Puts a newer NCCL in the place of the one that torch's wheel pins: nccl.sh ENVIRONMENT REQUIREMENTS PACKAGE VERSION.
set -eu
"$1/bin/pip" install --quiet --no-deps --require-hashes --requirement "$2"
# Torch must not ask for its old one: pip would bring it back with a package of the job that needs torch.
sed -i "s/^\(Requires-Dist: $3\)==[0-9.]*/\1==$4/" "$1"/lib/python3*/site-packages/torch-*.dist-info/METADATA
grep -q "^Requires-Dist: $3==$4" "$1"/lib/python3*/site-packages/torch-*.dist-info/METADATA ||
    { echo "nccl.sh: torch does not ask for $3"; exit 1; }
