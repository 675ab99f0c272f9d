"""Prints, for pip, what the packages that a job adds cannot change: each release that is here, and none of what may come only once."""

import re
from importlib.metadata import distributions

# The wheels of NCCL for each CUDA lay the library at one path. Horovod is built in another stage.
ONCE = ("horovod", "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")

found = {re.sub(r"[-_.]+", "-", package.name).lower(): package.version for package in distributions()}
for name in sorted(found):
    print(f"{name}=={found[name]}")
for name in ONCE:
    if name not in found:
        print(f"{name}<0")
