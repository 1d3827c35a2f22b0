"""What dispatch remembers between calls: each thread's last choice, and caches by problem that are emptied together."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sdpa.dispatch import failure, tuning

LAST = threading.local()
# What `clear_caches` empties; holders of choices further up add themselves.
CACHES: list[Callable[[], None]] = [tuning.read.cache_clear]


def clear_caches() -> None:
    """Forget choices, tables and failed launches, after a table was written or the number of threads changed."""
    failure.FAILED.clear()
    forget_choices()


def forget_choices() -> None:
    for clear in CACHES:
        clear()
