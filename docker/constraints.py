"""Prints constraints for pip, so that the packages of a job change no installed package.

They also exclude a second copy of a package that an image has exactly once.
"""

import re
from importlib.metadata import distributions

# The NCCL wheels of all CUDA versions install the library at one path. Horovod is built in another stage.
ONCE = ("horovod", "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")

found = {re.sub(r"[-_.]+", "-", package.name).lower(): package.version for package in distributions()}
for name in sorted(found):
    print(f"{name}=={found[name]}")
for name in ONCE:
    if name not in found:
        print(f"{name}<0")
