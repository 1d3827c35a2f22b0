"""Routes torch.nn.functional.scaled_dot_product_attention here, for a with-block or for the whole process.

Reached: every lookup of `F.scaled_dot_product_attention` while patched, and every module that imported the name before
(`from torch.nn.functional import scaled_dot_product_attention`), because module attributes are replaced, too.

Not reached: a reference kept elsewhere than in a module (a closure, a default argument, an attribute of an object, an
entry of a dict), a graph that torch.compile finished before, TorchScript, C++ callers, and the native fast path of
nn.TransformerEncoder in inference, which calls no scaled_dot_product_attention.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType

import torch.nn.functional as F

from sdpa.functional import scaled_dot_product_attention as front_door

NAME = "scaled_dot_product_attention"
ORIGINAL: Callable = F.scaled_dot_product_attention
# A function object of its own with the front door's code: `uninstall` can tell modules that imported the patched name
# from modules that asked for sdpa's, and a call costs nothing more.
ROUTED = FunctionType(front_door.__code__, front_door.__globals__, NAME, front_door.__defaults__)
ROUTED.__kwdefaults__, ROUTED.__doc__ = front_door.__kwdefaults__, front_door.__doc__
# torch's own modules keep the original: its tables of overridable functions compare by identity.
TORCH_INTERNALS = ("torch.",)

LOCK = threading.RLock()
DEPTH = [0]


@contextmanager
def patch() -> Iterator[None]:
    """Use sdpa wherever torch's scaled_dot_product_attention is called inside the with-block, in every thread.

    Nests; the outermost block restores. A model needs no change:

        with sdpa.patch():
            loss = model(x)
    """
    install()
    try:
        yield
    finally:
        uninstall()


def install() -> None:
    """Route torch's scaled_dot_product_attention here until `uninstall`, which has to be called as often."""
    with LOCK:
        DEPTH[0] += 1
        if DEPTH[0] == 1:
            replace(ORIGINAL, ROUTED)


def uninstall() -> None:
    """Undo one `install`; the last one gives torch its function back. Without an install it does nothing."""
    with LOCK:
        DEPTH[0] = max(0, DEPTH[0] - 1)
        if DEPTH[0] == 0:
            replace(ROUTED, ORIGINAL)


def installed() -> bool:
    return DEPTH[0] > 0


def replace(old: Callable, new: Callable) -> None:
    """Rebind torch.nn.functional's name, and every attribute of a user's module that is `old`."""
    if getattr(F, NAME) is old:
        setattr(F, NAME, new)
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name in ("torch", __name__) or name.startswith(TORCH_INTERNALS):
            continue
        for attribute, value in list(vars(module).items()):
            if value is old:
                setattr(module, attribute, new)
