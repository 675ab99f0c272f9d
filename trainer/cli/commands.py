"""Commands of `clipship`, in the order of the help, which imports none of them."""

import importlib

import click

COMMANDS = {
    "init": "Write a commented job file to start from (default: job.toml).",
    "check": "Show the run that JOB describes, or every problem with it.",
    "run": "Train JOB here or on hosts over ssh; resumes from the run folder's newest checkpoint.",
    "train": "Run one rank of JOB; a launcher starts it once for each rank.",
    "checkpoint": "Ask RUN to save a checkpoint now and to go on.",
    "explain": "Say what a key of the job file means: type, unit, default, range.",
    "doctor": "Check nodes, collectives, network and GPUs as a run would, without training.",
    "resume": "Go on with a run: its folder has all that it takes.",
    "sweep": "Train a job once for each combination of values, with a table of results.",
    "clone": "Write the job file of a run, to change it and start again.",
    "render": "Print what a job would build or submit.",
    "submit": "Submit a job to Slurm or Kubernetes.",
    "status": "Show how a run is doing: its state, step, speed, last checkpoint.",
    "runs": "List your runs: where they run, state, step, time left, last line.",
    "logs": "Show the output of a run's ranks.",
    "cancel": "End a run that was submitted.",
    "eval": "Evaluate a checkpoint, ours or open_clip's: retrieval, zero-shot classification.",
    "embed": "Write features of images and captions, and their cosine, as Parquet.",
    "duplicates": "Find near-duplicates by the features of `clipship embed`, for data.scores.",
    "search": "Find the pictures of a folder that are nearest to a text, on a page on this machine.",
    "fetch": "Download what a job names on a hub: weights, tokenizer, text tower.",
    "export": "Write a trained model for open_clip or transformers, with a model card.",
    "import": "Convert weights of Chinese-CLIP or transformers for model.pretrained.",
    "image": "Build, verify and publish the container image of a job.",
    "data": "Inspect shards: statistics, a contact sheet.",
    "index": "Index shards, so that runs need not read their headers.",
    "pack": "Pack a table of images and captions into WebDataset shards.",
    "from-open-clip": "Print the job file of a command line of open_clip_train.",
    "report": "Write one HTML page about a run, or comparing several: curves, evaluation, what went wrong.",
    "completion": "Print the script that completes commands, runs and keys in your shell.",
    "diff": "Show in what runs differ: job, data, environment, results.",
    "fabrics": "List networks between nodes, and what a job gets for each.",
    "stacks": "List versions that go together: torch, CUDA, NCCL, Python, compilers.",
}
"""Lines of `clipship --help` by command."""
_MODULES = {"eval": "evaluate", "import": "import_weights"}
"""Modules of this folder that have another name than their command, which is a word of Python."""


def command_of(name: str) -> click.Command:
    """Imports a command and returns it."""
    module = importlib.import_module(f"trainer.cli.{_MODULES.get(name, name.replace('-', '_'))}")
    command: click.Command = module.command
    return command
