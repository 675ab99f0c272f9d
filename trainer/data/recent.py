"""Keeps what was made last, for as long as there is room. No torch."""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """The values that were used last, at most `most` of them; pickled without them. Threads may call it."""

    def __init__(self, most: int) -> None:
        self._most, self._changing = most, Lock()
        self._kept: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Returns the value of a key, which is made if it is not kept. Raises what `make` raises."""
        with self._changing:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make()
        with self._changing:
            self._kept[key] = made
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return made

    def values(self) -> list[Value]:
        """Returns the values that are kept."""
        with self._changing:
            return list(self._kept.values())

    def __reduce__(self) -> tuple[type["Recent[Key, Value]"], tuple[int]]:
        return Recent, (self._most,)
