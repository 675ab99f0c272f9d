#!/usr/bin/env bash
# Prints the first Python that can make an environment: the pins were made for 3.11, and newer ones serve as well.
for python in python3.11 python3.12 python3.13 python3.14 python3; do
    if "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "$python"
        break
    fi
done
