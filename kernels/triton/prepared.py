"""The one memory of prepared launches: what calls alike share (sizes, builds, checked descriptors), made once.

All kernels of the family keep it here. Its size is bounded: the entry that was not used for the longest time goes
first, and never more than one at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Value = TypeVar("Value")
ABSENT: Any = object()
PLACES = 4096  # an entry takes a few kilobytes


class PreparedLaunches:
    """Values by key, the least recently used first. Threads may share it, and a signal handler may come in between."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.values: OrderedDict[Hashable, Any] = OrderedDict()
        self.lock = threading.RLock()

    def __len__(self) -> int:
        return len(self.values)

    def get(self, key: Hashable, make: Callable[..., Value], *given: Any) -> Value:
        """The value of `key`; where there is none, `make(*given)`, which is kept. The first part of a key names its
        maker, so that two makers never meet. `make` runs without the lock, so two threads may make the same value."""
        with self.lock:
            value = self.values.get(key, ABSENT)
            if value is not ABSENT:
                self.values.move_to_end(key)
                return value
        value = make(*given)
        with self.lock:
            self.values[key] = value
            self.values.move_to_end(key)
            while len(self.values) > self.places:
                self.values.popitem(last=False)
        return value

    def clear(self) -> None:
        with self.lock:
            self.values.clear()


PREPARED = PreparedLaunches(PLACES)
