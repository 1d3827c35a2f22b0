"""Triton's private parts that repeated launches rely on, each with what is done where it is absent.

Seen in Triton 3.4, 3.5, 3.6 and 3.9. Where a part is absent, a call is not recorded or a launch goes through Triton's
own launcher: slower, never wrong.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import triton
from triton import knobs
from triton.runtime import driver

# Releases whose JITFunction.run ends in `compiled.run` with the arguments of `launcher_of`.
KNOWN = ((3, 4), (3, 5), (3, 6), (3, 9))
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
# The release whose launchers only put scratch memory, where a kernel wants some, before a function in C that takes a
# kernel's arguments as they are.
IN_C = (3, 6)
# Releases of which it is known what the driver is told, and the object around a tensor map.
LAID_OUT = ((3, 6), (3, 9))
# Releases whose recorded launches were never seen on a GPU: each kernel's first one is tried (`trial`).
UNTRIED = ((3, 9),)
MOST_SHARED = 228 << 10  # bytes, beyond which Triton 3.9 sets another attribute
STREAM = 3  # the place of the stream among a launcher's arguments, behind the grid
ALIGNMENT = 16  # bytes by which Triton tells addresses apart
# A CUtensorMap, and where it lies in Triton's object around it.
MAP_SIZE, MAP_OFFSET = 128, 128
SCRATCH_SIZES = ("global_scratch_size", "profile_scratch_size")
HOOKS = ("launch_enter_hook", "launch_exit_hook")
JIT_HOOKS = ("jit_cache_hook", "jit_post_compile_hook")
TOGETHER = threading.Lock()  # held by whoever compiles kernels together
# Whether one thread's `ast.parse`, by which Triton reads kernels, can fail for another's (`uncollected`).
SHARES_DEPTH = (3, 11) <= sys.version_info < (3, 11, 8)


def can_record() -> bool:
    """Whether launches may be run past Triton's look-up: a release that is known, whose hooks can be seen. Where not,
    every call takes the ordinary way."""
    return VERSION in KNOWN and all(hasattr(knobs.runtime, name) for name in HOOKS)


def hooked() -> bool:
    """Whether a profiler wants to see launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def pre_run_hooks(kernel: Any) -> list | None:
    """What a kernel calls before each launch, as the list that grows; None where it cannot be seen."""
    return getattr(kernel, "pre_run_hooks", None)


def launcher_of(compiled: Any, grid: tuple[int, int, int]) -> tuple[Callable[..., None], list] | None:
    """What launches a compiled kernel, and its arguments before the kernel's own: the function in C where it can be.
    None where there is no launcher of a known form."""
    try:
        launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    except AttributeError:
        return None
    no_stream, no_scratch = None, (None, None)
    rest = (metadata, None, None, None)  # no metadata for hooks, and no hooks
    if VERSION != IN_C or has_scratch(launcher) or not hasattr(launcher, "launch"):
        return launcher, [*grid, no_stream, function, *rest]
    kinds = launcher.launch_cooperative_grid, launcher.launch_pdl, *no_scratch
    return launcher.launch, [*grid, no_stream, function, *kinds, *rest]


@contextmanager
def compiling_together(kernels: Sequence[Any]) -> Iterator[bool]:
    """Inside of it Triton compiles each of the kernels in a thread, and at its end all are compiled but those that
    failed. Yields whether it does so: not in a release that cannot, inside of a caller's own AsyncCompileMode, while
    another thread does it, or where somebody wants to see what is compiled, and in which thread."""
    mode_class, active = async_compilation()
    if mode_class is None or active.get() is not None or is_seen(kernels) or not TOGETHER.acquire(blocking=False):
        yield False
        return
    try:
        # Triton's code generator changes the process's filters of warnings, and threads restore one another's.
        with warnings.catch_warnings(), uncollected(), ThreadPoolExecutor(len(kernels)) as threads:
            as_executor = SimpleNamespace(submit=lambda compile_one: threads.submit(built, compile_one))
            try:
                with mode_class(as_executor, ignore_errors=True):
                    yield True
            finally:  # what interrupts its end would leave it active
                active.set(None)
    finally:
        TOGETHER.release()


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside of it no garbage is collected, where one thread's syntax trees can fail for another's.

    Some releases of Python 3.11 count the depth of all trees that they make in one number. Meanwhile another thread can
    run only where a collection begins and calls something in Python. If that thread makes a tree, too, the first fails:
    "AST constructor recursion depth mismatch" (python/cpython#106905, mended in 3.11.8).
    """
    if not (SHARES_DEPTH and gc.isenabled()):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def async_compilation() -> tuple[Any, Any]:
    """Triton's mode of compiling in an executor, and the variable that holds an active one; None in other releases."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:
        return None, None
    known = "ignore_errors" in inspect.signature(AsyncCompileMode).parameters
    return (AsyncCompileMode, active_mode) if known else (None, None)


def is_seen(kernels: Sequence[Any]) -> bool:
    """Whether a hook or a listener wants to hear of what is compiled, or of what is about to run."""
    told = [getattr(knobs.runtime, name, None) for name in JIT_HOOKS]
    return any((*told, getattr(knobs.compilation, "listener", None), *map(pre_run_hooks, kernels)))


def built(compile_one: Callable[[], Any]) -> Any:
    """A compiled kernel, for which the C compiler has built what launches it, too. That stays among the files that
    Triton keeps, where the first launch finds it."""
    compiled = compile_one()
    with suppress(Exception):
        driver.active.launcher_cls(compiled.src, compiled.metadata)
    return compiled


def is_untried() -> bool:
    return VERSION in UNTRIED


def has_scratch(launcher: Any) -> bool:
    """Whether a launcher does more than launch: it puts scratch memory before the kernel, or may."""
    return any(getattr(launcher, name, 1) for name in SCRATCH_SIZES)


def plain_launch(compiled: Any) -> tuple[int, int, bool] | None:
    """(warps, bytes of shared memory, whether it is a programmatic dependent launch) of a kernel whose launcher only
    launches; None where it does more (scratch memory, clusters, a cooperative grid) or is not known."""
    if VERSION not in LAID_OUT:
        return None
    try:
        launcher, (warps, clusters, shared) = compiled.run, compiled.packed_metadata
        cooperative, dependent = launcher.launch_cooperative_grid, bool(launcher.launch_pdl)
        sanitized = VERSION > IN_C and launcher.gsan_enabled  # three more arguments
    except (AttributeError, TypeError, ValueError):
        return None
    more = has_scratch(launcher) or cooperative or sanitized or clusters != 1 or shared > MOST_SHARED
    return None if more else (warps, shared, dependent)


def signature_of(compiled: Any) -> tuple:
    """The kinds of a kernel's arguments in Triton's words."""
    return tuple(compiled.src.signature.values())


def descriptor_kinds(compiled: Any) -> tuple:
    """What Triton keeps of each tensor descriptor that a kernel takes: how it is encoded."""
    return tuple(getattr(compiled.metadata, "tensordesc_meta", None) or ())


def encode(descriptor: Any, kind: dict | None) -> tuple[bytes, list[int]] | None:
    """(the tensor map, the sizes and strides behind it) of a tensor descriptor; None where it is no map, or Triton has
    no such function or another object around the map."""
    try:
        from triton.backends.nvidia.driver import make_tensordesc_arg
    except ImportError:
        return None
    if kind is None or kind.get("is_im2col"):
        return None
    encoded, *numbers = make_tensordesc_arg(descriptor, kind, *(() if VERSION <= IN_C else (None,)))
    if type(encoded).__basicsize__ != MAP_OFFSET + MAP_SIZE:
        return None
    return ctypes.string_at(id(encoded) + MAP_OFFSET, MAP_SIZE), numbers
