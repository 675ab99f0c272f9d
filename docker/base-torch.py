"""Looks at the torch of a base image before Horovod is built against it.

It does so again under the packages that the trainer brings.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - it runs on whatever the base has
    sys.exit(f"base: its python3 is {sys.version.split()[0]}, the trainer needs 3.11")
try:
    import torch
    import torchvision
except ModuleNotFoundError as problem:
    sys.exit(
        f"base: its python3 has no {problem.name}: leave stack.torch to a release of `clipship stacks`, "
        "or install both there"
    )
if torch.version.cuda is None:
    sys.exit(f"base: its torch {torch.__version__} is built without CUDA")
try:
    torch.zeros(1).numpy()
except RuntimeError:
    sys.exit(
        f"base: its torch {torch.__version__} is built for numpy 1, the trainer needs numpy 2: "
        "take a newer base"
    )
print(f"base: torch {torch.__version__}, torchvision {torchvision.__version__}, CUDA {torch.version.cuda}")
