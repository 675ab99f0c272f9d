"""The command `clipship eval`: evaluates a model of Clipship or open_clip on data that the user names.

Imports no torch.
"""

import time
from collections.abc import Mapping
from typing import Any, get_args

import click

from trainer.cli import suggested
from trainer.cli.options import count_option, json_option, set_of, weights_model_option
from trainer.cli.output import print_json
from trainer.errors import EXIT_DONE
from trainer.text.table import aligned


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
    help="Suite of data sets (datacomp, vtab, imagenet, retrieval, long, xm3600, sugar_crepe, cvqa, own) "
    "or one of its sets; knn:NAME and linear:NAME are probes; may be repeated.",
)
@click.option("--suite-root", metavar="FOLDER", help="Folder with the data sets of --suite.")
@weights_model_option
@count_option("--nproc", "Number of ranks on this machine.", default=1)
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
    from trainer.evaluate.suite_data import keep_suite, warn_of_missing
    from trainer.launch.evaluation import evaluated
    from trainer.plan.trained import evaluation_job

    asked = {"retrieval": data, "zero_shot": zero_shot, "class_names": class_names, "templates": templates}
    suite = {"names": suites, "root": suite_root}
    job = evaluation_job(checkpoint, model, _given(asked), nproc, overrides, _given(suite))
    warn_of_missing(job.eval)
    start = time.monotonic()
    code, metrics = evaluated(job, "evaluate", nproc=nproc)
    if code:
        return code
    about = {"checkpoint": checkpoint, "model": job.model.name, "pretrained": job.model.pretrained}
    results = metrics.pop("suite", None)
    if not as_json and (results is None or len(metrics) > 1):  # world_size alone needs no table
        _show(metrics)
    if results is not None:
        metrics["suite"] = keep_suite(job, about, results, table=not as_json)
    print_json({**about, **metrics, "seconds": round(time.monotonic() - start, 1)})
    return EXIT_DONE


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value}


def _show(metrics: Mapping[str, float | int]) -> None:
    from trainer.config import BestMetric  # all of these metrics are shares

    shares = get_args(BestMetric)
    rows = [(name, f"{value:.2%}" if name in shares else f"{value:,.12g}") for name, value in metrics.items()]
    for line in aligned([("metric", "value"), *rows]):
        click.echo(line, err=True)
