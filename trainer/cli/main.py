"""The command `clipship`. Imports the rest of the package when a command needs it, and never torch.

`--help` is fast because nothing heavy is imported here: no pydantic, no model, no launcher.
"""

import importlib
import sys
from collections.abc import Sequence

import click

from trainer.cli.options import NearGroup
from trainer.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ClusterError,
    InputError,
    MachineError,
    exit_code_of,
)
from trainer.sysinfo.extras import missing_extra
from trainer.text.terminal import say

LAZY_COMMANDS = {
    "init": ("trainer.cli.init:command", "Write a commented job file to start from (default: job.toml)."),
    "check": (
        "trainer.cli.check:command",
        "Show the run that JOB describes, or every problem with it.",
    ),
    "run": (
        "trainer.cli.run:command",
        "Train JOB here or on hosts over ssh; resumes from the run folder's newest checkpoint.",
    ),
    "train": ("trainer.cli.train:command", "Run one rank of JOB; a launcher starts it once for each rank."),
    "checkpoint": ("trainer.cli.checkpoint:command", "Ask RUN to save a checkpoint now and to go on."),
    "explain": (
        "trainer.cli.explain:command",
        "Say what a key of the job file means: type, unit, default, range.",
    ),
    "doctor": (
        "trainer.cli.doctor:command",
        "Check nodes, collectives, network and GPUs as a run would, without training.",
    ),
    "resume": ("trainer.cli.resume:command", "Go on with a run: its folder has all that it takes."),
    "sweep": (
        "trainer.cli.sweep:command",
        "Train a job once for each combination of values, with a table of results.",
    ),
    "clone": ("trainer.cli.clone:command", "Write the job file of a run, to change it and start again."),
    "render": ("trainer.cli.render:command", "Print what a job would build or submit."),
    "submit": ("trainer.cli.submit:command", "Submit a job to Slurm or Kubernetes."),
    "status": (
        "trainer.cli.status:command",
        "Show how a run is doing: its state, step, speed, last checkpoint.",
    ),
    "runs": (
        "trainer.cli.runs:command",
        "List your runs: where they run, state, step, time left, last line.",
    ),
    "logs": ("trainer.cli.logs:command", "Show the output of a run's ranks."),
    "cancel": ("trainer.cli.cancel:command", "End a run that was submitted."),
    "eval": (
        "trainer.cli.evaluate:command",
        "Evaluate a checkpoint, ours or open_clip's: retrieval, zero-shot classification.",
    ),
    "search": (
        "trainer.cli.search:command",
        "Find the pictures of a folder that are nearest to a text, on a page on this machine.",
    ),
    "fetch": (
        "trainer.cli.fetch:command",
        "Download what a job names on a hub: weights, tokenizer, text tower.",
    ),
    "export": (
        "trainer.cli.export:command",
        "Write a trained model for open_clip or transformers, with a model card.",
    ),
    "import": (
        "trainer.cli.import_weights:command",
        "Convert weights of Chinese-CLIP or transformers for model.pretrained.",
    ),
    "image": ("trainer.cli.image:command", "Build, verify and publish the container image of a job."),
    "data": ("trainer.cli.data:command", "Inspect shards: statistics, a contact sheet."),
    "index": (
        "trainer.cli.index:command",
        "Index shards, so that runs need not read their headers.",
    ),
    "pack": ("trainer.cli.pack:command", "Pack a table of images and captions into WebDataset shards."),
    "from-open-clip": (
        "trainer.cli.from_open_clip:command",
        "Print the job file of a command line of open_clip_train.",
    ),
    "report": (
        "trainer.cli.report:command",
        "Write one HTML page about a run, or comparing several: curves, evaluation, what went wrong.",
    ),
    "completion": (
        "trainer.cli.completion:command",
        "Print the script that completes commands, runs and keys in your shell.",
    ),
    "diff": ("trainer.cli.diff:command", "Show in what runs differ: job, data, environment, results."),
    "plan": (
        "trainer.cli.plan:command",
        "Say what to expect of a run: useful time, checkpoint interval, spare nodes.",
    ),
    "fabrics": (
        "trainer.cli.fabrics:command",
        "List networks between nodes, and what a job gets for each.",
    ),
    "stacks": (
        "trainer.cli.stacks:command",
        "List versions that go together: torch, CUDA, NCCL, Python, compilers.",
    ),
}
"""Commands in modules of their own: name -> ("module:attribute" of a click command, its line in `clipship
--help`)."""


class Commands(NearGroup):
    """A group that imports the modules of LAZY_COMMANDS only when their command is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(LAZY_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in LAZY_COMMANDS:
            return None
        module, _, attribute = LAZY_COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in LAZY_COMMANDS.items()])


def _show_version(ctx: click.Context, option: click.Parameter, asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version  # slow to import, rarely needed

        try:
            click.echo(f"clipship {version('clipship')}")
        except PackageNotFoundError:
            click.echo("clipship (a checkout that is not installed)")
        ctx.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
A first run, on made-up pictures:
  clipship init --preset laptop job.toml
  clipship check job.toml
  clipship run job.toml --nproc 2 --set optim.steps=40

Exit codes: 0 done, 1 the run failed, 2 bad input, 75 stopped on request and saved, 124 a phase passed
its time limit, 128 + N ended by signal N without saving (130: Ctrl-C twice).""",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Train CLIP from one job file: on this machine, over ssh, on a cluster."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Bad input gives one message on stderr; a bug keeps its traceback.
    """
    try:
        code = cli.main(arguments, prog_name="clipship", standalone_mode=False)
    except InputError as problem:
        say(problem)
        return exit_code_of(problem)
    except (ClusterError, MachineError) as problem:
        say(problem)
        return EXIT_FAILED
    except click.ClickException as problem:
        problem.show()
        return EXIT_BAD_INPUT
    except ModuleNotFoundError as missing:
        if not (text := missing_extra(missing.name or "")):
            raise
        say(text)
        return EXIT_BAD_INPUT
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of stdout has left (`clipship check job.toml | head -1`)
        return EXIT_FAILED
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
