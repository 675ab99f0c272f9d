"""Damage that a disk does to checkpoints."""

from pathlib import Path


def cut_short(checkpoint: Path) -> None:
    path = checkpoint / "model.pt"
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_bit(checkpoint: Path) -> None:
    path = checkpoint / "optimizer-00000-of-00001.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
