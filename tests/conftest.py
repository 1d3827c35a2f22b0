"""Fixtures of all tests: one thread, poisoned memory, no compiled graphs yet, seeds, and the comparison with torch."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from browser import CHROMIUM, Browser
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel as torch_kernel

import sdpa
from helpers import CPU_TILES
from sdpa.dispatch import cost, device, tables, tuning
from sdpa.dispatch.catalog import by_name
from sdpa.dispatch.select import clear_caches
from sdpa.inputs import Options, build_inputs
from sdpa.kernels.cpu import library
from sdpa.nn.padding import Packing
from sdpa.problem import Gradients
from sdpa.reference import attention as reference
from sdpa.testing import Case, backward_bands, compare, forward_band, problem_of

FUZZ_SEED = 20260131
FUZZ_CASES = 2000

# Objects after which the collector looks at new ones, and how often at older ones: torch's modules and thousands of
# tests are millions of objects, at which it looks for a tenth of the time by Python's own numbers.
gc.set_threshold(20_000, 20, 20)


def pytest_addoption(parser):
    parser.addoption("--fuzz-seed", type=int, default=FUZZ_SEED, help="first seed of tests/test_fuzz.py")
    parser.addoption("--fuzz-cases", type=int, default=FUZZ_CASES, help="cases of tests/test_fuzz.py")


def pytest_terminal_summary(terminalreporter, config):
    if not any(
        is_of_fuzz(report) for kind, kept in terminalreporter.stats.items() if kind != "deselected" for report in kept
    ):
        return
    seed, cases = config.getoption("--fuzz-seed"), config.getoption("--fuzz-cases")
    terminalreporter.write_line(
        f"fuzz: {cases} cases from seed {seed}; again: pytest tests/test_fuzz.py --fuzz-seed {seed}"
    )


def is_of_fuzz(report):
    return "test_fuzz.py" in (getattr(report, "nodeid", None) or "")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Waiting threads cost more than such small problems."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here (Debian: chromium)")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(autouse=True, scope="session")
def own_graphs(tmp_path_factory):
    """Inductor's folder of compiled graphs, empty: what an earlier run left there passes over what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def pytest_generate_tests(metafunc):
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", library.isas(), indirect=True)


@pytest.fixture
def isa(request):
    """The native CPU kernel's instruction sets that this machine has, one after the other."""
    before = library.isa()
    library.set_isa(request.param)
    yield request.param
    library.set_isa(before)


@pytest.fixture
def two_threads(threads_restored):
    torch.set_num_threads(2)


@pytest.fixture
def threads_restored():
    """The number of threads put back, which commands set."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def own_surroundings(tmp_path, monkeypatch, threads_restored):
    """An empty folder of tuning tables, no forced kernel, and the number of threads put back."""
    for name in ("SDPA_KERNEL", "SDPA_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SDPA_TUNING_DIR", str(tmp_path / "tables"))
    clear_caches()
    yield
    clear_caches()


@pytest.fixture
def few_cases(monkeypatch):
    few = [Case(M=5, N=7, D=8, Dv=8), Case(M=3, N=4, D=8, Dv=8, mask="causal", dtype=torch.bfloat16)]
    monkeypatch.setattr("sdpa.cli.check.cases", lambda device, quick: iter(few))
    return few


@pytest.fixture
def user(tmp_path, monkeypatch):
    """The user's folder, empty; no table is shipped."""
    folder = tmp_path / "user"
    monkeypatch.setenv("SDPA_TUNING_DIR", str(folder))
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    clear_caches()
    yield folder
    clear_caches()


@pytest.fixture
def homeless(monkeypatch):
    """A user whose home nobody knows, as in a container with a number for a user."""
    for name in ("HOME", "XDG_CACHE_HOME", "SDPA_TUNING_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])


@pytest.fixture
def several_tiles(monkeypatch):
    """cpu_flash as a kernel that offers a choice."""
    monkeypatch.setattr(by_name()["cpu_flash"].load(), "TILES", CPU_TILES)
    clear_caches()
    yield
    clear_caches()


GPU = device.Device("cuda", "A GPU", ("nvidia_test",), 132, 9e14, 6e13, 3e13, 3e12)


@pytest.fixture
def gpu(monkeypatch):
    for module in (tuning, cost):
        monkeypatch.setattr(module, "device_of", lambda name: GPU)


@pytest.fixture
def cuda_flash_able():
    """A skip that says why this machine's GPU cannot run the native kernel."""
    half = (torch.empty(1, 1, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    reasons = by_name()["cuda_flash"].why_not(problem_of(build_inputs(*half, Options()), "forward"))
    if reasons:
        pytest.skip(f"cuda_flash: {reasons[0]}")


@pytest.fixture
def poisoned_memory():
    """NaN, or the largest integer, in everything that torch.empty gives to Python and to native code, and NaN in what a
    GPU's allocator has free, of which native code may take some that is no tensor."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    if torch.cuda.is_available():
        spare = [torch.empty(size, device="cuda") for size in (1 << 26, *(1 << 16,) * 64)]
        del spare
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def nothing_remembered():
    """No call and no choice from before, nor left for later."""
    clear_caches()
    yield
    clear_caches()


@pytest.fixture
def packed(monkeypatch):
    """A list that grows whenever sdpa.nn packs a padded batch."""
    made, of = [], Packing.of

    def noted(*args):
        packing = of(*args)
        made.extend([] if packing is None else [packing])
        return packing

    monkeypatch.setattr(Packing, "of", noted)
    return made


@contextmanager
def plain_torch():
    with torch_kernel(SDPBackend.MATH):
        yield


def learn(tensors, dtype):
    """Leaves in `dtype`, in the memory order of `tensors`."""
    return [t.detach().to(dtype).requires_grad_() for t in tensors]


def with_gradients(function, leaves, grad_out):
    out = function(*leaves)
    grads = torch.autograd.grad(out, leaves, grad_out.to(out.dtype), allow_unused=True)
    return [out.detach(), *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True))]


def roundings(q, k, v, grad_out, wanted, options):
    """The extra band of the result and each gradient (sdpa.testing), and the terms of their sums."""
    inputs = build_inputs(q.detach(), k.detach(), v.detach(), options)
    terms = inputs.q.shape[2] * inputs.q.shape[1] // max(1, inputs.k.shape[1]) + inputs.k.shape[2]
    results = reference(inputs)
    bands = backward_bands(inputs, grad_out.reshape(results.out.shape), results, Gradients(*wanted[1:]))
    return [forward_band(inputs, results), *(bands[name] for name in "qkv")], terms


def matches_torch(q, k, v, attn_mask=None, *, ours=None, kernel=None, **options):
    """Ours against torch's math in float64, result and gradients, within the budget of rule 11; returns our result.

    `ours` is what we are given instead of `attn_mask`, such as a Mask.
    """
    mask64 = attn_mask.double() if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    same = attn_mask.to(q.dtype) if mask64 is not attn_mask else attn_mask
    given = attn_mask if ours is None else ours
    tensors = (q, k, v)
    call = lambda q, k, v: sdpa.scaled_dot_product_attention(q, k, v, given, kernel=kernel, **options)  # noqa: E731
    with plain_torch():
        example = F.scaled_dot_product_attention(*(t.detach().double() for t in tensors), mask64, **options)
        grad_out = torch.randn(example.shape, generator=torch.Generator().manual_seed(1)).to(q.dtype)
        wanted, plain = (
            with_gradients(
                lambda q, k, v, mask=mask: F.scaled_dot_product_attention(q, k, v, mask, **options),
                learn(tensors, dtype),
                grad_out,
            )
            for dtype, mask in ((torch.float64, mask64), (q.dtype, same))
        )
    got = with_gradients(call, learn(tensors, q.dtype), grad_out)
    with torch.no_grad():
        untaught = call(*tensors)
    asked = Options(given, 0.0, options.get("is_causal", False), options.get("scale"), options.get("enable_gqa", False))
    sizes, terms = roundings(*tensors, grad_out, wanted, asked)
    names = ("out", "grad_q", "grad_k", "grad_v")
    found = [
        compare(name, g, w, p, terms, size)
        for name, g, w, p, size in zip(names, got, wanted, plain, sizes, strict=True)
    ]
    found.append(compare("out without gradients", untaught, wanted[0], plain[0], terms, sizes[0]))
    assert all(c.ok for c in found), "; ".join(str(c) for c in found if not c.ok)
    return got[0]


@pytest.fixture(name="matches_torch")
def matches_torch_fixture():
    return matches_torch


@pytest.fixture
def fresh_compiler():
    """Nothing compiled before; Inductor's pass and torch's function are afterwards what they were."""
    from torch._inductor import config

    torch.compiler.reset()
    torch.manual_seed(0)
    before = config.pre_grad_custom_pass, torch.nn.functional.scaled_dot_product_attention
    yield
    assert before == (config.pre_grad_custom_pass, torch.nn.functional.scaled_dot_product_attention)


@pytest.fixture
def installed(fresh_compiler):
    """Our pass in Inductor."""
    from torch._inductor import config

    sdpa.install(patterns=True)
    yield config.pre_grad_custom_pass
    sdpa.uninstall()


@pytest.fixture(scope="module")
def others_frozen():
    """The collector looks at nothing that was there before, which takes it seconds after thousands of tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
