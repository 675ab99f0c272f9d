"""The command `clipship export`: writes a trained model for other programs. Imports no torch itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from trainer.cli import suggested
from trainer.cli.options import Command, NearChoice, weights_model_option
from trainer.errors import InputError
from trainer.safe_io.plain import read_json
from trainer.text.live import waiting
from trainer.text.terminal import one_line, say

_FORMATS = ("open_clip", "hf", "peft", "safetensors", "onnx")


@click.command(cls=Command)
@click.argument("checkpoint", shell_complete=suggested.runs)
@click.argument("folder", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--to", "form", type=NearChoice(_FORMATS), required=True, help="Form to write.")
@click.option("--license", "license_name", default="", metavar="NAME", help="License that the card states.")
@weights_model_option
def command(checkpoint: str, folder: Path, form: str, license_name: str, model: str | None) -> None:
    """Write the model of CHECKPOINT into the new folder OUT, with a model card (README.md).

    CHECKPOINT is what `clipship eval` takes. open_clip: a folder for `local-dir:`; hf: CLIPModel or
    ChineseCLIPModel of transformers, for the models that it has; safetensors: weights under open_clip's
    names; onnx: a graph for each tower (needs the extra onnx); peft: of a run of LoRA its adapters alone, for
    a model of transformers. What is written is loaded with the other program and compared: features of random
    pictures and of captions, pixels, tokens. Where they differ, nothing is kept (exit code 2). The card has
    data, steps, metrics and what the job sets, without secrets and folders, and classifies a picture.

    Examples:
      clipship export runs/digits out --to open_clip
      clipship export runs/digits/checkpoints/step-00000300 out --to hf --license apache-2.0
    """
    from trainer.plan.trained import export_job

    if one_line(license_name) != license_name:
        raise InputError("--license: the name of a license is one line of plain text, such as apache-2.0")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is not empty: give a new folder")
    job = export_job(checkpoint, model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with waiting(f"writing {one_line(str(folder))}"):
            from trainer.checkpoint.weights import with_loss_alone
            from trainer.model.export import export
            from trainer.model.model_card import model_card, on_white

            try:
                notes = export(with_loss_alone(job), folder, form)
            except InputError:
                _remove_written(folder)
                raise
        manifest = _manifest(job.model.pretrained)
        name = manifest.get("job", {}).get("name") or Path(job.model.name).stem
        (folder / "README.md").write_text(model_card(name, form, license_name, manifest), encoding="utf-8")
    except OSError as problem:
        raise InputError(f"{folder} cannot be written: {problem.strerror}") from None
    if form == "open_clip" and job.model.text:
        say(
            "open_clip finds the text tower by the path of the folder, in open_clip_config.json: correct it "
            "there if you move the folder"
        )
    for note in notes:
        say(note)
    white = on_white(manifest) and form != "onnx"  # whose pictures are the user's own business
    more = (
        ", and how to put transparent pictures on white, as in training: this form does not" if white else ""
    )
    say(f"wrote {form} to {one_line(str(folder))}; its README.md says how to load it{more}")


def _remove_written(folder: Path) -> None:
    """Removes what was written into the folder, which was empty: nobody is to take it for the model."""
    for path in folder.iterdir():
        if path.is_file() or path.is_symlink():
            path.unlink()


def _manifest(weights: str | None) -> Mapping[str, Any]:
    """Returns the manifest beside a checkpoint's weights; empty if there is none."""
    from trainer.run.checkpoints import MANIFEST

    path = Path(weights or "").parent / MANIFEST
    if not weights or not path.is_file():
        return {}
    manifest: Mapping[str, Any] = read_json(path, links=True)
    return manifest
