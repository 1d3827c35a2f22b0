"""sdpa_kernel: what may run, in this thread or task only, nested, restored, under torch.compile, and what it costs."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel as torch_kernel

import helpers
import sdpa
from sdpa import last_choice, sdpa_kernel
from sdpa.dispatch import tracing
from sdpa.dispatch.catalog import KERNELS, by_name
from sdpa.dispatch.context import Setting, effective
from sdpa.dispatch.select import backward_setting, weights_setting
from sdpa.problem import AttentionProblem
from sdpa.testing import Case, able

attention = sdpa.scaled_dot_product_attention
ABLE = [k.name for k in KERNELS if not able(k.name, Case())]
qkv = partial(helpers.qkv, B=1, H=2, M=16, N=16)
CALLS_OF_A_TOGGLE = 8


def ran(**options):
    """The kernel that a plain call runs with."""
    attention(*qkv(), **options)
    return last_choice().kernel.name


@pytest.mark.parametrize("name", ABLE)
def test_names_of_kernels(name):
    """A name that is also a family's (math) allows the family."""
    meant = {k.name for k in KERNELS if name in (k.name, k.family)}
    with sdpa_kernel(name):
        assert ran() in meant
    assert ran(kernel=name) in meant
    with sdpa_kernel([name]):
        assert ran() in meant


@pytest.mark.parametrize("family", ["flash", "math"])
def test_families_and_members_of_torch(family):
    member = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}[family]
    for given in (family, [family], member, [member], (family,)):
        with sdpa_kernel(given):
            assert by_name()[ran()].family == family
    assert by_name()[ran(kernel=family)].family == family


def test_lists_mix_names_families_and_members():
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, "vendor_cpu_flash", "efficient"]):
        assert ran() == "vendor_cpu_flash"


def test_all_five_members_are_known():
    for member in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.OVERRIDEABLE):
        with sdpa_kernel(member), pytest.raises(sdpa.NoKernelError):
            ran()
    with pytest.raises(ValueError, match="unknown kernel or backend"):
        sdpa_kernel(SDPBackend.ERROR)


def test_set_priority_prefers_in_the_order_given():
    orders = [["math", "flash"], ["vendor_math", "math"], ["math", "vendor_math"], ["vendor_cpu_flash", "cpu_flash"]]
    for order in orders:
        with sdpa_kernel(order, set_priority=True):
            name = ran()
        assert order[0] in (name, by_name()[name].family)


def test_priority_skips_what_is_not_able():
    with sdpa_kernel(["cudnn", "vendor_flash", "math"], set_priority=True):
        assert by_name()[ran()].family == "math"


def test_strict_refuses_to_fall_to_math():
    hidden = [k.name for k in KERNELS if k.family != "math" and not able(k.name, Case())]
    with torch_kernel(SDPBackend.MATH), sdpa_kernel(strict=True):
        with pytest.raises(sdpa.NoKernelError, match="strict mode: only math is able and allowed") as error:
            ran()
        assert all(name in str(error.value) for name in hidden)
        assert "cpu_flash: able, but not allowed" in str(error.value)
    with sdpa_kernel("math", strict=True):
        assert by_name()[ran()].family == "math"  # asked for by name: no fall
    with sdpa_kernel(["efficient", "math"]):
        assert by_name()[ran()].family == "math"
    with sdpa_kernel(["efficient", "math"], strict=True), pytest.raises(sdpa.NoKernelError, match="strict mode"):
        ran()
    with sdpa_kernel(["efficient"]), pytest.raises(sdpa.NoKernelError, match="asked for: efficient"):
        ran()  # also without
    with sdpa_kernel(strict=True):
        assert by_name()[ran()].family == "flash"


NO_NAME = r"^a kernel or backend must be a str or SDPBackend, but got"
WRONG = {
    "number": (lambda: sdpa_kernel(3), f"{NO_NAME} int$"),
    "nothing": (lambda: sdpa_kernel(None), f"{NO_NAME} NoneType$"),
    "one of several": (lambda: sdpa_kernel(["math", 3]), f"{NO_NAME} int$"),
    "list in a list": (lambda: sdpa_kernel([["math"]]), f"{NO_NAME} list$"),
    "two": (lambda: sdpa_kernel("math", "flash"), r"'set_priority' must be bool, not str; several .* into one list$"),
    "strict": (lambda: sdpa_kernel("math", strict=1), r"^sdpa_kernel\(\): argument 'strict' must be bool, not int; "),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_name_is_told_in_one_sentence(name):
    call, text = WRONG[name]
    with pytest.raises(TypeError, match=text) as error:
        call()
    assert "\n" not in str(error.value) and error.value.__context__ is None


def test_a_generator_of_names():
    with sdpa_kernel(name for name in ("vendor_math", "nonsense")[:1]):
        assert ran() == "vendor_math"


def test_nesting_and_restoring():
    before = ran()
    with sdpa_kernel("math"):
        with sdpa_kernel("vendor_cpu_flash"):
            assert ran() == "vendor_cpu_flash"
            with sdpa_kernel():
                assert ran() == before
        assert by_name()[ran()].family == "math"
        assert ran(kernel="vendor_cpu_flash") == "vendor_cpu_flash"
    assert ran() == before


def test_exceptions_restore():
    before = ran()
    with pytest.raises(KeyError), sdpa_kernel("vendor_math"):
        assert ran() == "vendor_math"
        raise KeyError
    assert ran() == before
    with pytest.raises(ValueError), sdpa_kernel("nonsense"):
        pass
    assert ran() == before


def test_one_object_serves_twice():
    setting = sdpa_kernel("vendor_math")
    for _ in range(2):
        with setting:
            assert ran() == "vendor_math"


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match=r"known families: flash, efficient, cudnn, math; known kernels: .*cpu_flash"):
        sdpa_kernel("warp_drive")
    with pytest.raises(ValueError, match="'warp_drive'"):
        sdpa_kernel(["math", "warp_drive"])


def test_two_threads_at_once():
    turns, seen = threading.Barrier(2), {"vendor_cpu_flash": set(), "vendor_math": set()}

    def work(name):
        with sdpa_kernel(name):
            for _ in range(50):
                turns.wait(timeout=10)
                seen[name].add(ran())

    threads = [threading.Thread(target=work, args=(name,)) for name in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {name: {name} for name in seen}


def test_a_new_thread_starts_without_a_setting():
    found = []
    with sdpa_kernel("vendor_math"):
        thread = threading.Thread(target=lambda: found.append(ran()))
        thread.start()
        thread.join()
    assert found == [ran()]


def test_two_tasks_at_once():
    async def work(name):
        with sdpa_kernel(name):
            for _ in range(5):
                await asyncio.sleep(0)
                assert ran() == name

    async def both():
        await asyncio.gather(work("vendor_cpu_flash"), work("vendor_math"))

    asyncio.run(both())


def test_the_switches_of_torch_are_honoured():
    with torch_kernel(SDPBackend.MATH):
        assert by_name()[ran()].family == "math"
        assert ran(kernel="vendor_cpu_flash") == "vendor_cpu_flash"  # the closer word holds
        with sdpa_kernel("vendor_cpu_flash"):
            assert ran() == "vendor_cpu_flash"
        with sdpa_kernel("flash"), pytest.raises(sdpa.NoKernelError, match="torch's switches off for: flash"):
            ran()
    with torch_kernel([SDPBackend.FLASH_ATTENTION]):
        assert by_name()[ran()].family == "flash"


def test_backward_keeps_the_setting_of_forward():
    for name, given in (("vendor_cpu_flash", "vendor_cpu_flash"), ("math", "math")):
        leaves = qkv(grad=True)
        with sdpa_kernel(given):
            out = attention(*leaves)
        with sdpa_kernel("math" if name != "math" else "vendor_cpu_flash"):
            out.sum().backward()
        assert last_choice().kernel.name == name and last_choice().problem.direction == "backward"


def test_backward_keeps_kernel_by_name():
    leaves = qkv(grad=True)
    out = attention(*leaves, sdpa.Mask(causal=True, window=(3, 0)), kernel="math")
    out.sum().backward()
    assert last_choice().kernel.name == "math" and last_choice().problem.direction == "backward"


def enter_and_exit():
    with sdpa_kernel("math"):
        pass


def test_entering_and_leaving_takes_few_calls():
    """A toggle around a small call is not to be felt beside it."""
    enter_and_exit()
    assert helpers.python_calls(enter_and_exit) <= CALLS_OF_A_TOGGLE


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    torch._dynamo.reset()


def test_toggling_around_a_compiled_function(compiled):
    function = compiled(lambda q, k, v: attention(q, k, v, is_causal=True) * 1)
    names = []
    wanted = ["vendor_math", "vendor_cpu_flash", "vendor_math", "cpu_flash"]
    for name in wanted:
        with sdpa_kernel(name):
            function(*qkv())
        names.append(last_choice().kernel.name)
    assert names == wanted


def test_toggling_inside_a_compiled_function(compiled):
    @compiled
    def function(q, k, v):
        with sdpa_kernel("vendor_math"):
            first = attention(q, k, v)
        with sdpa_kernel("vendor_cpu_flash"):
            return first + attention(q, k, v)

    out = function(*qkv())
    assert last_choice().kernel.name == "vendor_cpu_flash"
    assert torch.allclose(out, 2 * attention(*qkv()), atol=1e-6)
    with sdpa_kernel("math"):  # the closer word holds
        function(*qkv())
    assert last_choice().kernel.name == "vendor_cpu_flash"


def test_kernel_argument_in_a_compiled_function(compiled):
    function = compiled(lambda q, k, v: attention(q, k, v, kernel="vendor_math") + 1)
    function(*qkv())
    assert last_choice().kernel.name == "vendor_math"


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_training_under_compile_keeps_the_setting(inside, compiled):
    def inner(q, k, v):
        if inside:
            with sdpa_kernel("math"):
                return attention(q, k, v).sum()
        return attention(q, k, v).sum()

    function = compiled(inner)
    with sdpa_kernel("vendor_cpu_flash" if inside else "math"):
        function(*qkv(grad=True)).backward()
    assert last_choice().kernel.name == "math" and last_choice().problem.direction == "backward"


def family():
    return by_name()[ran()].family


def entered(name):
    """A generator inside of a with-block."""
    with sdpa_kernel(name):
        while True:
            yield ran()


def test_a_generator_that_ends_inside_of_another_block_leaves_that_as_it_is():
    before = ran()
    inner = entered("vendor_math")
    assert next(inner) == "vendor_math"
    with sdpa_kernel("vendor_cpu_flash"):
        inner.close()
        assert ran() == "vendor_cpu_flash"
    assert ran() == before, "what the block found when it was entered has ended since"


def test_a_generator_closed_in_another_thread():
    before, inner = ran(), entered("vendor_math")
    next(inner)
    seen = []

    def work():
        with sdpa_kernel("vendor_cpu_flash"):
            inner.close()
            seen.append(ran())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["vendor_cpu_flash"] and ran() == before


def test_the_real_outcome_is_not_hidden():
    """Of a generator that raises in another context than it was entered in."""

    def failing():
        with sdpa_kernel("vendor_math"):
            yield
            raise KeyError("the real outcome")

    inner = failing()
    contextvars.copy_context().run(next, inner)
    with pytest.raises(KeyError, match="the real outcome"):
        next(inner)


@pytest.mark.parametrize("copied", ["before", "inside"])
def test_copied_contexts(copied):
    """A block that is left in a copy ends where it was entered, too; one that is left there stays in the copy."""
    before, block = ran(), sdpa_kernel("vendor_math")
    copy = contextvars.copy_context()
    with sdpa_kernel("vendor_cpu_flash"):
        block.__enter__()
        if copied == "inside":
            copy = contextvars.copy_context()
        assert ran() == "vendor_math"
        copy.run(block.__exit__, None, None, None)
        assert ran() == "vendor_cpu_flash"
        assert copy.run(ran) == ("vendor_cpu_flash" if copied == "inside" else before)
    with block:
        copy = contextvars.copy_context()
    assert (ran(), copy.run(ran)) == (before, "vendor_math")


def test_an_async_generator_stepped_by_several_tasks():
    before = ran()

    async def steps():
        with sdpa_kernel("vendor_math"):
            yield ran()
            yield ran()

    async def main():
        source, seen = steps(), []

        async def step(name):
            with sdpa_kernel(name):
                seen.append(await anext(source, "end"))
                seen.append(ran())

        for name in ("vendor_cpu_flash", "math", "vendor_cpu_flash"):
            await asyncio.create_task(step(name))
        return seen

    seen = asyncio.run(main())
    assert seen[0] == "vendor_math" and seen[1] == "vendor_math", "a task shares its context with what it steps"
    assert seen[3] in by_name() and by_name()[seen[3]].family == "math"
    assert seen[4:] == ["end", "vendor_cpu_flash"] and ran() == before


def test_one_object_inside_of_itself():
    before, block = ran(), sdpa_kernel("vendor_math")
    with block, sdpa_kernel("vendor_cpu_flash"):
        with block:
            assert ran() == "vendor_math"
        assert ran() == "vendor_cpu_flash"
    assert ran() == before


def test_one_object_in_several_threads():
    block, turns, seen = sdpa_kernel("vendor_math"), threading.Barrier(4), []

    def work():
        for _ in range(20):
            turns.wait(timeout=10)
            with block:
                seen.append(ran())
            seen.append(ran())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen.count("vendor_math") == seen.count(ran()) == 80


def test_while_another_thread_compiles(monkeypatch):
    """torch.compiler.is_compiling is true in all threads then."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.compiler.is_compiling() and not tracing.is_traced()
    before = ran()
    with sdpa_kernel("vendor_math"):
        assert ran() == "vendor_math"
        with sdpa_kernel("vendor_cpu_flash"):
            assert ran() == "vendor_cpu_flash"
    assert ran() == before


def toggled(name, until, wrong):
    """A thread's own toggles, one in the other, until the time is over."""
    usual = ran()
    while time.monotonic() < until:
        with sdpa_kernel(name):
            found = [ran()]
            with sdpa_kernel("vendor_math"):
                found.append(ran())
            found.append(ran())
        if (found, ran()) != ([name, "vendor_math", name], usual):
            wrong.append((name, found))


def compiling(until, wrong):
    """A thread that compiles functions with toggles inside and around, again and again."""
    number = 0
    while time.monotonic() < until:
        number += 1

        def function(q, k, v, number=number):
            with sdpa_kernel("vendor_math"):
                return attention(q, k, v) + number

        with sdpa_kernel("vendor_cpu_flash"):
            torch.compile(function, backend="eager", fullgraph=True)(*qkv())
        if last_choice().kernel.name != "vendor_math":
            wrong.append(("compiled", last_choice().kernel.name))


def stress(seconds, toggling=6, compilers=2):
    """What went wrong in threads with toggles of their own while others compile; the long form is of 120 seconds."""
    wrong, failed, until = [], [], time.monotonic() + seconds

    def guarded(work, *arguments):
        try:
            work(*arguments, until, wrong)
        except Exception as error:
            failed.append(error)

    names = ["vendor_cpu_flash", "vendor_math", "cpu_flash"]
    jobs = [(toggled, names[number % 3]) for number in range(toggling)] + [(compiling,)] * compilers
    threads = [threading.Thread(target=guarded, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong + failed


def test_threads_with_toggles_of_their_own_while_others_compile():
    assert stress(3.0) == []


def test_a_decorated_function_as_a_whole_graph(compiled):
    @compiled
    @sdpa_kernel("vendor_math")
    def function(q, k, v):
        return attention(q, k, v) + 1

    function(*qkv())
    assert last_choice().kernel.name == "vendor_math"


def test_whether_this_thread_traces(compiled):
    assert compiled(lambda q: q * (2 if tracing.is_traced() else 3))(torch.ones(1)).item() == 2
    seen = []

    class Recorded(torch.nn.Module):
        def forward(self, q):
            seen.append(tracing.is_traced())
            return q + 1

    torch.export.export(Recorded(), (torch.ones(2),), strict=False)
    assert all(seen) and not tracing.is_traced()


def test_blocks_of_a_trace_that_was_given_up_are_forgotten():
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def broken(q, k, v):
        with sdpa_kernel("vendor_math"):
            torch._dynamo.graph_break()
            return attention(q, k, v) * 1

    before = ran()
    broken(*qkv())
    assert last_choice().kernel.name == "vendor_math"
    torch.compile(lambda q, k, v: attention(q, k, v) * 2, backend="eager", fullgraph=True)(*qkv())
    assert last_choice().kernel.name == before == ran()


def test_torchs_own_block_inside_a_compiled_function(compiled):
    def inner(q, k, v):
        with torch_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
            return attention(q, k, v)

    @compiled
    def function(q, k, v, flash):
        with torch_kernel(SDPBackend.MATH):
            return attention(q, k, v) * 1 + (inner(q, k, v) if flash else 0)

    for flash in (False, True, False):
        function(*qkv(), flash)
        assert by_name()[last_choice().kernel.name].family == ("flash" if flash else "math")
    with sdpa_kernel(["flash", "vendor_math"]):
        function(*qkv(), False)
        assert last_choice().kernel.name == "vendor_math", "both hold"
    plain = compiled(lambda q, k, v: attention(q, k, v) * 3)
    with torch_kernel(SDPBackend.MATH):  # around: holds where the graph runs
        plain(*qkv())
        assert by_name()[last_choice().kernel.name].family == "math"
    plain(*qkv())
    assert last_choice().kernel.name == ran()


def test_torchs_block_and_ours_inside_a_compiled_function(compiled):
    @compiled
    def function(q, k, v):
        with torch_kernel(SDPBackend.MATH), sdpa_kernel("flash"):
            return attention(q, k, v)

    with pytest.raises(sdpa.NoKernelError, match="torch's switches off for: flash"):
        function(*qkv())


@pytest.mark.parametrize("name", ["math", "vendor_cpu_flash"])
def test_a_compiled_backward_outside_of_the_block_keeps_its_forwards_kernel(name, compiled):
    function = compiled(lambda q, k, v: attention(q, k, v).sum())
    with sdpa_kernel(name):
        out = function(*qkv(grad=True))
    out.backward()
    assert last_choice().kernel.name == name and last_choice().problem.direction == "backward"


@pytest.mark.parametrize("strict", [False, True])
def test_exported_functions_keep_the_block_inside_of_them_only(strict):
    class Inside(torch.nn.Module):
        def forward(self, q, k, v):
            with sdpa_kernel("vendor_math"):
                return attention(q, k, v)

    class Plain(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v)

    with sdpa_kernel("vendor_cpu_flash"):
        inside, plain = (torch.export.export(m(), tuple(qkv()), strict=strict).module() for m in (Inside, Plain))
        inside(*qkv())
        assert last_choice().kernel.name == "vendor_math"
    plain(*qkv())
    assert last_choice().kernel.name == ran() != "vendor_cpu_flash"


def test_settings_with_torchs_switches_travel_as_text():
    every = Setting(("math",), True, True, False, True, 15)
    for setting in (Setting(toggles=4), every, Setting(("flash",), toggles=0), Setting(decomposed=True)):
        assert Setting.decode(setting.encode()) == setting
    with sdpa_kernel("vendor_math"):
        assert effective(";t5") == "vendor_math;t5" and effective("flash;t5") == "flash;t5"
    assert weights_setting(";t1", "cpu") == ""


def test_a_kernel_without_this_backward_leaves_it_to_others():
    """Asked for by name, for a call whose forward it has; a family has a backward, and so has one of two kernels."""
    backward = AttentionProblem("cpu", torch.float32, 1, 2, 2, 16, 16, 8, 8, direction="backward")
    assert backward_setting("vendor_math;ft4", backward) == ";t4"
    for kept in ("math;f", "cpu_flash;f", "vendor_math,cpu_flash", "vendor_cudnn;f", ""):
        assert backward_setting(kept, backward) == kept
