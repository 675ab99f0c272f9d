"""The command `clipship import`: converts released weights of other formats. Imports no torch itself."""

from pathlib import Path

import click

from trainer.cli.options import Command
from trainer.errors import InputError
from trainer.text.live import waiting
from trainer.text.terminal import one_line, say

_ENDING = ".safetensors"


@click.command(cls=Command)
@click.argument("source", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def command(source: Path, target: Path, force: bool) -> None:
    """Convert the weights in FILE to OUT (.safetensors), which model.pretrained takes.

    FILE is a checkpoint of Chinese-CLIP, or the weights of a ChineseCLIPModel or CLIPModel of transformers.
    stdout has the keys of [model] that fit the weights: by their shapes, and by config.json,
    preprocessor_config.json and the tokenizer's files beside FILE. A question mark stands for what nothing
    tells, and stderr says so. A model that open_clip has under no name gets a config file beside OUT (.json).

    Examples:
      clipship import clip_cn_vit-b-16.pt chinese.safetensors
      clipship import chinese-clip-vit-base-patch16/model.safetensors chinese.safetensors
    """
    from tomli_w import dumps

    if target.suffix != _ENDING:
        raise InputError(f"{target}: the file to write must end with {_ENDING}")
    for path in (target, target.with_suffix(".json")):
        if path.exists() and not force:
            raise InputError(f"{path} exists already: give another name, or --force to replace it")
    if not source.is_file():
        raise InputError(f"{source}: there is no such file")
    with waiting(f"converting {one_line(str(source))}"):
        from trainer.model.import_weights import import_weights

        imported = import_weights(source, target)
    say(f"{one_line(str(source))} is {imported.kind}; wrote {one_line(str(target))}")
    for note in imported.notes:
        say(f"not known: {note}")
    click.echo(dumps({"model": dict(imported.keys)}), nl=False)
