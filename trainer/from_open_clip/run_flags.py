"""Translates flags about checkpoints, logs and ranks."""

from trainer.config.stores import STORES, store_of
from trainer.from_open_clip.line import Line
from trainer.from_open_clip.translation import Flag, Translation

_MOST_GPUS = 8
"""GPUs that a usual node has at most; more are taken to be on several nodes."""


def save_frequency(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the steps between checkpoints, where the epoch's are known."""
    every = line[flag.name]
    if every > 0 and line.epoch_steps:
        result.set("checkpoint.every_steps", every * line.epoch_steps, f"--save-frequency {every}")
    elif every > 0 and flag.name in line.named:
        result.dropped[flag.name] = (
            "without --train-num-samples the steps of an epoch are not known: set checkpoint.every_steps, or "
            "keep one every 30 minutes (checkpoint.every_minutes)"
        )


def remote_sync(flag: Flag, line: Line, result: Translation) -> None:
    """Names the place of the copies, if it is one that can be written."""
    to = line[flag.name]
    if to and "://" in to and store_of(to) is None:
        known = ", ".join(row.addresses for row in STORES)
        result.refused[flag.name] = f"not supported yet: copies go to folders and to {known}"
    elif to:
        result.set("checkpoint.copy_to", to)


def resume(flag: Flag, line: Line, result: Translation) -> None:
    """Names the checkpoint, or the newest one."""
    path = line[flag.name]
    if path is None:
        return
    if "://" in path:
        result.refused[flag.name] = "not supported yet: a checkpoint behind a URL; copy it to a file"
    elif path == "latest":
        result.set("checkpoint.resume", "auto", "the newest of the run folder")
    else:
        result.set("checkpoint.resume", path)


def run_name(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the name, which a run needs here in order to be resumed."""
    made = line["--model"].replace("/", "-").replace(":", "-")
    note = "" if line[flag.name] else "open_clip_train would take the date; a run resumes by its name"
    result.set("name", line[flag.name] or made, note)


def logs(flag: Flag, line: Line, result: Translation) -> None:
    """Names the folder of runs; there is always one."""
    if line[flag.name].lower() in ("", "none"):
        result.dropped[flag.name] = "a run always has a folder: the supervisors and a resumed start read it"
    elif "://" in line[flag.name]:
        result.refused[flag.name] = (
            "not supported yet: a run folder behind an address; --remote-sync copies checkpoints there"
        )
    else:
        result.set("logging.runs", line[flag.name])


def report_to(flag: Flag, line: Line, result: Translation) -> None:
    """Turns the writers of metrics on and off."""
    result.set("logging.tensorboard", "tensorboard" in line.reports, named=False)
    if "wandb" in line.reports:
        result.set("logging.wandb", "online")
    if "trackio" in line.reports:
        result.notes.append(f"{flag.name}: trackio gets nothing; logging.tensorboard and logging.wandb do")


def wandb_project(flag: Flag, line: Line, result: Translation) -> None:
    """Names the project, if W&B is used."""
    if "wandb" in line.reports:
        result.set("logging.wandb_project", line[flag.name])


def device(flag: Flag, line: Line, result: Translation) -> None:
    """Takes cuda, with a rank for each GPU, and cpu."""
    kind, _, index = line[flag.name].partition(":")
    if kind in ("cpu", "cuda") and line.gpus > 1:
        _spread(line, result)
    if kind == "cpu":
        result.set("resources.device", "cpu")
    elif kind != "cuda":
        result.refused[flag.name] = f"not supported yet: {kind}; ranks compute on NVIDIA GPUs or CPUs"
    elif index:
        result.dropped[flag.name] = (
            "a rank takes the GPU of its number; CUDA_VISIBLE_DEVICES chooses among them"
        )


def _spread(line: Line, result: Translation) -> None:
    """Says how many ranks each node has, if the command line says it or all fit on one node."""
    each = line.gpus // line.nodes
    if each <= _MOST_GPUS:
        result.set("resources.nodes", line.nodes, named=False)
        result.set("resources.gpus_per_node", each, "one rank for each")
    else:
        result.notes.append(
            f"[resources] lacks nodes and gpus_per_node, whose product is {line.gpus}: the command line does "
            "not say it, and clusters ask for it"
        )


def dist_backend(flag: Flag, line: Line, result: Translation) -> None:
    """Takes nccl and gloo."""
    if line[flag.name] in ("nccl", "gloo"):
        result.set("comm.torch.device_backend", line[flag.name])
    elif line[flag.name] is not None:
        result.refused[flag.name] = f"not supported yet: {line[flag.name]}; ranks communicate by NCCL or Gloo"


def static_graph(flag: Flag, line: Line, result: Translation) -> None:
    """Sets the promise; accumulation excludes it here."""
    if line[flag.name] and line["--accum-freq"] > 1:
        result.refused[flag.name] = "it excludes accumulation here: take a smaller batch, or more GPUs"
    elif line[flag.name]:
        result.set("comm.torch.static_graph", True)
