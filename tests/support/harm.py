"""Damage that a disk does to checkpoints."""

from pathlib import Path

from trainer.checkpoint import files, state


def cut_short(checkpoint: Path) -> None:
    path = checkpoint / files.WEIGHTS
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_bit(checkpoint: Path) -> None:
    path = checkpoint / state.optimizer_file(0, 1)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
