"""Routes torch.nn.functional.scaled_dot_product_attention here, for a with-block or for the whole process.

Reached: every lookup of `F.scaled_dot_product_attention`, nn.MultiheadAttention's among them, and every attribute of an
imported module that is torch's function (`from torch.nn.functional import scaled_dot_product_attention`).

Not reached: a reference kept elsewhere than in a module (a closure, a default argument, an attribute of an object, an
entry of a list or dict), a graph that torch.compile or torch.jit made before, callers in C++ or of torch.ops.aten, and
the native fast path of nn.MultiheadAttention and nn.TransformerEncoder in inference, which calls no
scaled_dot_product_attention. A module that imports the name while torch is patched keeps ours afterwards.

`ROUTING` does it for one thread, at a microsecond for each operation instead of a search for references: for models
that route their own calls. torch.compile traces through it.

`install(patterns=True)` also reaches attention that models write out, where Inductor compiles it: `sdpa.patterns`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode, get_overridable_functions

from sdpa.dispatch.context import PerCall
from sdpa.functional import scaled_dot_product_attention
from sdpa.torch_private import name_for_scripts, saved_tensors_hooks
from sdpa.validate import check_flag

is_dynamo_compiling = torch.compiler.is_dynamo_compiling

NAME = "scaled_dot_product_attention"
ORIGINAL: Callable[..., Any] = F.scaled_dot_product_attention


# torch.jit.script looks functions up by identity, and compiles torch's operator where it finds ours, which it could not
# compile. Arguments that only ours has it refuses.
name_for_scripts(scaled_dot_product_attention, f"aten::{NAME}")


class _State:
    """How often torch is patched, and where; read and written under its lock."""

    lock = threading.RLock()
    depth = 0
    replaced: list[tuple[ModuleType, str]] = []  # noqa: RUF012
    # Of the last time that the modules were looked through: `traces` then, the names of each module, what was found.
    seen: tuple[Any, ...] = ()
    names: list[dict[str, Any]] = []  # noqa: RUF012
    found: list[tuple[ModuleType, str]] = []  # noqa: RUF012
    passes: list[tuple[int, Any]] = []  # noqa: RUF012  Inductor's passes of ours, each with the depth it was installed at


class patch(PerCall):
    """Use sdpa wherever torch's scaled_dot_product_attention is called until the with-block ends, in every thread.

    Nests, also across threads: the last block to end gives torch its function back. A model needs no change:

        with sdpa.patch():
            loss = model(x)

    Inside of a function under torch.compile it reaches what the graph records of the block.
    """

    def __enter__(self) -> None:
        if is_dynamo_compiling():
            ROUTING.__enter__()
        else:
            install()

    def __exit__(self, *exception: object) -> None:
        if is_dynamo_compiling():
            ROUTING.__exit__(None, None, None)
        else:
            uninstall()


def install(*, patterns: bool = False) -> None:
    """Route torch's scaled_dot_product_attention here until `uninstall`, which has to be called as often.

    With `patterns`, graphs that Inductor compiles from now on have our attention where a model writes
    softmax(q k^T * scale + mask) v out, too: in inference and training, with dropout, with masks that are added or
    filled in, with keys and values repeated for groups of heads. What is not certain to be the same is left as it is;
    the logger "sdpa.patterns" says how many were replaced (INFO) and why others were not (DEBUG).

    Like Inductor's settings it holds in the thread that calls it. A pass that was there before
    (torch._inductor.config.pre_grad_custom_pass) runs first. What was compiled before stays as it is, and what is
    compiled meanwhile keeps our attention after `uninstall`: torch.compiler.reset() makes both be compiled again.

    Raises:
        RuntimeError: `patterns` in a torch whose Inductor takes no such pass.
        TypeError: `patterns` that is no bool.
    """
    check_flag("patterns", patterns, "install")
    with _State.lock:
        installed = import_module("sdpa.patterns.hook").install() if patterns else None  # which imports Inductor
        _State.depth += 1
        if installed is not None:
            _State.passes.append((_State.depth, installed))
        if _State.depth == 1:
            fill_tables()
            _State.replaced = known_references()
            for module, attribute in _State.replaced:
                setattr(module, attribute, scaled_dot_product_attention)


def uninstall() -> None:
    """Undo one `install`; the last one gives torch its function back. Without an install it does nothing."""
    with _State.lock:
        _State.depth = max(0, _State.depth - 1)
        while _State.passes and _State.passes[-1][0] > _State.depth:
            _State.passes.pop()[1].uninstall()
        if _State.depth == 0:
            for module, attribute in _State.replaced:
                # Who replaced it again in the meantime has the last word.
                if vars(module).get(attribute) is scaled_dot_product_attention:
                    setattr(module, attribute, ORIGINAL)
            _State.replaced = []


@functools.cache
def fill_tables() -> None:
    """torch and its compiler fill a table of overridable functions when they first need it: it is to hold torch's."""
    get_overridable_functions()


def known_references() -> list[tuple[ModuleType, str]]:
    """`references()`, as found before where nothing tells of another: looking through every module takes milliseconds
    beside a library like transformers, and training enters a block for each step."""
    held = all(vars(module).get(attribute) is ORIGINAL for module, attribute in _State.found)
    if not held or not _State.seen or traces() != _State.seen:
        _State.names = [vars(module) for module in modules()]
        _State.seen = traces()  # before the search: what comes meanwhile is looked for the next time
        _State.found = references()
    return list(_State.found)


def traces() -> tuple[Any, ...]:
    """What changes when a module comes to hold torch's function: how many references there are to it, which modules are
    imported, and how many names those had that were looked through. Empty where references are not counted exactly: in
    a Python without the GIL."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return ()
    return sys.getrefcount(ORIGINAL), len(sys.modules), next(reversed(sys.modules)), sum(map(len, _State.names))


def modules() -> list[ModuleType]:
    """Every imported module whose names are to be replaced."""
    imported = list(sys.modules.items())
    return [module for name, module in imported if isinstance(module, ModuleType) and not keeps_original(name)]


def references() -> list[tuple[ModuleType, str]]:
    """(module, attribute) wherever torch's function is to be replaced: torch.nn.functional and every user's module."""
    found = [(F, NAME)] if F.scaled_dot_product_attention is ORIGINAL else []
    for module in modules():
        found += [(module, attribute) for attribute, value in list(vars(module).items()) if value is ORIGINAL]
    return found


def keeps_original(module: str) -> bool:
    """torch's own modules, whose tables know overridable functions by identity, and ours that mean torch's."""
    return module.partition(".")[0] in ("torch", "sdpa")


def inside(function: FunctionType) -> FunctionType:
    """A function of torch.nn.functional that calls attention, as a copy which calls ours.

    It asks for no override: it is what a mode calls to answer one. Without a `__name__` among its globals torch.compile
    reads those, and not torch's module's.
    """
    names = {name: value for name, value in vars(F).items() if name != "__name__"}
    names |= {NAME: scaled_dot_product_attention, "has_torch_function": lambda tensors: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


MULTIHEAD: Any = F.multi_head_attention_forward
MULTIHEAD_INSIDE = inside(MULTIHEAD)


class Routing(TorchFunctionMode):
    """Answers torch's scaled_dot_product_attention in this thread, whoever holds the reference, until it is left."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (ORIGINAL, MULTIHEAD) and runs_again(function, args, kwargs or {}):
            pass
        elif function is ORIGINAL:
            function = scaled_dot_product_attention
        elif function is MULTIHEAD and set(types) <= {Tensor, Parameter}:  # calls attention with no mode in force
            function = MULTIHEAD_INSIDE
        elif function is Tensor.unflatten and torch.compiler.is_compiling():  # its super() is not traced under a mode
            function = torch.unflatten
        return function(*args, **(kwargs or {}))


def runs_again(function: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether activation checkpointing will run a call again, where no mode is in force: what is dropped and saved must
    be the same then, so the call stays torch's. Checkpointing that is reentrant shows in dropout without gradients."""
    if torch.compiler.is_compiling():
        return False
    hooks = saved_tensors_hooks(False)
    if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint":
        return True
    if torch.is_grad_enabled():
        return False
    dropout = argument(args, kwargs, "dropout_p", 4 if function is ORIGINAL else 10, 0.0)
    return bool(dropout) and (function is ORIGINAL or argument(args, kwargs, "training", 13, True))


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], name: str, position: int, default: Any) -> Any:
    return kwargs.get(name, args[position] if len(args) > position else default)


ROUTING = Routing()  # one for all: it has no state, and torch.compile wants modes that were there before
