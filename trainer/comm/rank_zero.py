"""Computes on rank 0 or on each rank what all ranks need; what goes wrong is raised on all of them alike."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trainer.errors import (
    EncodedError,
    InputError,
    MachineError,
    Preempted,
    decode_error,
    encode_error,
)

if TYPE_CHECKING:  # protocol imports torch, which readers of run folders do not need
    from trainer.comm.protocol import Comm


def of_rank_0(comm: "Comm", compute: Callable[[], Any]) -> Any:
    """Collective: returns what rank 0 computes, of the types that `broadcast_object` takes.

    Raises its InputError, MachineError or Preempted on all ranks.
    """
    value, encoded = comm.broadcast_object(_tried(compute) if comm.world.rank == 0 else None)
    if error := decode_error(encoded):
        raise error
    return value


def of_each_rank(comm: "Comm", compute: Callable[[], Any]) -> tuple[list[Any], list[EncodedError | None]]:
    """Collective: returns what the call gives on each rank, in their order, and the problems that it has."""
    gathered = comm.all_gather_object(_tried(compute))
    return [value for value, _ in gathered], [problem for _, problem in gathered]


def together(comm: "Comm", compute: Callable[[], Any]) -> list[Any]:
    """Collective: returns what the call gives on each rank. Raises the problems of all of them on each."""
    values, problems = of_each_rank(comm, compute)
    raise_alike(problems)
    return values


def raise_alike(of_ranks: Sequence[EncodedError | None]) -> None:
    """Raises one error for the problems of all ranks, each once: InputError if any is, else as the first."""
    if encoded := list(dict.fromkeys(map(tuple, filter(None, of_ranks)))):
        kinds, texts = zip(*encoded, strict=True)
        plain = InputError.__name__  # no later start can succeed where one is
        error = decode_error((plain if plain in kinds else kinds[0], "\n".join(texts)))
        assert error is not None
        raise error


def _tried(compute: Callable[[], Any]) -> tuple[Any, EncodedError | None]:
    try:
        return compute(), None
    except (InputError, MachineError, Preempted) as problem:
        return None, encode_error(problem)
