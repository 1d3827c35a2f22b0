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
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sdpa.problem import AttentionInputs, AttentionProblem, read_of

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")

from ahead import H200, compiling_for  # noqa: E402

from sdpa.kernels.triton import decode, driver_launch, forward, hopper  # noqa: E402
from sdpa.kernels.triton.target import Target  # noqa: E402
from sdpa.kernels.triton.tiles import tiles  # noqa: E402
from sdpa.kernels.triton.triton_private import LAID_OUT, VERSION  # noqa: E402
from sdpa.repeated import Launches, Recording  # noqa: E402

AMPERE = Target("cuda", 80, 163 << 10, 108, 40 << 20)
FUNCTION = 0x7777777700
HERE = Path(__file__).parent
PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


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
    assert found["decode chained 1"][0]["config"][7:] == [1, PROGRAMMATIC_SERIALIZATION, 1]
    assert found["decode 1"][0]["config"][7:] == [0, 0, 0]


@pytest.fixture
def told():
    """What a driver that is not here is told: the config and the words of each launch; `then` is called inside."""
    seen = SimpleNamespace(launches=[], then=lambda: None, answer=0)

    def launch(config_at, function, places_at, extra):
        seen.then()
        config = Config.from_address(config_at)
        words = (ctypes.c_void_p * seen.words).from_address(places_at)
        seen.launches.append((config.stream, [ctypes.c_uint64.from_address(word).value for word in words]))
        return seen.answer

    function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(launch)
    seen.held, seen.address = function, ctypes.cast(function, ctypes.c_void_p).value
    return seen


class Config(ctypes.Structure):
    """CUlaunchConfig, of which the stream is read."""

    _fields_ = (("sizes", ctypes.c_uint * 7), ("stream", ctypes.c_void_p))


def native_of(monkeypatch, tmp_path, case, told, **changes):
    """The first launch of a case for a driver that is not here, and how many tensors it knows."""
    monkeypatch.setattr(driver_launch, "driver", lambda: driver_launch.Driver(told.address, 0))
    target, make = case
    with compiling_for(target, tmp_path):
        launches, tensors = make()
        compiled = compiled_for(launches[0])
    for name, value in changes.items():
        setattr(compiled._run, name, value)
    numbers = {t.data_ptr(): n for n, t in enumerate(tensors)}
    args = launches[0].args
    number_of = lambda arg: numbers[arg.data_ptr()] if isinstance(arg, torch.Tensor) else None  # noqa: E731
    native = driver_launch.driver_launch(compiled, (3, 1, 1), args, number_of)
    if native is not None:
        told.words = len(array("i", native[-2])) // 2
    return native, len(tensors)


def launches_of(native, count, stream_of, otherwise=None):
    """Recorded launches of one launch."""
    nothing = torch.zeros(16)
    return Launches(
        Recording(
            count, -1, ((),), lambda: nothing, ((otherwise, native),), (-1,), lambda: False, 0, lambda tensors: True,
            unaligned=False, stream_of=stream_of,
        )
    )  # fmt: skip


def order_of(native):
    """Which tensor's address stands in each of a launch's words."""
    pairs = array("i", native[-2]).tolist()
    assert pairs[::2] == list(range(len(pairs) // 2))
    return pairs[1::2]


@ours
def test_threads_do_not_share_what_they_fill(monkeypatch, tmp_path, told):
    """Each launch finds the addresses and the stream that its own thread has written."""
    native, count = native_of(monkeypatch, tmp_path, CASES["decode in one part"], told)
    told.then, own = (lambda: time.sleep(0)), threading.local()  # another thread may go on there
    launch, order = launches_of(native, count, lambda device: own.stream), order_of(native)
    wanted = {}

    def many(stream):
        own.stream, tensors = stream, [torch.zeros(8) for _ in range(count)]
        wanted[stream] = [tensors[number].data_ptr() for number in order]
        for _ in range(300):
            assert launch(*tensors) is not None

    threads = [threading.Thread(target=many, args=(1000 * (1 + n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told.launches) == 1200
    assert all(words == wanted[stream] for stream, words in told.launches)


@ours
@pytest.mark.parametrize("depth", [1, 3])
def test_a_launch_inside_of_itself_changes_nothing(depth, monkeypatch, tmp_path, told):
    """A signal handler or a finaliser that calls attention again while the driver is called."""
    native, count = native_of(monkeypatch, tmp_path, CASES["decode in one part"], told)
    order, level = order_of(native), [0]
    launch = launches_of(native, count, lambda device: level[0])
    tensors = [[torch.zeros(8) for _ in range(count)] for _ in range(depth + 1)]

    def inside():
        if level[0] < depth:
            call(level[0] + 1)

    def call(to):
        before, level[0] = level[0], to
        assert launch(*tensors[to]) is not None
        level[0] = before

    told.then = inside
    call(0)
    wanted = [(n or None, [tensors[n][number].data_ptr() for number in order]) for n in range(depth, -1, -1)]
    assert told.launches == wanted


@ours
def test_an_exception_before_a_launch_leaves_the_next_one_right(monkeypatch, tmp_path, told):
    """Of a signal handler, as Ctrl-C raises one."""
    native, count = native_of(monkeypatch, tmp_path, CASES["decode in one part"], told)
    raised = [KeyboardInterrupt]

    def stream_of(device):
        if raised:
            raise raised.pop()
        return 5

    launch, tensors = launches_of(native, count, stream_of), [torch.zeros(8) for _ in range(count)]
    with pytest.raises(KeyboardInterrupt):
        launch(*tensors)
    assert not told.launches
    assert launch(*tensors) == (None,)
    assert told.launches == [(5, [tensors[number].data_ptr() for number in order_of(native)])]


@ours
def test_what_the_driver_refuses_is_launched_otherwise(monkeypatch, tmp_path, told):
    native, count = native_of(monkeypatch, tmp_path, CASES["decode in one part"], told)
    told.answer, asked, tensors = 1, [], [torch.zeros(8) for _ in range(count)]
    launch = launches_of(native, count, lambda device: 5, lambda *given: asked.append(given))
    assert launch(*tensors) == (None,)
    ((given, addresses, stream),) = asked
    assert [t.data_ptr() for t in given] == addresses and len(given) == count + 1 and stream == 5
    assert launches_of(native, count, lambda device: 5)(*tensors) is None


@ours
def test_more_than_there_is_room_for_is_left_to_triton(monkeypatch, tmp_path, told):
    monkeypatch.setattr(driver_launch, "MAX_WORDS", 4)
    assert native_of(monkeypatch, tmp_path, CASES["decode in one part"], told)[0] is None


@ours
@pytest.mark.parametrize(
    "change", [{"global_scratch_size": 64}, {"profile_scratch_size": 64}, {"launch_cooperative_grid": True}], ids=str
)
def test_what_is_left_to_triton(change, monkeypatch, tmp_path, told):
    assert native_of(monkeypatch, tmp_path, CASES["decode in one part"], told, **change)[0] is None
    assert native_of(monkeypatch, tmp_path, CASES["decode in one part"], told)[0] is not None


@ours
def test_without_a_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(driver_launch, "driver", lambda: None)
    with compiling_for(AMPERE, tmp_path):
        compiled = compiled_for(CASES["decode in one part"][1]()[0][0])
    assert driver_launch.driver_launch(compiled, (1, 1, 1), (), lambda arg: None) is None
