"""What runs a repeated call: recognition, one direction of a prepared call, recorded launches; life without them."""

from __future__ import annotations

import ctypes
import gc
import re
import struct
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel as torch_kernel

import sdpa
import sdpa.nn
from sdpa import autocast, entry, repeated
from sdpa.alignment import ADDRESS_BITS
from sdpa.dispatch.caches import LAST, clear_caches
from sdpa.repeated import in_python

built = pytest.mark.skipif(not repeated.BUILT, reason="sdpa/repeated was not built: no Python.h")
KEPT = torch.zeros(8)


def recording(**changes):
    """Launches of nothing, of two tensors given and one made."""
    plain = repeated.Recording(
        2, -1, (((8,), (1,), torch.float32),), lambda size, stride, dtype: KEPT, (), (0, -1), lambda: False, 0,
        lambda tensors: True, unaligned=False,
    )  # fmt: skip
    return plain._replace(**changes)


def words(*numbers):
    return struct.pack(f"{len(numbers)}i", *numbers)


def driver(**changes):
    """A launch by the driver, as `driver_launch` describes one."""
    parts = {
        "launch": 1, "replace": 1, "function": 1, "grid": (1, 1, 1), "block": (1, 1, 1),
        "shared": 0, "dependent": False,
        "words": bytes(16), "maps": b"", "arguments": words(0, 8), "pointers": words(0, 0, 1, 2), "bases": b"",
    } | changes  # fmt: skip
    return ((None, tuple(parts.values())),)


# -- recorded launches ------------------------------------------------------------------------------------------------


@built
@pytest.mark.parametrize("field", ["pointers", "bases"])
@pytest.mark.parametrize("place", [(-1, 0), (1 << 20, 0), (0, -1), (0, 3)])
def test_places_that_are_not_there_are_refused(field, place):
    with pytest.raises(ValueError, match="not there"):
        repeated.Launches(recording(steps=driver(**{field: words(*place), "maps": bytes(128)})))


@built
@pytest.mark.parametrize(
    "changes",
    [{"words": bytes(8 * 513)}, {"maps": bytes(128 * 17)}, {"arguments": bytes(4 * 600)}, {"words": bytes(7)}],
    ids=["words", "maps", "arguments", "part of a word"],
)
def test_more_than_there_is_room_for_is_refused(changes):
    with pytest.raises(ValueError, match="too many arguments"):
        repeated.Launches(recording(steps=driver(**changes)))


@built
@pytest.mark.parametrize("changes", [{"given": 48}, {"given": -1}, {"forms": ()}, {"finish": (0,) * 49}], ids=str)
def test_numbers_that_do_not_fit_are_refused(changes):
    with pytest.raises(ValueError, match="too many tensors"):
        repeated.Launches(recording(**changes))


@built
def test_a_recording_that_was_refused_is_never_run():
    launches = repeated.Launches.__new__(repeated.Launches)
    assert launches(KEPT, KEPT) is None
    with pytest.raises(ValueError, match="not there"):
        launches.__init__(recording(steps=driver(bases=words(1 << 20, 0))))
    assert launches(KEPT, KEPT) is None


@built
def test_what_is_no_recording_is_refused():
    for given in ((), (1, 2, 3), None):
        with pytest.raises(TypeError):
            repeated.Launches(given)
    with pytest.raises(TypeError, match="lists"):
        repeated.Launches(recording(unseen=(None,)))
    launches = repeated.Launches(recording())
    with pytest.raises(ValueError, match="once"):
        launches.__init__(recording())
    with pytest.raises(TypeError, match="by position"):
        launches(KEPT, query=KEPT)


@built
def test_launches_return_what_is_asked_for():
    q, k = torch.ones(3), torch.ones(4)
    assert repeated.Launches(recording())(q, k) == (KEPT, None)
    of_all = repeated.Launches(recording(finish=lambda read, made: (read, made)))
    (read, made) = of_all(q, k)
    assert read[0] is q and read[1] is k and made[0] is KEPT
    for number in (0, 1, 3):
        assert of_all(*[q] * number) is None


@built
def test_launches_take_the_ordinary_way():
    """Where somebody watches, memory is gone, or an address is another than the kernel's."""
    q, k, watching = torch.zeros(3), torch.zeros(4), []
    launches = repeated.Launches(recording(unseen=(watching,)))
    assert launches(q, k) is not None
    watching.append(print)
    assert launches(q, k) is None
    assert repeated.Launches(recording(watched=lambda: True))(q, k) is None
    checked = []
    low = repeated.Launches(recording(low=1 << 62, check_memory=checked.append))
    assert low(q, k) is None and checked[0][:2] == (q, k)
    assert repeated.Launches(recording(low=1 << 62))(q, k) is not None
    aligned = repeated.Launches(recording(unaligned=None))
    assert aligned(q, k) is not None and aligned(q, torch.zeros(9)[1:]) is None
    odd = repeated.Launches(recording(unaligned=(False, True, False)))
    assert odd(q, k) is None and odd(q, torch.zeros(9)[1:]) is not None


@built
def test_tensors_are_copied_and_filled():
    q, k, own = torch.zeros(3), torch.zeros(4), torch.full((8,), 7.0)
    steps = recording(
        copy=lambda given: [given[0], given[1] + 1],
        fills=((0, 5.0),),
        empty=lambda size, stride, dtype: own,
        finish=lambda read, made: (*read, *made),
    )
    first, second, made = repeated.Launches(steps)(q, k)
    assert first is q and torch.equal(second, k + 1) and torch.equal(made, torch.full((8,), 5.0))
    with pytest.raises(ValueError, match="no such tensor"):
        repeated.Launches(recording(fills=((1, 5.0),)))(q, k)
    with pytest.raises(ValueError, match="copies"):
        repeated.Launches(recording(copy=lambda given: given[:1]))(q, k)


@built
def test_a_librarys_function_gets_all_addresses():
    q, k, seen = torch.zeros(3), torch.zeros(4), []

    def run(handle, addresses, stream):
        seen.append((handle, list(addresses[:3]), stream))
        return len(seen) - 1

    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p)(run)
    address = ctypes.cast(function, ctypes.c_void_p).value
    launches = repeated.Launches(recording(steps=((None, (address, 77)),), device=0, stream_of=lambda device: 5))
    assert launches(q, k) is None  # its tensors are on another device
    launches = repeated.Launches(recording(steps=((None, (address, 77)),)))
    assert launches(q, k) == (KEPT, None)
    assert seen == [(77, [q.data_ptr(), k.data_ptr(), KEPT.data_ptr()], None)]
    assert launches(q, k) is None  # it failed


@built
def test_parts_of_the_last_tensor_have_addresses_of_their_own():
    q, k, seen = torch.zeros(3), torch.zeros(4), []

    def run(handle, addresses, stream):
        seen.append(list(addresses[:5]))
        return 0

    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p)(run)
    address = ctypes.cast(function, ctypes.c_void_p).value
    launches = repeated.Launches(recording(steps=((None, (address, 0)),), parts=(0, 16)))
    assert launches(q, k) == (KEPT, None)
    base = KEPT.data_ptr()
    assert seen == [[q.data_ptr(), k.data_ptr(), base, base, base + 16]]
    with pytest.raises(ValueError, match="too many tensors"):
        repeated.Launches(recording(parts=(0,) * 46))
    with pytest.raises(TypeError):
        repeated.Launches(recording(parts=("end",)))


@built
@pytest.mark.parametrize("part", ["watched", "empty", "finish", "check_memory", "copy", "stream_of"])
def test_an_exception_reaches_the_caller(part):
    def fail(*_):
        raise KeyError(part)

    launches = repeated.Launches(recording(**{part: fail, "low": 1 << 62}))
    with pytest.raises(KeyError, match=part):
        launches(KEPT, KEPT)


# -- torch's own operator ---------------------------------------------------------------------------------------------


@pytest.fixture(params=[pytest.param(repeated, marks=built, id="built"), in_python])
def operator(request):
    return request.param.Operator


def test_an_operator_gets_its_options(operator):
    seen = []

    def function(*given, **named):
        seen.append((given, named))
        return ["out", "lse"]

    assert operator(function, (4, 5), {"scale": 2.0})(1, 2, 3) == ("out",)
    assert operator(function, (), {})(1, 2, 3) == ("out",)
    assert seen == [((1, 2, 3, 4, 5), {"scale": 2.0}), ((1, 2, 3), {})]


@pytest.mark.parametrize("fails", ["function", "no results"])
def test_exceptions_of_an_operator_reach_the_caller(fails, operator):
    def fail(*_):
        raise KeyError(fails)

    with pytest.raises((KeyError, IndexError)):
        operator(fail if fails == "function" else lambda *_: (), (), {})(KEPT)


# -- one direction of a prepared call ---------------------------------------------------------------------------------


class Direction(repeated.Repeated):
    def __init__(self, again):
        self.again, self.choice, self.told = again, "a choice", []

    def first_time(self, tensors):
        return ("first time", *tensors)

    def recovered(self, error, tensors):
        self.told.append(error)
        return ("recovered", *tensors)


@pytest.fixture(params=[pytest.param(repeated.Repeated, marks=built, id="built"), in_python.Repeated])
def direction(request, monkeypatch):
    if request.param is in_python.Repeated:
        monkeypatch.setitem(in_python.PARTS, "last", LAST)
        return type("InPython", (in_python.Repeated,), dict(Direction.__dict__))
    return Direction


def test_the_launches_come_first(direction):
    assert direction(None)(1, 2) == ("first time", 1, 2)
    assert direction(lambda *tensors: ("again", *tensors))(1, 2) == ("again", 1, 2)
    assert direction(lambda *tensors: None)(1, 2) == ("first time", 1, 2)
    assert sdpa.last_choice() == "a choice"


def test_errors_are_recovered_from_with_their_traceback(direction):
    def again(*tensors):
        raise RuntimeError("out of it")

    call = direction(again)
    assert call(1) == ("recovered", 1)
    assert "raise RuntimeError" in "".join(traceback.format_exception(call.told[0]))


def test_an_interruption_is_no_error(direction):
    def again(*tensors):
        raise KeyboardInterrupt

    call = direction(again)
    with pytest.raises(KeyboardInterrupt):
        call(1)
    assert not call.told


@built
def test_a_direction_that_holds_itself_is_collected():
    class Held(Direction):
        pass

    alive = []
    for _ in range(5):
        call = Held(None)
        call.again = lambda *tensors, call=call: None
        call.told = alive
    del call
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is Held]


# -- recognition ------------------------------------------------------------------------------------------------------


def case(name, qkv):
    q, k, v = qkv
    attend = sdpa.scaled_dot_product_attention
    mask = sdpa.Mask(causal=True)
    allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    rows = [t[0].transpose(0, 1).contiguous() for t in qkv]
    return {
        "plain": lambda: attend(q, k, v),
        "causal": lambda: attend(q, k, v, is_causal=True),
        "Mask": lambda: attend(q, k, v, mask),
        "Mask of tensors": lambda: attend(q, k, v, sdpa.Mask(lengths=torch.tensor([4]))),
        "bool mask": lambda: attend(q, k, v, allowed),
        "scale": lambda: attend(q, k, v, scale=0.5),
        "softcap": lambda: attend(q, k, v, softcap=2.0),
        "sinks": lambda: attend(q, k, v, sinks=torch.zeros(2)),
        "return_lse": lambda: attend(q, k, v, return_lse=True),
        "kernel": lambda: attend(q, k, v, kernel="math"),
        "gradients": lambda: attend(q.requires_grad_(), k, v),
        "varlen": lambda: sdpa.varlen_attention(*rows, ends, ends, 5, 5),
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16)(attend)(q, k, v),
        "autocast of float64": lambda: torch.autocast("cpu", torch.bfloat16)(attend)(*(t.double() for t in qkv)),
        "dropout": lambda: torch.manual_seed(7) and attend(q, k, v, dropout_p=0.5),
        "weights": lambda: torch.no_grad()(layer)(q[0], k[0], v[0])[1],
        "sdpa_kernel": lambda: sdpa.sdpa_kernel(["vendor_math", "math"])(attend)(q, k, v),
        "torch's toggles": lambda: torch_kernel(SDPBackend.MATH)(attend)(q, k, v),
        "deterministic": lambda: deterministic(lambda: attend(q, k, v)),
    }[name]


def deterministic(call):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(before)


torch.manual_seed(0)
layer = sdpa.nn.MultiheadAttention(16, 2)


CASES = ["plain", "causal", "Mask", "Mask of tensors", "bool mask", "scale", "softcap", "sinks", "return_lse", "kernel",
         "gradients", "varlen", "autocast", "autocast of float64", "dropout", "weights", "sdpa_kernel",
         "torch's toggles", "deterministic"]  # fmt: skip


@built
@pytest.mark.parametrize("name", CASES)
def test_a_second_call_is_recognised_in_cpp(name, monkeypatch):
    """So its state there is that of entry.py."""
    clear_caches()
    call, asked = case(name, [torch.randn(1, 2, 8, 16) for _ in range(3)]), []
    want, whole = call(), entry.unrecognised

    def unrecognised(*args):
        asked.append(args)
        return whole(*args)

    monkeypatch.setattr(entry, "unrecognised", unrecognised)
    got = call()
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert not asked


@built
def test_what_is_not_plain_is_not_recognised():
    clear_caches()
    q = torch.randn(1, 2, 8, 16)
    options, same = (None, 0.0, False, None, False, None, None), (q, q.clone(), q.clone())
    sdpa.scaled_dot_product_attention(*same)

    def ask(tensors=same, options=options, returns_lse=False):
        return repeated.recognise(entry.DENSE, tensors, options, returns_lse, None, None)

    assert torch.is_tensor(ask())
    for zero in (0, False):  # the same number
        assert torch.is_tensor(ask(options=(None, zero, *options[2:])))
    for place, value in (
        (1, True),
        (1, 1),
        (1, "0"),
        (2, 1),
        (3, 1),
        (3, True),
        (4, None),
        (5, 2),
        (5, True),
        (0, "mask"),
    ):
        assert ask(options=(*options[:place], value, *options[place + 1 :])) is NotImplemented
    assert ask(returns_lse=0) is NotImplemented
    assert ask(tensors=(q, q, None)) is NotImplemented
    assert ask(tensors=(None, q, q)) is NotImplemented
    assert ask(tensors=(q, q)) is NotImplemented
    assert ask(options=options[:6]) is NotImplemented
    assert repeated.recognise() is NotImplemented
    with torch.autocast("cpu"):
        assert ask() is NotImplemented
        sdpa.scaled_dot_product_attention(*same)
        assert ask().dtype == torch.bfloat16
    with torch.autograd.forward_ad.dual_level():
        assert ask() is NotImplemented
    with torch.overrides.TorchFunctionMode():
        assert ask() is NotImplemented
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert ask() is NotImplemented
    assert torch.is_tensor(ask())


@built
def test_an_error_of_a_prepared_call_reaches_the_caller():
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    clear_caches()
    sdpa.scaled_dot_product_attention(q, k, v)
    ((state, latest),) = entry.CALLS.recent.items()

    def fail(*_):
        raise ZeroDivisionError("inside")

    entry.CALLS.recent[state] = ((latest[0][0], fail, *latest[0][2:]),)
    with pytest.raises(ZeroDivisionError, match="inside"):
        sdpa.scaled_dot_product_attention(q, k, v)
    clear_caches()


@built
@pytest.mark.parametrize("name", CASES)
def test_no_reference_is_lost_or_kept(name, others_frozen):
    """Counted of the tensors, and of all objects that the collector knows."""
    tensors = [torch.randn(1, 2, 8, 16) for _ in range(3)]
    call = case(name, tensors)
    for _ in range(3):
        call()
    watched = [*tensors, torch.float32, entry.DENSE, entry.CALLS.recent]

    def counts():
        gc.collect()  # the count of None never changes from Python 3.12 on
        return [sys.getrefcount(o) for o in watched], sys.getrefcount(None), len(gc.get_objects())

    for attempt in range(3):  # what other tests left behind may end meanwhile, but not every time
        before, nothing, objects = counts()
        for _ in range(500):
            call()
        after, none_now, objects_now = counts()
        assert after == before
        if abs(none_now - nothing) < 400 and abs(objects_now - objects) < 100:
            break
        assert attempt < 2, (none_now - nothing, objects_now - objects)


WITHOUT = """
    import sys
    sys.modules["sdpa.repeated._native"] = None
    import torch, sdpa
    from sdpa import repeated
    from sdpa.cli.info import libraries
    from test_repeated import CASES, results_of
    assert not repeated.BUILT and "was not built" in libraries()["repeated calls"]
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    rows = [t[0].detach().transpose(0, 1).contiguous() for t in (q, k, v)]
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    for options in ({}, {"is_causal": True}, {"scale": 0.5}):
        for learns in (True, False):
            with torch.set_grad_enabled(learns):
                want = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
                for _ in range(3):
                    got = sdpa.scaled_dot_product_attention(q, k, v, **options)
                    torch.testing.assert_close(got, want)
                    assert sdpa.last_choice().kernel.name == "cpu_flash"
            if learns:
                for a, b in zip(torch.autograd.grad(got.sum(), (q, k, v)), torch.autograd.grad(want.sum(), (q, k, v))):
                    torch.testing.assert_close(a, b)
    torch.save({name: results_of(name) for name in CASES}, sys.argv[2])
"""


def results_of(name):
    """What a case's first call returns and two like it."""
    torch.manual_seed(1)
    call = case(name, [torch.randn(1, 2, 8, 16) for _ in range(3)])
    return [call() for _ in range(3)]


def test_life_without_it(tmp_path):
    """Results, gradients and the choice of kernels are the same; `sdpa info` says why calls take longer."""
    text = f"import sys; sys.path.insert(0, sys.argv[1])\n{textwrap.dedent(WITHOUT)}"
    command = [sys.executable, "-c", text, str(Path(__file__).parent), str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    without = torch.load(tmp_path / "results")
    for name in CASES:
        torch.testing.assert_close(results_of(name), without[name], rtol=0, atol=0)


# -- what looks like a tensor like one before -------------------------------------------------------------------------


IMITATIONS = {
    "zeros without memory": lambda q: torch._efficientzerotensor(q.shape),
    "wrapped": lambda q: torch._to_functional_tensor(q.clone()),
}


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", ["zeros without memory", "wrapped"])
def test_tensors_without_memory_are_not_taken_for_others(name, learns):
    clear_caches()
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    k.requires_grad_(learns)
    for _ in range(3):
        sdpa.scaled_dot_product_attention(q, k, v)
    other = IMITATIONS[name](q)
    want = torch.nn.functional.scaled_dot_product_attention(torch.zeros_like(q) if "zeros" in name else q, k, v)
    for _ in range(3):
        got = sdpa.scaled_dot_product_attention(other, k, v)
        got = torch._from_functional_tensor(got) if torch._is_functional_tensor(got) else got
        torch.testing.assert_close(got, want)


def test_a_sparse_tensor_is_refused_in_torchs_words():
    q = torch.randn(1, 2, 8, 16)
    for _ in range(3):
        sdpa.scaled_dot_product_attention(q, q.clone(), q.clone())
    with pytest.raises((RuntimeError, NotImplementedError)):
        sdpa.scaled_dot_product_attention(q.to_sparse(), q.clone(), q.clone())


def test_the_limits_of_the_two_languages():
    text = (Path(repeated.__file__).parent / "shared.h").read_text()
    assert int(re.search(r"kAlignmentBits = (\d+);", text)[1]) == ADDRESS_BITS
    assert not repeated.BUILT or (repeated.MAX_TENSORS, repeated.MAX_WORDS, repeated.MAX_MAPS) == (48, 512, 16)


# -- casts of autocast ------------------------------------------------------------------------------------------------


class OnGPU:
    """What a tensor of a GPU says of itself, to one that only asks."""

    is_cuda = True

    def __init__(self, tensor):
        self.tensor = tensor

    def __getattr__(self, name):
        return getattr(self.tensor, name)


@pytest.mark.parametrize("fails", [False, True])
def test_casts_are_launched_only_where_each_is_one(fails, monkeypatch):
    """float64 stays under autocast. What cannot be launched is cast one by one."""
    recorded = []

    def record(tensors, dtype):
        recorded.append(tensors)
        if fails:
            raise RuntimeError("no compiler")
        return lambda *tensors: "launched"

    monkeypatch.setattr(autocast, "cast", lambda t, dtype: t.tensor.double() if t.dtype != torch.float64 else t)
    monkeypatch.setitem(sys.modules, "sdpa.kernels.triton.cast", SimpleNamespace(record=record))
    for dtype, launched in ((torch.float32, True), (torch.float64, False)):
        casts, tensors = autocast.Casts(torch.bfloat16), [OnGPU(torch.ones(2, dtype=dtype)) for _ in range(3)]
        results = [casts(*tensors) for _ in range(3)]
        assert all(isinstance(result, list) for result in results[:2])
        assert (results[2] == "launched") == (launched and not fails)
    assert len(recorded) == 1
