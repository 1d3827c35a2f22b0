"""The launches of a pass are compiled side by side where none of their kind was before, and else as ever."""

from __future__ import annotations

import ast
import gc
import sys
import time
import traceback
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sdpa.problem import Results, Tile
from sdpa.testing import Case, make_inputs, problem_of

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")
_async_compile = pytest.importorskip("triton.runtime._async_compile", reason="this Triton compiles one by one")

from ahead import FakeDriver  # noqa: E402
from triton.runtime import driver  # noqa: E402

from sdpa.kernels.triton import backward, forward, hopper_backward, launch, triton_private  # noqa: E402
from sdpa.kernels.triton.target import Target, assume  # noqa: E402

HOPPER = Target("cuda", 90, 227 << 10, 132, 50 << 20)
SMALL = Tile(16, 16, 1, 1)  # compiles in the least time
KERNELS = (backward.delta_kernel, backward.dkdv_kernel, backward.dq_kernel)


@pytest.fixture
def pools(monkeypatch, tmp_path):
    """How many threads were asked for, each time; on an assumed Hopper where nothing was compiled or tried before."""
    asked = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, threads):
            asked.append(threads)
            super().__init__(threads)

    monkeypatch.setattr(driver, "_active", FakeDriver(HOPPER))
    monkeypatch.setattr(triton_private, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(launch, "SEEN", set())
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    with triton.knobs.cache.scope(), assume(HOPPER):
        triton.knobs.cache.dir = str(tmp_path)
        yield asked


@pytest.fixture
def failed(monkeypatch):
    """The errors of compiling, of which nothing is said where it is done together: each kernel is compiled once more
    where it is launched."""
    errors = []

    def keeping(function):
        def kept(*args):
            try:
                return function(*args)
            except BaseException as error:
                errors.append(error)
                raise

        return kept

    monkeypatch.setattr(triton_private, "built", keeping(triton_private.built))
    monkeypatch.setattr(launch.Launch, "compile_with", keeping(launch.Launch.compile_with))
    return errors


def launches_of(direction="backward", dtype=torch.bfloat16, **sizes):
    case = Case(**{"B": 1, "H": 3, "Hkv": 3, "M": 300, "N": 300, "D": 16, "Dv": 16, "dtype": dtype, **sizes})
    inputs = make_inputs(case)
    problem = problem_of(inputs, direction)
    if direction == "forward":
        return forward.forward_launches(inputs, problem, SMALL)[1]
    out = torch.empty(*inputs.q.shape[:3], case.Dv, dtype=dtype)
    results = Results(out, torch.empty(out.shape[:3]))
    return backward.backward_launches(inputs, results, Results(torch.empty_like(out), None), problem, SMALL).launches


def compiled_before(launches):
    """Which of the launches need not be compiled any more."""
    return [bool(one.kernel.device_caches[driver.active.get_current_device()][0]) for one in launches]


def check_compiled(launches, failed):
    """All of the launches are compiled; else the message has the whole cause."""
    missing = [one.kernel.__name__ for one, found in zip(launches, compiled_before(launches), strict=True) if not found]
    causes = ["".join(traceback.format_exception(error)) for error in failed]
    assert not missing and not failed, "\n".join([f"not compiled: {missing}", *causes])


def test_a_pass_is_compiled_at_once(pools, failed, monkeypatch):
    """And what launches its kernels is built, though one of these builds fails."""
    names = []

    def launcher(source, metadata):
        names.append(source.fn.__name__)
        if source.fn.__name__ == "delta_kernel":
            raise OSError("no C compiler")

    monkeypatch.setattr(driver.active, "launcher_cls", launcher, raising=False)
    launches, filters = launches_of(), list(warnings.filters)
    launch.compile_together(launches, HOPPER)
    check_compiled(launches, failed)
    assert pools == [3] and sorted(names) == ["delta_kernel", "dkdv_kernel", "dq_kernel"]
    assert warnings.filters == filters
    for one in launches:
        monkeypatch.setattr(one.kernel, "compile", None)
        assert one.compile().asm["ptx"], "found, and not compiled again"


def test_collections_do_not_let_a_kernel_fail(pools, failed):
    """What a collection calls lets other threads run, which read kernels, too."""
    threshold = gc.get_threshold()

    def let_others_run(phase, info):
        if sys._getframe(1).f_code is ast.parse.__code__:
            time.sleep(1e-3)

    gc.callbacks.append(let_others_run)
    try:
        gc.set_threshold(50, *threshold[1:])  # some in each kernel's reading
        launches = launches_of()
        launch.compile_together(launches, HOPPER)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(let_others_run)
    check_compiled(launches, failed)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled, shares, pools, monkeypatch):
    """It pauses where one thread's reading can fail for another's; it may have been off before."""
    seen = []
    monkeypatch.setattr(triton_private, "SHARES_DEPTH", shares)
    monkeypatch.setattr(triton_private, "built", lambda compile_one: seen.append(gc.isenabled()))
    launches = launches_of()
    try:
        (gc.enable if enabled else gc.disable)()
        launch.compile_together(launches, HOPPER)
        seen.append(gc.isenabled())
    finally:
        gc.enable()
    assert seen == [enabled and not shares] * 3 + [enabled]


def test_what_was_tried_is_not_again(pools):
    """Whatever its sizes. Another dtype is another kind; another device is, too; and one launch needs no threads."""
    kinds = [{one.kind for one in launches_of(**sizes)} for sizes in ({}, {"M": 200}, {"B": 2})]
    assert kinds[0] == kinds[1] == kinds[2]
    launch.compile_together(launches_of(), HOPPER)
    launch.compile_together(launches_of(M=200), HOPPER)
    launch.compile_together(launches_of("forward"), HOPPER)
    assert pools == [3]
    launch.compile_together(launches_of(dtype=torch.float16), HOPPER)
    launch.compile_together(launches_of(), HOPPER._replace(arch=80))
    assert pools == [3, 3, 3]


def test_kernels_of_one_assembler_are_compiled_together(pools, monkeypatch):
    """Gluon's by Triton's own choice, others by a sound one."""
    seen = []
    monkeypatch.setattr(launch.Launch, "compile_with", lambda one, path: seen.append((one.kernel.is_gluon(), path)))
    monkeypatch.setattr(launch, "assembler_for", lambda kernel, *_: None if kernel.is_gluon() else "ptxas")
    inputs = make_inputs(Case(B=1, H=2, Hkv=2, M=300, N=300, D=64, Dv=64, dtype=torch.bfloat16))
    problem = problem_of(inputs, "backward")
    results = Results(torch.empty_like(inputs.q), torch.empty(inputs.q.shape[:3]))
    tile = hopper_backward.tiles(problem)[0]
    _, launches = hopper_backward.backward_launches(inputs, results, Results(inputs.q, None), problem, tile)
    launch.compile_together(launches, HOPPER)
    assert pools == [2] and seen == [(True, None)] * 2 and len(launches) == 3
    launch.compile_together([*launches_of(), launches_of()[0]._replace(grid=(0,), registers=99)], HOPPER)
    assert pools == [2, 3] and seen[2:] == [(False, "ptxas")] * 3, "a launch of nothing needs no kernel"


def test_a_pass_that_runs_is_compiled_first(pools, monkeypatch):
    monkeypatch.setattr(launch.Launch, "__call__", lambda one, backend, arch: len(pools))
    launches = launches_of()
    assert launch.run(launches, problem_of(make_inputs(Case()), "backward")) == [1, 1, 1]


@pytest.mark.parametrize("who", ["mode", "hook", "listener", "before", "thread"])
def test_somebody_who_looks_on_sees_what_ever_was(who, pools, monkeypatch):
    launches, seen = launches_of(), []
    with triton.knobs.runtime.scope(), triton.knobs.compilation.scope(), ThreadPoolExecutor(1) as threads:
        if who == "hook":
            triton.knobs.runtime.jit_post_compile_hook = lambda **told: seen.append(told)
        elif who == "listener":
            triton.knobs.compilation.listener = lambda **told: seen.append(told)
        elif who == "before":
            monkeypatch.setattr(launches[0].kernel, "pre_run_hooks", [lambda *args, **told: seen.append(told)])
        if who == "mode":
            with triton.AsyncCompileMode(threads) as mode:
                launch.compile_together(launches, HOPPER)
                assert not mode.future_kernels
        elif who == "thread":
            with triton_private.TOGETHER:
                launch.compile_together(launches, HOPPER)
        else:
            launch.compile_together(launches, HOPPER)
    assert not pools and not seen and not any(compiled_before(launches))
    assert not triton_private.TOGETHER.locked()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_interrupts_leaves_nothing_behind(error, pools, monkeypatch):
    """Ctrl-C while it waits is the caller's; an error is not."""
    monkeypatch.setattr(triton_private, "SHARES_DEPTH", True)
    launches = launches_of()
    with monkeypatch.context() as patched:

        def interrupted(futures):
            raise error

        patched.setattr(_async_compile, "as_completed", interrupted)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                launch.compile_together(launches, HOPPER)
        else:
            launch.compile_together(launches, HOPPER)
    assert pools == [3] and _async_compile.active_mode.get() is None and not triton_private.TOGETHER.locked()
    assert gc.isenabled()
    assert all(one.compile().asm["ptx"] for one in launches)


def test_no_threads_to_be_had(pools, monkeypatch):
    """As at the end of a process, or in a container that has reached their number."""

    class NoPool(ThreadPoolExecutor):
        def submit(self, *args):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(triton_private, "ThreadPoolExecutor", NoPool)
    launches = launches_of()
    launch.compile_together(launches, HOPPER)
    assert not any(compiled_before(launches)) and _async_compile.active_mode.get() is None
    assert launches[0].compile().asm["ptx"]


def test_a_kernel_that_does_not_compile_is_told_of_where_it_is_launched(pools, monkeypatch):
    launches = launches_of()

    def fails(*args, **options):
        raise RuntimeError("no such kernel")

    assert not any(compiled_before(launches))  # which makes their binders
    monkeypatch.setattr(launches[0].kernel, "compile", fails)
    launch.compile_together(launches, HOPPER)
    assert pools == [3] and compiled_before(launches) == [False, True, True]
    with pytest.raises(RuntimeError, match="no such kernel"):
        launches[0].compile()


def test_other_releases(pools, monkeypatch):
    """One whose mode has no such argument, and one that has no mode."""
    launches = launches_of()
    monkeypatch.setattr(_async_compile, "AsyncCompileMode", lambda executor: None)
    launch.compile_together(launches, HOPPER)
    monkeypatch.delattr(_async_compile, "AsyncCompileMode")
    launch.SEEN.clear()
    launch.compile_together(launches, HOPPER)
    assert not pools and not any(compiled_before(launches))
