"""Decides among how many ranks the parameters are split, by `comm.fsdp.shard_degree`. Imports no torch."""

from collections.abc import Sequence
from itertools import groupby

from trainer.config.comm import ShardDegree
from trainer.errors import InputError
from trainer.text.wording import many


def shard_degree(setting: ShardDegree, nodes: Sequence[str]) -> int:
    """Returns the number of consecutive ranks that together hold the model once.

    `nodes` has the node of each rank, in rank order. Raises InputError if the ranks cannot be cut into such
    groups.
    """
    ranks = len(nodes)
    if setting == "world":
        return ranks
    key = (
        f'comm.fsdp.shard_degree = "{setting}"'
        if setting == "node"
        else f"comm.fsdp.shard_degree = {setting}"
    )
    if setting == "node":
        sizes = [len(list(group)) for _, group in groupby(nodes)]
        if len(sizes) != len(set(nodes)) or len(set(sizes)) > 1:
            raise InputError(
                f"{key} needs the same number of ranks on each node, one node after the other, but the "
                f"{many(ranks, 'rank')} are on {', '.join(nodes)}: "
                'choose "world", or change the number of ranks on each node'
            )
        return sizes[0]
    if ranks % setting:
        raise InputError(
            f"{key} does not divide {many(ranks, 'rank')}: choose a number that does, "
            '"node", or "world" (all ranks)'
        )
    return setting
