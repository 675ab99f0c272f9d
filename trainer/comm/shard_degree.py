"""Decides among how many ranks the parameters are split, by `comm.fsdp.shard_degree`. Imports no torch."""

from collections.abc import Sequence
from itertools import groupby

from trainer.config.comm import ShardDegree
from trainer.errors import InputError
from trainer.text.wording import many

WHOLE_NODE = 8
"""Ranks of a node from which on "auto" keeps a copy of the model on each node.

Eight GPUs together hold open_clip's largest model, with its optimizer, in 5 GiB each.
"""


def planned_degree(setting: ShardDegree, ranks: int, per_node: int) -> int:
    """Returns the number of ranks that hold the model once where each node has so many, at most all ranks."""
    if setting == "auto":
        setting = "node" if WHOLE_NODE <= per_node < ranks else "world"
    return min(ranks, ranks if setting == "world" else per_node if setting == "node" else setting)


def shard_degree(setting: ShardDegree, nodes: Sequence[str]) -> int:
    """Returns the number of consecutive ranks that together hold the model once.

    `nodes` has the node of each rank, in rank order. Raises InputError if the ranks cannot be cut into such
    groups.
    """
    ranks = len(nodes)
    sizes = [len(list(group)) for _, group in groupby(nodes)]
    is_even = len(sizes) == len(set(nodes)) and len(set(sizes)) == 1
    if setting == "node" and not is_even:
        raise InputError(
            'comm.fsdp.shard_degree = "node" needs the same number of ranks on each node, one node after the '
            f"other, but the {many(ranks, 'rank')} are on {', '.join(nodes)}: "
            'choose "world", or change the number of ranks on each node'
        )
    if isinstance(setting, int) and ranks % setting:
        raise InputError(
            f"comm.fsdp.shard_degree = {setting} does not divide {many(ranks, 'rank')}: choose a number that "
            'does, "node", or "world" (all ranks)'
        )
    return planned_degree(setting if is_even or setting != "auto" else "world", ranks, sizes[0])
