"""Commands that are imported when they are run: `clipship --help` waits for none of them.

A function here is a command of its name, and its docstring is the command's line in `clipship --help`.
"""

from collections.abc import Callable

import click

LAZY_COMMANDS: dict[str, Callable[[], click.Command]] = {}
"""Functions that import a command and return it, by its name, in the order of the help."""


def _lazy(imports: Callable[[], click.Command]) -> Callable[[], click.Command]:
    """Adds a command under the function's name; one that is a word of Python ends with an underscore."""
    LAZY_COMMANDS[imports.__name__.rstrip("_").replace("_", "-")] = imports
    return imports


@_lazy
def init() -> click.Command:
    """Write a commented job file to start from (default: job.toml)."""
    from trainer.cli.init import command

    return command


@_lazy
def check() -> click.Command:
    """Show the run that JOB describes, or every problem with it."""
    from trainer.cli.check import command

    return command


@_lazy
def run() -> click.Command:
    """Train JOB here or on hosts over ssh; resumes from the run folder's newest checkpoint."""
    from trainer.cli.run import command

    return command


@_lazy
def train() -> click.Command:
    """Run one rank of JOB; a launcher starts it once for each rank."""
    from trainer.cli.train import command

    return command


@_lazy
def checkpoint() -> click.Command:
    """Ask RUN to save a checkpoint now and to go on."""
    from trainer.cli.checkpoint import command

    return command


@_lazy
def explain() -> click.Command:
    """Say what a key of the job file means: type, unit, default, range."""
    from trainer.cli.explain import command

    return command


@_lazy
def doctor() -> click.Command:
    """Check nodes, collectives, network and GPUs as a run would, without training."""
    from trainer.cli.doctor import command

    return command


@_lazy
def resume() -> click.Command:
    """Go on with a run: its folder has all that it takes."""
    from trainer.cli.resume import command

    return command


@_lazy
def sweep() -> click.Command:
    """Train a job once for each combination of values, with a table of results."""
    from trainer.cli.sweep import command

    return command


@_lazy
def clone() -> click.Command:
    """Write the job file of a run, to change it and start again."""
    from trainer.cli.clone import command

    return command


@_lazy
def render() -> click.Command:
    """Print what a job would build or submit."""
    from trainer.cli.render import command

    return command


@_lazy
def submit() -> click.Command:
    """Submit a job to Slurm or Kubernetes."""
    from trainer.cli.submit import command

    return command


@_lazy
def status() -> click.Command:
    """Show how a run is doing: its state, step, speed, last checkpoint."""
    from trainer.cli.status import command

    return command


@_lazy
def runs() -> click.Command:
    """List your runs: where they run, state, step, time left, last line."""
    from trainer.cli.runs import command

    return command


@_lazy
def logs() -> click.Command:
    """Show the output of a run's ranks."""
    from trainer.cli.logs import command

    return command


@_lazy
def cancel() -> click.Command:
    """End a run that was submitted."""
    from trainer.cli.cancel import command

    return command


@_lazy
def eval_() -> click.Command:
    """Evaluate a checkpoint, ours or open_clip's: retrieval, zero-shot classification."""
    from trainer.cli.evaluate import command

    return command


@_lazy
def embed() -> click.Command:
    """Write features of images and captions, and their cosine, as Parquet."""
    from trainer.cli.embed import command

    return command


@_lazy
def duplicates() -> click.Command:
    """Find near-duplicates by the features of `clipship embed`, for data.scores."""
    from trainer.cli.duplicates import command

    return command


@_lazy
def search() -> click.Command:
    """Find the pictures of a folder that are nearest to a text, on a page on this machine."""
    from trainer.cli.search import command

    return command


@_lazy
def fetch() -> click.Command:
    """Download what a job names on a hub: weights, tokenizer, text tower."""
    from trainer.cli.fetch import command

    return command


@_lazy
def export() -> click.Command:
    """Write a trained model for open_clip or transformers, with a model card."""
    from trainer.cli.export import command

    return command


@_lazy
def import_() -> click.Command:
    """Convert weights of Chinese-CLIP or transformers for model.pretrained."""
    from trainer.cli.import_weights import command

    return command


@_lazy
def image() -> click.Command:
    """Build, verify and publish the container image of a job."""
    from trainer.cli.image import command

    return command


@_lazy
def data() -> click.Command:
    """Inspect shards: statistics, a contact sheet."""
    from trainer.cli.data import command

    return command


@_lazy
def index() -> click.Command:
    """Index shards, so that runs need not read their headers."""
    from trainer.cli.index import command

    return command


@_lazy
def pack() -> click.Command:
    """Pack a table of images and captions into WebDataset shards."""
    from trainer.cli.pack import command

    return command


@_lazy
def from_open_clip() -> click.Command:
    """Print the job file of a command line of open_clip_train."""
    from trainer.cli.from_open_clip import command

    return command


@_lazy
def report() -> click.Command:
    """Write one HTML page about a run, or comparing several: curves, evaluation, what went wrong."""
    from trainer.cli.report import command

    return command


@_lazy
def completion() -> click.Command:
    """Print the script that completes commands, runs and keys in your shell."""
    from trainer.cli.completion import command

    return command


@_lazy
def diff() -> click.Command:
    """Show in what runs differ: job, data, environment, results."""
    from trainer.cli.diff import command

    return command


@_lazy
def fabrics() -> click.Command:
    """List networks between nodes, and what a job gets for each."""
    from trainer.cli.fabrics import command

    return command


@_lazy
def stacks() -> click.Command:
    """List versions that go together: torch, CUDA, NCCL, Python, compilers."""
    from trainer.cli.stacks import command

    return command
