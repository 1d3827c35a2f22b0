"""Launches by the driver itself: what it is told is what Triton's launcher would have told it. No GPU."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest
import torch

from sdpa.problem import AttentionInputs, AttentionProblem, read_of

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")

from ahead import H200, compiling_for  # noqa: E402

from sdpa.kernels.triton import decode, driver_launch, forward, hopper  # noqa: E402
from sdpa.kernels.triton.target import Target  # noqa: E402
from sdpa.kernels.triton.tiles import tiles  # noqa: E402
from sdpa.kernels.triton.triton_private import LAID_OUT, VERSION  # noqa: E402

AMPERE = Target("cuda", 80, 163 << 10, 108, 40 << 20)
FUNCTION = 0x7777777700
HERE = Path(__file__).parent


class Launcher:
    launch_cooperative_grid, global_scratch_size, profile_scratch_size, gsan_enabled = False, 0, 0, False

    def __init__(self, pdl):
        self.launch_pdl = pdl

    def launch(self, *args):
        raise AssertionError("not past Triton")


def compiled_for(launch):
    """The kernel of a launch, compiled ahead, as it would be on the device."""
    compiled = launch.compile()
    compiled._run, compiled.function = Launcher(launch.pdl), FUNCTION
    return compiled


def rows(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)


def decode_case(N=2048, pdl=False, **masks):
    inputs = AttentionInputs(rows(1, 4, 1, 64), rows(1, 2, N, 64), rows(1, 2, N, 64), 0.125, **masks)
    problem = AttentionProblem.of(inputs)._replace(device="cuda:0")
    results, launches = decode.forward_launches(inputs, problem, decode.tiles(problem)[0])
    if pdl:  # as on devices that have it
        launches[1] = launches[1]._replace(pdl=True)
    parts = launches[0].args[3:4] if len(launches) > 1 else ()
    return launches, (*read_of(inputs), results.out, *parts)


def flash_case(**masks):
    inputs = AttentionInputs(*(rows(2, 3, 80, 32, dtype=torch.float16) for _ in range(3)), -0.25, 5, 0, **masks)
    problem = AttentionProblem.of(inputs, extra=frozenset({"lse"}))._replace(device="cuda:0")
    results, launches = forward.forward_launches(inputs, problem, tiles(problem)[0])
    return launches, (*read_of(inputs), *results)


def hopper_case():
    inputs = AttentionInputs(*(rows(1, 2, 256, 128) for _ in range(3)), 0.125, right=0)
    problem = AttentionProblem.of(inputs, extra=frozenset({"lse"}))._replace(device="cuda:0")
    results, launch = hopper.forward_launch(inputs, problem, hopper.tiles(problem)[0])
    return [launch], (*read_of(inputs), *results)


CASES = {
    "decode": (AMPERE, decode_case),
    "decode in one part": (AMPERE, lambda: decode_case(64)),
    "decode chained": (H200, lambda: decode_case(pdl=True)),
    "decode with padding": (AMPERE, lambda: decode_case(allowed=torch.ones(1, 1, 1, 2048, dtype=torch.bool))),
    "flash with a bias": (AMPERE, lambda: flash_case(bias=rows(1, 3, 80, 80, dtype=torch.float16))),
    "flash with maps": (H200, flash_case),
    "hopper": (H200, hopper_case),
}
ours = pytest.mark.skipif(
    VERSION not in LAID_OUT, reason="only launchers of Triton 3.6 and 3.9 are known well enough to be passed by"
)


@ours
@pytest.mark.skipif(sys.platform != "linux" or torch.cuda.is_available(), reason="takes the place of the driver")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the driver that records is built with gcc")
@pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").is_file(), reason="Triton's launcher is built with Python.h"
)
def test_the_driver_is_told_what_triton_tells_it(tmp_path):
    done = subprocess.run(
        [sys.executable, HERE / "launch_twice.py", tmp_path], capture_output=True, text=True, check=False, cwd=HERE
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name.removesuffix(" refused").removesuffix(" by Triton")[:-2] for name in found} == set(CASES)
    for name, (wanted, got, answer) in found.items():
        assert got == wanted, name
        assert answer == 0, name
    assert found["decode chained 1"][0]["config"][7:] == [1, driver_launch.PROGRAMMATIC_SERIALIZATION, 1]
    assert found["decode 1"][0]["config"][7:] == [0, 0, 0]


def made(monkeypatch, tmp_path, case, **changes):
    """The DriverLaunch of a case's first launch, and what a driver that is not here is called with."""
    told = []
    monkeypatch.setattr(
        driver_launch, "driver", lambda: driver_launch.Driver(lambda *args: told.append(args) or 0, None)
    )
    target, make = case
    with compiling_for(target, tmp_path):
        launches, tensors = make()
        compiled = compiled_for(launches[0])
    for name, value in changes.items():
        setattr(compiled._run, name, value)
    numbers = {t.data_ptr(): n for n, t in enumerate(tensors)}
    args = launches[0].args
    number_of = lambda arg: numbers[arg.data_ptr()] if isinstance(arg, torch.Tensor) else None  # noqa: E731
    return driver_launch.driver_launch(compiled, (3, 1, 1), args, number_of), told


@ours
def test_threads_do_not_share_what_they_fill(monkeypatch, tmp_path):
    """Each launch finds the addresses and the stream that its own thread has written."""
    launch, _ = made(monkeypatch, tmp_path, CASES["decode in one part"])
    mixed, number = [], len(launch.blueprint[0].pointers)

    def read(config_at, function, places_at, extra):
        time.sleep(0)  # another thread may go on here
        places = (ctypes.c_void_p * number).from_address(places_at)
        words = [ctypes.c_uint64.from_address(place).value for place in places]
        stream = driver_launch.Config.from_address(config_at).stream
        mixed.extend([] if words == [stream + n for n in range(number)] else [(words, stream)])
        return 0

    launch.launch = read
    assert [word for word, _ in launch.blueprint[0].pointers] == list(range(number))
    order = [which for _, which in launch.blueprint[0].pointers]

    def many(first):
        addresses = [0] * (1 + max(order))
        for place, which in enumerate(order):
            addresses[which] = first + place
        for _ in range(300):
            launch(addresses, first)

    threads = [threading.Thread(target=many, args=(1000 * (1 + n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not mixed


class Interrupted(list):
    """Addresses, in the middle of whose reading something else runs."""

    def __init__(self, addresses, at, then):
        super().__init__(addresses)
        self.at, self.then = at, then

    def __getitem__(self, part):
        if self.at in range(*part.indices(len(self))) and self.then is not None:
            then, self.then = self.then, None
            then()
        return super().__getitem__(part)


def test_runs_of_addresses_are_written_at_once():
    pointers = [(0, 0), (1, 1), (2, 2), (5, 3), (6, 4), (8, 1), (9, 0)]
    found = list(driver_launch.writes_of(pointers))
    assert [write[1:] for write in found] == [(0, 0, 3), (40, 3, 5), (64, 1, 2), (72, 0, 1)]
    words, addresses = (ctypes.c_uint64 * 10)(), [2**64 - 1, 20, 30, 40, 50]
    for pack, place, begin, end in found:
        pack(words, place, *addresses[begin:end])
    assert list(words) == [2**64 - 1, 20, 30, 0, 0, 40, 50, 0, 20, 2**64 - 1]
    assert list(driver_launch.writes_of([])) == []


@ours
@pytest.mark.parametrize("depth", [1, 3])
def test_a_launch_inside_of_itself_changes_nothing(depth, monkeypatch, tmp_path):
    """A signal handler or a finaliser that calls attention again between the writing of two addresses."""
    launch, _ = made(monkeypatch, tmp_path, CASES["decode in one part"])
    seen, number = [], len(launch.blueprint[0].pointers)
    order = [which for _, which in launch.blueprint[0].pointers]

    def read(config_at, function, places_at, extra):
        places = (ctypes.c_void_p * number).from_address(places_at)
        words = [ctypes.c_uint64.from_address(place).value for place in places]
        seen.append((driver_launch.Config.from_address(config_at).stream, words))
        return 0

    def call(level):
        addresses = [0] * (1 + max(order))
        for place, which in enumerate(order):
            addresses[which] = 1000 * level + place
        inner = (lambda: call(level + 1)) if level <= depth else None
        launch(Interrupted(addresses, order[1], inner), level)

    launch.launch = read
    call(1)
    assert seen == [(n, [1000 * n + place for place in range(number)]) for n in range(depth + 1, 0, -1)]
    call(1)
    assert len(launch.free) == depth + 1  # and no more are made


@ours
def test_a_launch_that_is_cut_off_leaves_the_next_one_right(monkeypatch, tmp_path):
    """An exception of a signal handler, as Ctrl-C raises one, between two addresses."""
    launch, told = made(monkeypatch, tmp_path, CASES["decode in one part"])
    order = [which for _, which in launch.blueprint[0].pointers]

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(Interrupted([0] * (1 + max(order)), order[1], interrupt), 5)
    assert not told
    assert launch([16] * (1 + max(order)), 5) == 0
    assert len(told) == 1 and len(launch.free) == 1


@ours
@pytest.mark.parametrize(
    "change", [{"global_scratch_size": 64}, {"profile_scratch_size": 64}, {"launch_cooperative_grid": True}], ids=str
)
def test_what_is_left_to_triton(change, monkeypatch, tmp_path):
    assert made(monkeypatch, tmp_path, CASES["decode in one part"], **change)[0] is None
    assert made(monkeypatch, tmp_path, CASES["decode in one part"])[0] is not None


@ours
def test_without_a_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(driver_launch, "driver", lambda: None)
    with compiling_for(AMPERE, tmp_path):
        compiled = compiled_for(CASES["decode in one part"][1]()[0][0])
    assert driver_launch.driver_launch(compiled, (1, 1, 1), (), lambda arg: None) is None
