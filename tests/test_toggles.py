"""sdpa_kernel: what may run, in this thread or task only, nested, restored, under torch.compile, and what it costs."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel as torch_kernel

import helpers
import sdpa
from sdpa import last_choice, sdpa_kernel
from sdpa.dispatch.catalog import KERNELS, by_name
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
