"""Caches of dispatch: each thread's last choice, and the list of caches that are emptied together."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sdpa.dispatch import failure, tables

LAST = threading.local()
# The functions by which `clear_caches` empties caches. Modules in higher layers that cache choices add theirs.
CACHES: list[Callable[[], None]] = [tables.read_once.cache_clear]


def clear_caches() -> None:
    """Forget choices, tables and failed launches, after a table was written or the number of threads changed."""
    failure.FAILED.clear()
    forget_choices()


def forget_choices() -> None:
    for clear in CACHES:
        clear()
