"""Keeps what was made last, for as long as there is room. No torch."""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def _one(_value: object) -> int:
    return 1


class Recent(Generic[Key, Value]):
    """The values that were used last, by default at most `most` of them; pickled without them.

    With `size_of`, which can be pickled, their sizes add up to `most`, if there is more than one. Threads may
    call it.
    """

    def __init__(self, most: int, size_of: Callable[[Value], int] = _one) -> None:
        self._most, self._size_of, self._changing = most, size_of, Lock()
        self._kept: OrderedDict[Key, Value] = OrderedDict()
        self.held = 0
        """Sum of the sizes of what is kept."""

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Returns the value of a key, which is made if it is not kept. Raises what `make` raises."""
        with self._changing:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make()
        with self._changing:
            if key not in self._kept:  # another thread may have made it, too
                self._kept[key] = made
                self.held += self._size_of(made)
            while self.held > self._most and len(self._kept) > 1:
                self.held -= self._size_of(self._kept.popitem(last=False)[1])
        return made

    def values(self) -> list[Value]:
        """Returns the values that are kept."""
        with self._changing:
            return list(self._kept.values())

    def __reduce__(self) -> tuple[type["Recent[Key, Value]"], tuple[int, Callable[[Value], int]]]:
        return Recent, (self._most, self._size_of)
