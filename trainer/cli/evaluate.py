"""The command `clipship eval`: evaluates a model of Clipship or open_clip on data that the user names.

Imports no torch.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from trainer.cli import suggested
from trainer.cli.json_output import json_option, print_json
from trainer.cli.options import set_of, weights_model_option
from trainer.errors import InputError
from trainer.launch.submission import find_run
from trainer.run.layout import JOB_FILE, RESULT_FILE
from trainer.safe_io.plain import read_json
from trainer.text.masking import MASK

if TYPE_CHECKING:
    from trainer.config import Job

LONGEST_S = 6 * 3600.0
"""Default time limit of an evaluation, in seconds. Nothing else waits for it, as training would; a longer
evaluation hangs or needs `--set timeouts.eval_s=...`."""


@click.command(
    epilog="""\b
Examples:
  clipship eval runs/digits --data 'held-out/*.tar'
  clipship eval runs/digits/checkpoints/step-00000300 --nproc 2
  clipship eval logs/mine/checkpoints/epoch_8.pt --model ViT-B-32 --data coco.csv \
--set data.image_column=filepath
  clipship eval ViT-B-32:laion2b_s34b_b79k --zero-shot imagenet/val --class-names names.txt
  clipship eval runs/digits --suite datacomp --suite-root /data/eval

Without --data, --zero-shot and --suite, a checkpoint of Clipship is evaluated as its job file says."""
)
@click.argument("checkpoint", shell_complete=suggested.runs)
@click.option(
    "--data", multiple=True, metavar="PATTERN", help="Shards or tables for retrieval; may be repeated."
)
@click.option(
    "--zero-shot",
    multiple=True,
    metavar="PATTERN",
    help="Labelled shards, or a folder with a folder for each class.",
)
@click.option(
    "--class-names",
    metavar="FILE",
    help="Class names by number, one per line; a folder of folders needs none.",
)
@click.option("--templates", metavar="FILE", help="Sentences with {} for the class name, one per line.")
@click.option(
    "--suite",
    "suites",
    multiple=True,
    metavar="NAME",
    shell_complete=suggested.suites,
    help="Suite of data sets (datacomp, vtab, imagenet, retrieval, own) or one of its sets; may be repeated.",
)
@click.option("--suite-root", metavar="FOLDER", help="Folder with the data sets of --suite.")
@weights_model_option
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of ranks on this machine.",
)
@set_of("of the evaluation's job, e.g. eval.batch_size=256.")
@json_option("Print no table on stderr; stdout has one JSON object with and without it.")
def command(
    checkpoint: str,
    data: tuple[str, ...],
    zero_shot: tuple[str, ...],
    class_names: str | None,
    templates: str | None,
    suites: tuple[str, ...],
    suite_root: str | None,
    model: str | None,
    nproc: int,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Evaluate CHECKPOINT by retrieval and zero-shot classification; N ranks share the work.

    CHECKPOINT is a run (folder, job file or name in ./runs: its newest checkpoint), a checkpoint folder, a
    weights file (of Clipship, open_clip or open_clip_train), or MODEL:TAG of open_clip. A table goes to
    stderr, one JSON object to stdout: checkpoint, model, pretrained, the metrics under their names, seconds.
    """
    from trainer.cli.suite import keep_suite, kept_texts, warn_of_missing
    from trainer.config.loader import dump_job
    from trainer.launch.local import start_ranks
    from trainer.launch.processes import stdout_is_stderr

    asked = {"retrieval": data, "zero_shot": zero_shot, "class_names": class_names, "templates": templates}
    suite = {"names": suites, "root": suite_root}
    job = evaluation_job(checkpoint, model, _given(asked), nproc, overrides, _given(suite))
    warn_of_missing(job.eval)
    start = time.monotonic()
    with _folder() as folder:
        job_path, result_path = folder / JOB_FILE, folder / RESULT_FILE
        # the supervisors' files go into the temporary folder: they belong to no run
        kept_here = job.logging.model_copy(update={"runs": str(folder)})
        job_path.write_text(dump_job(job.model_copy(update={"logging": kept_here})), encoding="utf-8")
        paths = [str(path) for path in (job_path, result_path, kept_texts(job)) if path]
        rank = (sys.executable, "-P", "-m", "trainer.evaluate", *paths)
        with stdout_is_stderr():
            code = start_ranks(rank, job, nproc=nproc, hosts=None)
        if code:
            return code
        metrics = read_json(result_path)
    about = {"checkpoint": checkpoint, "model": job.model.name, "pretrained": job.model.pretrained}
    results = metrics.pop("suite", None)
    if not as_json and (results is None or len(metrics) > 1):  # world_size alone needs no table
        _show(metrics)
    if results is not None:
        metrics["suite"] = keep_suite(job, about, results, table=not as_json)
    print_json({**about, **metrics, "seconds": round(time.monotonic() - start, 1)})
    return 0


@contextmanager
def _folder() -> Iterator[Path]:
    """Yields a temporary folder.

    It is removed at the end, unless it holds a diagnosis, which the last lines of output name.
    """
    folder = Path(tempfile.mkdtemp(prefix="clipship-eval-"))
    try:
        yield folder
    finally:
        if not list(folder.glob("*/diagnosis.json")):
            shutil.rmtree(folder, ignore_errors=True)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value}


def evaluation_job(
    checkpoint: str,
    model: str | None,
    asked: Mapping[str, Any],
    nproc: int,
    overrides: Sequence[str],
    suite: Mapping[str, Any] | None = None,
) -> "Job":
    """Returns a job that only evaluates.

    Model, data keys and evaluation come from the checkpoint's run, changed as asked. Raises InputError that
    lists every problem.
    """
    from trainer.cli.check import check_evaluated
    from trainer.config.loader import job_from_table

    table, before = table_of_trained(checkpoint, model)
    table |= {
        "name": "eval",
        "optim": {"global_batch_size": nproc, "steps": 1},
        "timeouts": {"eval_s": LONGEST_S},
        "eval": {**_kept(before, asked, suite or {}), **asked},
    }
    if MASK in json.dumps(table["eval"]):
        raise InputError(
            f"{checkpoint}: the data that its run was evaluated on had a secret in its address, which "
            "checkpoints do not keep: give the data with --data or --zero-shot"
        )
    job = job_from_table(without_unset(table), "clipship eval", overrides)
    if not (job.eval.retrieval or job.eval.zero_shot or job.eval.suite.names):
        raise InputError(
            "nothing to evaluate on: give --data for retrieval, --zero-shot for classification, both, or "
            "--suite for public data sets"
        )
    check_evaluated(job)
    return job


def table_of_trained(checkpoint: str, model: str | None) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Returns [model] and [data] of a job that uses a trained model, and [eval] of the run that trained it.

    `checkpoint` is what the user calls it, `model` what --model names. Raises InputError if there is none.
    """
    from trainer.run.checkpoints import find_trained

    trained = find_trained(_run_or_weights(checkpoint))
    name = model or trained.model
    if name is None:
        raise InputError(f"{checkpoint}: no file beside these weights names their model: give --model NAME")
    before: Mapping[str, Any] = trained.job or {}
    table = {
        "data": {**before.get("data", {}), "format": "synthetic", "train": [], "weights": None},
        "model": {**before.get("model", {}), "name": name, "pretrained": trained.pretrained},
    }
    return table, before.get("eval", {})


def _run_or_weights(name: str) -> str:
    """Returns the run folder of a job file, or of a run in ./runs; else the name itself."""
    is_job = name.endswith(".toml") and Path(name).is_file()
    return (
        str(find_run(name)) if is_job or (Path("runs", name).is_dir() and not Path(name).exists()) else name
    )


def _kept(before: Mapping[str, Any], asked: Mapping[str, Any], suite: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that stay from the run's own evaluation, with those asked of the suite.

    Its data sets are dropped if others are asked for, and its class names if the folders asked for name the
    classes.
    """
    from trainer.data.image_folder import image_folder

    others = bool({"retrieval", "zero_shot"} & asked.keys() or "names" in suite)
    other_sets = {"retrieval", "zero_shot"} if others else set()
    other_classes = {"class_names"} if image_folder(asked.get("zero_shot", ())) else set()
    kept = {key: value for key, value in before.items() if key not in other_sets | other_classes}
    names = {"names": ()} if others else {}
    return {**kept, "suite": {**before.get("suite", {}), **names, **suite}}


def without_unset(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the table without the keys that hold None, as a job file leaves them out."""
    return {
        key: without_unset(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }


def _show(metrics: Mapping[str, float | int]) -> None:
    from rich.console import Console
    from rich.table import Table

    from trainer.config import BestMetric  # all of these metrics are shares

    table = Table("metric", "value", box=None, pad_edge=False)
    for name, value in metrics.items():
        table.add_row(name, f"{value:.2%}" if name in get_args(BestMetric) else f"{value:,.12g}")
    Console(stderr=True).print(table)
