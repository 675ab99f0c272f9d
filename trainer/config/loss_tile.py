"""Decides whether a rank computes its loss in tiles, and how large they are.

Pure arithmetic; imports no torch. n: samples of this rank; N: samples of all ranks; D: width of the features.
"""

from trainer.config.losses import Contrast
from trainer.text.wording import many

TILE = 2048
"""Rows, and columns, of a tile that is chosen: 16 MiB of float32, in which a matrix product is fast."""
_MEMORY_SHARE = 10
_LOGITS, _LABELS = 4, 2
_HALF = ("bf16", "fp16")


def plain_bytes(
    n: int, N: int, D: int, value_bytes: int = 4, *, labelled: bool = False, teachers: int = 0
) -> int:
    """Returns the bytes that the plain loss adds at its peak on one rank.

    It holds four matrices of n x N values (for CLIP the logits and their log-softmax, in both directions; for
    SigLIP logits, signs, their product and its log-sigmoid), and the gathered features of images and texts
    (SigLIP gathers texts alone, and so takes a little less). With labels of pairs (`labelled`) it also holds
    their target, and its product with one of the others. Each teacher takes as much as a loss without any:
    the softmax of its rows and the log-softmax of the model's, in both directions, and its features.
    """
    without = _LOGITS * n * N + 2 * N * D
    return (without * (1 + teachers) + _LABELS * labelled * n * N) * value_bytes


def spares_network(contrast: Contrast, nodes: int) -> bool:
    """Returns whether tiles spare the network between nodes.

    CLIP's send no gradient of features, which are half of what the plain loss sends. SigLIP's send as much as
    the plain one, in more and smaller messages.
    """
    return contrast == "clip" and nodes > 1


def tile_rows(setting: int | None, plain: int, memory: int | None, *, spares: bool) -> int:
    """Returns the rows of a tile, or 0 for the plain loss.

    `setting` is `optim.loss_tile`. If it is None, tiles are chosen where they spare the network (`spares`),
    and where the plain loss would take more than a tenth of the memory that a rank has; `plain` and `memory`
    are these two in bytes. None: the memory is not known, and not scarce.
    """
    if setting is not None:
        return setting
    scarce = memory is not None and plain * _MEMORY_SHARE > memory
    return TILE if spares or scarce else 0


def in_tf32(precision: str, kernels: str) -> bool:
    """Returns whether products of tiles round their factors to TF32 on a GPU, by keys of `[model]`.

    Half precision has rounded the features' directions to fewer bits already.
    """
    return kernels == "fast" and precision in _HALF


def tile_text(setting: int | None, rows: int, plain: int, memory: int, nodes: int) -> str:
    """Returns the choice of tiles and its reason, for people. The arguments are those of the choice."""
    reason = f"optim.loss_tile = {setting}"
    if setting is None:
        reason = (
            f"the whole logits would take {plain / 2**30:.1f} GiB, more than a tenth of "
            f"{memory / 2**30:.1f} GiB"
            if tile_rows(setting, plain, memory, spares=False)
            else f"between {many(nodes, 'node')} the whole logits would send twice as much"
        )
    return f"in tiles of {many(rows, 'sample')} ({reason})"
