"""open_clip_train on a model of a config file: `python goodput_open_clip.py CONFIG`.

The variable OPEN_CLIP_ARGUMENTS has its arguments, quoted as for a shell.
Runs in an environment of its own, so it imports nothing of this project.
"""

import os
import shlex
import sys
from pathlib import Path

import open_clip
import torch
from open_clip_train.main import main


class OnCpu(torch.nn.parallel.DistributedDataParallel):
    """Leaves out `device_ids`, which open_clip_train also gives for a CPU, where torch refuses them."""

    def __init__(self, module: torch.nn.Module, device_ids: object = None, **settings: object) -> None:
        super().__init__(module, **settings)  # type: ignore[arg-type]


def run(config: str) -> None:
    arguments = shlex.split(os.environ["OPEN_CLIP_ARGUMENTS"])
    torch.nn.parallel.DistributedDataParallel = OnCpu  # type: ignore[assignment,misc]
    open_clip.add_model_config(config)
    main([*arguments, "--model", Path(config).stem])
    if os.environ.get("RANK") == "0":
        epochs = arguments[arguments.index("--epochs") + 1]
        print(f"goodput: all {epochs} epochs are done", flush=True)


if __name__ == "__main__":
    run(sys.argv[1])
