"""The command `clipship import`: converts released weights of other formats. Imports no torch itself."""

from pathlib import Path

import click

from trainer.errors import EXIT_DONE, InputError
from trainer.text.live import waiting
from trainer.text.terminal import one_line, say

_ENDING = ".safetensors"


@click.command(
    epilog="""\b
Examples:
  clipship import clip_cn_vit-b-16.pt chinese.safetensors
  clipship import chinese-clip-vit-base-patch16/model.safetensors chinese.safetensors"""
)
@click.argument("source", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def command(source: Path, target: Path, force: bool) -> int:
    """Convert the weights in FILE to OUT (.safetensors), which model.pretrained takes.

    FILE is a checkpoint of Chinese-CLIP, or the weights of a ChineseCLIPModel or CLIPModel of transformers.
    stdout has the keys of [model] that fit the weights; a question mark stands for what their shapes do not
    tell.
    """
    from tomli_w import dumps

    if target.suffix != _ENDING:
        raise InputError(f"{target}: the file to write must end with {_ENDING}")
    if target.exists() and not force:
        raise InputError(f"{target} exists already: give another name, or --force to replace it")
    if not source.is_file():
        raise InputError(f"{source}: there is no such file")
    with waiting(f"converting {one_line(str(source))}"):
        from trainer.model.import_weights import import_weights

        kind, keys = import_weights(source, target)
    say(f"{one_line(str(source))} is {kind}; wrote {one_line(str(target))}")
    click.echo(dumps({"model": keys}), nl=False)
    return EXIT_DONE
