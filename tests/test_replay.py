"""Launches run again past Triton's look-up: the same arguments but for addresses, and only where nothing else differs.

No GPU: what a launcher is called with is recorded, and Triton's own binder says what it would have told apart.
"""

from __future__ import annotations

import pytest
import torch

from sdpa.dispatch import select
from sdpa.dispatch.catalog import by_name
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, read_of

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402

from sdpa.kernels.triton import decode, flash, hopper, replay, tiles  # noqa: E402
from sdpa.kernels.triton.launch import Launch  # noqa: E402
from sdpa.kernels.triton.target import Target, assume  # noqa: E402

TARGET = Target("cuda", 90, 227 << 10, 132, 50 << 20)
STREAM, FUNCTION = 11, 7
BASE_ARGS = 9  # grid, stream, function, metadata of two kinds, two hooks
KERNELS = {"triton_flash": flash, "triton_hopper": hopper, "triton_decode": decode}
MASKED = KERNELS | {"triton_efficient": flash}


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0


@pytest.fixture
def device(monkeypatch):
    """A Hopper that is not here; yields (the ordinary launches, what launchers were called with)."""
    from triton.runtime import driver

    if replay.VERSION not in replay.KNOWN:
        pytest.skip(f"launches of Triton {triton.__version__} are not run again")
    ordinary, called = [], []

    def launch(self, backend, arch):
        compiled = CompiledKernel.__new__(CompiledKernel)
        compiled.function, compiled.packed_metadata = FUNCTION, (4, 1, 0)
        compiled._run = lambda *args: called.append(args)
        ordinary.append(self)
        return compiled

    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(Launch, "__call__", launch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(replay, "current_device", lambda: 0)
    monkeypatch.setattr(replay, "current_stream", lambda index: STREAM)
    monkeypatch.setattr(replay, "empty", lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype))
    with assume(TARGET):
        yield ordinary, called


def inputs_of(M=32, N=64, dtype=torch.bfloat16, D=64, offset=0):
    def draw(rows):
        return torch.empty(4 * rows * D + offset, dtype=dtype)[offset:].view(1, 4, rows, D)

    return AttentionInputs(draw(M), draw(N), draw(N), D**-0.5, right=0)


def forward_of(name, **sizes):
    inputs = inputs_of(**sizes)
    problem = AttentionProblem.of(inputs, extra=frozenset({"lse"}))._replace(device="cuda:0")
    return inputs, problem, KERNELS[name].tiles(problem)[0]


def backward_of():
    inputs = inputs_of()
    problem = AttentionProblem.of(inputs, "backward")._replace(device="cuda:0")
    results = Results(torch.empty_like(inputs.q), torch.empty(inputs.q.shape[:3]))
    return (inputs, results, Results(torch.empty_like(inputs.q), None)), problem, tiles.tiles(problem)[0]


def specialised(launch):
    """What Triton would compile for a launch, in its own words."""
    binder = launch.kernel.create_binder()[-1]
    return binder(*launch.args, debug=False, instrumentation_mode="", **launch.options)[1]


def flat(value):
    """Arguments as a launcher sees them: tensors by address, descriptors by their fields."""
    if isinstance(value, torch.Tensor):
        return [value.data_ptr()]
    if hasattr(value, "base"):
        return [value.base.data_ptr(), *value.shape, *value.strides]
    return [x for part in value for x in flat(part)] if isinstance(value, tuple | list) else [value]


@pytest.mark.parametrize("name", KERNELS)
def test_forward_again(name, device):
    ordinary, called = device
    inputs, problem, tile = forward_of(name, N=2048 if name == "triton_decode" else 64)
    results, again = KERNELS[name].record((inputs,), problem, tile)
    first = list(ordinary)
    assert not called
    others = inputs._replace(q=inputs.q.clone(), k=inputs.k.clone(), v=inputs.v.clone())
    found = again(*others[:3])
    assert [(r.shape, r.stride(), r.dtype) for r in found] == [(r.shape, r.stride(), r.dtype) for r in results]
    KERNELS[name].record((others,), problem, tile)
    wanted = ordinary[len(first) :]
    assert len(called) == len(wanted) == len(first)
    given = {t.data_ptr() for t in others[:3]}
    seen = set()
    for args, launch, before in zip(called, wanted, first, strict=True):
        assert args[:BASE_ARGS] == (*(*launch.grid, 1, 1)[:3], STREAM, FUNCTION, (4, 1, 0), None, None, None)
        assert specialised(launch) == specialised(before)
        made = {address(t) for t in launch.args} - {None} - given
        got, want = flat(args[BASE_ARGS:]), flat(launch.args)
        assert len(got) == len(want)
        seen |= {g for g, w in zip(got, want, strict=True) if w in made}
        assert all(g == w for g, w in zip(got, want, strict=True) if w not in made)
        assert given & set(got) == given & set(want)
    assert {r.data_ptr() for r in found} <= seen


class Launcher:
    """What Triton 3.6 has around its function in C."""

    launch_cooperative_grid, launch_pdl, global_scratch_size, profile_scratch_size = False, True, 0, 0

    def __init__(self, called, **sizes):
        self.called, self.launch = called, lambda *args: called.append(("direct", args))
        for name, size in sizes.items():
            setattr(self, name, size)

    def __call__(self, *args):
        self.called.append(("launcher", args))


@pytest.mark.parametrize("version,sizes,way", [
    ((3, 6), {}, "direct"),
    ((3, 6), {"global_scratch_size": 128}, "launcher"),
    ((3, 6), {"profile_scratch_size": 128}, "launcher"),
    ((3, 5), {}, "launcher"),
])  # fmt: skip
def test_the_function_in_c_is_called_where_nothing_is_put_before_it(version, sizes, way, monkeypatch):
    """With the arguments that Triton 3.6's launcher calls it with."""
    called = []
    compiled = CompiledKernel.__new__(CompiledKernel)
    compiled.function, compiled.packed_metadata, compiled._run = FUNCTION, (4, 1, 0), Launcher(called, **sizes)
    monkeypatch.setattr(replay, "VERSION", version)
    run, call = replay.entrance(compiled, (5, 1, 1))
    call[replay.STREAM] = STREAM
    run(*call, "args")
    told = ((4, 1, 0), None, None, None, "args")
    wanted = (5, 1, 1, STREAM, FUNCTION, *((False, True, None, None) if way == "direct" else ()), *told)
    assert called == [(way, wanted)]


@pytest.mark.skipif(triton.__version__.rpartition(".")[0] != "3.6", reason="told of Triton 3.6")
def test_the_function_in_c_has_the_arguments_of_tritons_own_launcher():
    from triton.backends.nvidia.driver import CudaLauncher

    called = []
    launcher = CudaLauncher.__new__(CudaLauncher)
    launcher.__dict__.update(vars(Launcher(called)), num_ctas=1, launch_cooperative_grid=False, launch_pdl=True)
    launcher.__dict__.update(dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0))
    launcher.__dict__.update(dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1))
    compiled = CompiledKernel.__new__(CompiledKernel)
    compiled.function, compiled.packed_metadata, compiled._run = FUNCTION, (4, 1, 0), launcher
    run, call = replay.entrance(compiled, (5, 1, 1))
    call[replay.STREAM] = STREAM
    run(*call, "args")
    launcher(5, 1, 1, STREAM, FUNCTION, (4, 1, 0), None, None, None, "args")
    assert called[0] == called[1]


def test_no_log_sum_exp_is_made_where_nobody_asked(device):
    for name in ("triton_flash", "triton_decode"):
        inputs, problem, tile = forward_of(name, N=2048)
        problem = problem._replace(features=problem.features - {"lse"})
        results, again = KERNELS[name].record((inputs,), problem, tile)
        assert results.lse is None
        assert again(*inputs[:3]).lse is None
        assert len(again.made) == (1 if name == "triton_flash" else 2)


MASKS = {
    "allowed": lambda M, N: {"allowed": torch.ones(1, 1, M, N, dtype=torch.bool)},
    "padding": lambda M, N: {"allowed": torch.ones(1, 1, 1, N, dtype=torch.bool)},
    "bias": lambda M, N: {"bias": torch.zeros(1, 4, M, N, dtype=torch.bfloat16)},
    "rows": lambda M, N: {"bias": torch.zeros(1, 1, 1, N, dtype=torch.float32)},
}


MASKED_CALLS = [(name, mask) for name in ("triton_efficient", "triton_decode") for mask in MASKS]


@pytest.mark.parametrize("name,mask", [*MASKED_CALLS, ("triton_hopper", "bias")])
def test_forward_with_a_mask_again(name, mask, device):
    """The mask is another tensor at each call, and so is the memory for the spans that are found in it."""
    ordinary, called = device
    inputs = inputs_of(N=2048 if name == "triton_decode" else 64)
    M, N = inputs.q.shape[2], inputs.k.shape[2]
    inputs = inputs._replace(**MASKS[mask](M, N))
    problem = AttentionProblem.of(inputs, extra=frozenset({"lse"}))._replace(device="cuda:0")
    tile = MASKED[name].tiles(problem)[0]
    _, again = MASKED[name].record((inputs,), problem, tile)
    first = list(ordinary)
    assert len(first) == 1 + (mask == "padding" and name == "triton_efficient") + (name == "triton_decode")
    others = inputs._replace(**{n: t.clone() for n, t in inputs._asdict().items() if isinstance(t, torch.Tensor)})
    found = again(*read_of(others))
    _, wanted = MASKED[name].record((others,), problem, tile), ordinary[len(first) :]
    same_launches(called, wanted, read_of(others), found)


def test_backward_with_a_mask_again(device):
    ordinary, called = device
    (inputs, results, upstream), problem, tile = backward_of()
    inputs = inputs._replace(**MASKS["padding"](32, 64))
    problem = AttentionProblem.of(inputs, "backward")._replace(device="cuda:0")
    _, again = flash.record((inputs, results, upstream), problem, tile)
    first = len(ordinary)
    assert first == 5  # delta, two passes, and spans for each
    given = [t.clone() for t in (*read_of(inputs), *results, upstream.out)]
    found = again(*given)
    mask = inputs._replace(q=given[0], k=given[1], v=given[2], allowed=given[3])
    flash.record((mask, Results(*given[4:6]), Results(given[6], None)), problem, tile)
    same_launches(called, ordinary[first:], given, found[:3])


@pytest.mark.parametrize("alike", [True, False])
def test_packed_sequences_again(alike, device):
    """Forward and backward, with the cumulative lengths of another batch."""
    ordinary, called = device

    def draw():
        q, k, v = (torch.empty(80, 4, 64, dtype=torch.bfloat16).transpose(0, 1).unsqueeze(0) for _ in range(3))
        cu_q = torch.tensor([0, 40, 80], dtype=torch.int32)
        cu_k = cu_q if alike else torch.tensor([0, 30, 80], dtype=torch.int32)
        inputs = AttentionInputs(q, k, v, 0.125, cu_q=cu_q, cu_k=cu_k, max_q=40, max_k=50)
        results = Results(torch.empty_like(q), torch.empty(q.shape[:3]))
        return inputs, results, Results(torch.empty_like(q), None)

    for direction in ("forward", "backward"):
        tensors, others = ((all_of[:1] if direction == "forward" else all_of) for all_of in (draw(), draw()))
        problem = AttentionProblem.of(tensors[0], direction)._replace(device="cuda:0")
        tile = tiles.tiles(problem)[0]
        ordinary.clear(), called.clear()
        _, again = flash.record(tensors, problem, tile)
        first = len(ordinary)
        given = read_of(others[0])
        assert len(given) == (4 if alike else 5)
        if direction == "backward":
            given = (*given, *others[1], others[2].out)
        found = again(*given)
        flash.record(others, problem, tile)
        same_launches(called, ordinary[first:], given, found[:3] if direction == "backward" else found[:1])


def same_launches(called, wanted, given, found):
    """What launchers were called with is what ordinary launches of `wanted` have, but for memory that was made."""
    assert len(called) == len(wanted)
    given = {t.data_ptr() for t in given}
    seen = set()
    for args, launch in zip(called, wanted, strict=True):
        made = set(filter(None, addresses_in(launch.args))) - given
        got, want = flat(args[BASE_ARGS:]), flat(launch.args)
        assert len(got) == len(want)
        assert all(g == w for g, w in zip(got, want, strict=True) if w not in made)
        assert all(g not in given for g, w in zip(got, want, strict=True) if w in made)
        seen |= {g for g, w in zip(got, want, strict=True) if w in made}
    assert {r.data_ptr() for r in found} <= seen


def addresses_in(value):
    if isinstance(value, tuple):
        return [found for part in value for found in addresses_in(part)]
    found = address(value)
    return [] if found is None else [found]


def address(value):
    tensor = getattr(value, "base", value)
    return tensor.data_ptr() if isinstance(tensor, torch.Tensor) else None


def test_backward_again(device):
    ordinary, called = device
    tensors, problem, tile = backward_of()
    gradients, again = flash.record(tensors, problem, tile)
    inputs, results, upstream = tensors
    given = (*inputs[:3], *results, upstream.out)
    found = again(*(t.clone() for t in given))
    assert [g.shape for g in found[:3]] == [g.shape for g in gradients[:3]]
    assert len(called) == len(ordinary) == 3
    for place, tensor in enumerate(given):
        turned = tensor.transpose(1, 2).contiguous().transpose(1, 2)
        assert again(*given[:place], turned, *given[place + 1 :]) is None
    assert again(*given) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_another_alignment_is_not_run_again(dtype, device):
    ordinary, called = device
    inputs, problem, tile = forward_of("triton_flash", dtype=dtype)
    again = flash.record((inputs,), problem, tile)[1]
    shifted, _, _ = forward_of("triton_flash", dtype=dtype, offset=1)
    assert again(*shifted[:3]) is None
    assert not called
    assert flash.record((shifted,), problem, tile)[1] is None
    assert specialised(ordinary[0]) != specialised(ordinary[-1])


def test_one_tensor_twice_is_not_remembered(device):
    inputs, problem, tile = forward_of("triton_flash")
    assert flash.record((inputs._replace(v=inputs.k),), problem, tile)[1] is None


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook", "pre_run"])
def test_hooks_see_every_launch(hook, device, monkeypatch):
    ordinary, _ = device
    inputs, problem, tile = forward_of("triton_flash")
    again = flash.record((inputs,), problem, tile)[1]
    if hook == "pre_run":
        monkeypatch.setattr(ordinary[0].kernel, "pre_run_hooks", ordinary[0].kernel.pre_run_hooks)
        ordinary[0].kernel.pre_run_hooks.append(lambda *_, **__: None)
    else:
        chain = triton.knobs.HookChain()
        chain.add(lambda metadata: None)
        monkeypatch.setattr(triton.knobs.runtime, hook, chain)
    try:
        assert again(*inputs[:3]) is None
    finally:
        ordinary[0].kernel.pre_run_hooks.clear()


def test_another_current_device_is_not_run_again(device, monkeypatch):
    inputs, problem, tile = forward_of("triton_flash")
    again = flash.record((inputs,), problem, tile)[1]
    monkeypatch.setattr(replay, "current_device", lambda: 1)
    assert again(*inputs[:3]) is None


@pytest.mark.parametrize("change", ["hip", "release", "cpu"])
def test_where_nothing_is_remembered(change, device, monkeypatch):
    inputs, problem, tile = forward_of("triton_flash")
    if change == "release":
        monkeypatch.setattr(replay, "VERSION", (99, 0))
    if change == "cpu":
        problem = problem._replace(device="cpu")
    target = TARGET._replace(backend="hip", arch="gfx942", shared_memory=64 << 10) if change == "hip" else TARGET
    with assume(target):
        assert flash.record((inputs,), problem, tile)[1] is None


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_choice_runs_its_launches_again(direction, device):
    """As torch.compile's graphs call it; other strides, another scale and what is no plain call go the ordinary way."""
    ordinary, called = device
    if direction == "forward":
        inputs, problem, tile = forward_of("triton_flash")
        tensors = (inputs,)
    else:
        tensors, problem, tile = backward_of()
    choice = select.Choice(by_name()["triton_flash"], tile, problem, "the test's")
    choice.run(*tensors)
    launches = len(ordinary)
    assert launches and not called
    found = choice.run(*tensors)
    assert len(ordinary) == launches == len(called)
    assert type(found) is (Results if direction == "forward" else Gradients)
    turned = tensors[0].v.mT.contiguous().mT
    for changes in ({"scale": 2.0}, {"v": turned}):
        choice.run(tensors[0]._replace(**changes), *tensors[1:])
    assert len(ordinary) == 3 * launches
    assert len(called) == launches
    masked = problem._replace(features=problem.features | {"allowed"})
    choice = select.Choice(by_name()["triton_efficient"], tile, masked, "the test's")
    for heads, again in ((1, False), (4, False), (1, True)):
        allowed = torch.ones(1, heads, 32, 64, dtype=torch.bool)
        before = len(ordinary), len(called)
        choice.run(tensors[0]._replace(allowed=allowed), *tensors[1:])
        grown = len(ordinary) - before[0], len(called) - before[1]
        assert grown == ((0, launches) if again else (launches, 0))
    launched = len(called)
    capped = tensors[0]._replace(softcap=3.0)
    more = problem._replace(features=problem.features | {"softcap"})
    other = select.Choice(by_name()["triton_flash"], tile, more, "the test's")
    for _ in range(2):
        other.run(capped, *tensors[1:])
    assert not other.memory
    assert len(called) == launched
