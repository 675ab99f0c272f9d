"""Lets rank 0 alone compute what all ranks need."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer.errors import EncodedError, InputError, MachineError, Preempted, decode_error, encode_error

if TYPE_CHECKING:  # protocol imports torch, which readers of run folders do not need
    from trainer.comm.protocol import Comm


def of_rank_0(comm: "Comm", compute: Callable[[], Any]) -> Any:
    """Collective: returns what rank 0 computes, of the types that `broadcast_object` takes.

    Raises its InputError, MachineError or Preempted on all ranks.
    """
    sent: tuple[Any, EncodedError | None] = None, None
    if comm.world.rank == 0:
        try:
            sent = compute(), None
        except (InputError, MachineError, Preempted) as problem:
            sent = None, encode_error(problem)
    value, encoded = comm.broadcast_object(sent)
    if error := decode_error(encoded):
        raise error
    return value
