"""The launches of a pass are compiled side by side where none of their kind was before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sdpa.problem import Results, Tile
from sdpa.testing import Case, make_inputs, problem_of

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")

from ahead import FakeDriver  # noqa: E402

from sdpa.kernels.triton import backward, forward, launch  # noqa: E402
from sdpa.kernels.triton.target import Target, assume  # noqa: E402

HOPPER = Target("cuda", 90, 227 << 10, 132, 50 << 20)
SMALL = Tile(16, 16, 1, 1)  # compiles in the least time


@pytest.fixture
def pools(monkeypatch, tmp_path):
    """How many threads were asked for, each time; on an assumed Hopper where nothing was compiled or seen before."""
    from triton.runtime import driver

    asked = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, threads):
            asked.append(threads)
            super().__init__(threads)

    monkeypatch.setattr(driver, "_active", FakeDriver(HOPPER))
    monkeypatch.setattr(launch, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(launch, "SEEN", set())
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        yield asked


def launches_of(direction, dtype=torch.bfloat16, **sizes):
    case = Case(**{"B": 1, "H": 3, "Hkv": 3, "M": 300, "N": 300, "D": 16, "Dv": 16, "dtype": dtype, **sizes})
    inputs = make_inputs(case)
    problem = problem_of(inputs, direction)
    if direction == "forward":
        return forward.forward_launches(inputs, problem, SMALL)[1]
    out = torch.empty(*inputs.q.shape[:3], case.Dv, dtype=dtype)
    results = Results(out, torch.empty(out.shape[:3]))
    return backward.backward_launches(inputs, results, Results(torch.empty_like(out), None), problem, SMALL).launches


def test_a_pass_is_compiled_at_once(pools, monkeypatch):
    """And what launches its kernels is built, though one of these builds fails."""
    from triton.runtime import driver

    built = []

    def launcher(source, metadata):
        built.append(source.fn.__name__)
        if source.fn.__name__ == "delta_kernel":
            raise OSError("no C compiler")

    monkeypatch.setattr(driver.active, "launcher_cls", launcher, raising=False)
    with assume(HOPPER):
        launches = launches_of("backward")
        launch.compile_together(launches, HOPPER)
        assert pools == [len(launches)] and len(launches) == 3
        assert sorted(built) == ["delta_kernel", "dkdv_kernel", "dq_kernel"]
        for one in launches:
            monkeypatch.setattr(one.kernel, "compile", None)
            assert one.compile().asm["ptx"], "found, and not compiled again"


def test_what_was_seen_is_not_compiled_at_once_again(pools):
    """Whatever its sizes; another dtype is another kind."""
    with assume(HOPPER):
        kinds = [{one.kind for one in launches_of("backward", **sizes)} for sizes in ({}, {"M": 200}, {"B": 2})]
        other = {one.kind for one in launches_of("backward", dtype=torch.float16)}
        assert kinds[0] == kinds[1] == kinds[2] and not kinds[0] & other
        launch.SEEN.update(kinds[0])
        launch.compile_together(launches_of("backward", M=200), HOPPER)
        launch.compile_together(launches_of("forward"), HOPPER)
        assert pools == [], "a single launch needs no threads"


def test_who_compiles_in_an_executor_already_goes_on(pools):
    with assume(HOPPER), ThreadPoolExecutor(1) as threads, triton.AsyncCompileMode(threads) as mode:
        launch.compile_together(launches_of("backward"), HOPPER)
        assert not mode.future_kernels


def test_a_kernel_that_does_not_compile_is_told_of_where_it_is_launched(pools, monkeypatch):
    with assume(HOPPER):
        launches = launches_of("backward", D=40, Dv=24)  # of which no other test compiled any

        def fails(*args, **options):
            raise RuntimeError("no such kernel")

        for one in launches:
            monkeypatch.setattr(one.kernel, "compile", fails)
        launch.compile_together(launches, HOPPER)
        assert pools == [len(launches)]
        with pytest.raises(RuntimeError, match="no such kernel"):
            launches[0].compile()
