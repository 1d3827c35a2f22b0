"""Recorded calls, run again past Triton's look-up: the same arguments but for addresses, where nothing else differs.

No GPU: what a launcher is called with is recorded, and Triton's own binder says what it would have told apart.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array

import pytest
import torch
from recorded_calls import DECODED, KINDS, M, given_of, problem_of, tensors_in
from recorded_calls import backward_of as backward_tensors
from recorded_calls import inputs_of as call_of

from sdpa import repeated
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, read_of
from sdpa.sinks import sinks_grad

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402

from sdpa.kernels.triton import decode, flash, hopper, recorded, tiles, triton_private  # noqa: E402
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

    def get_current_stream(self, device):
        return STREAM


@pytest.fixture
def device(monkeypatch):
    """A Hopper that is not here; yields (the ordinary launches, what launchers were called with)."""
    from triton.runtime import driver

    if triton_private.VERSION not in triton_private.KNOWN:
        pytest.skip(f"launches of Triton {triton.__version__} are not run again")
    ordinary, called = [], []

    def launch(self, backend, arch):
        compiled = CompiledKernel.__new__(CompiledKernel)
        compiled.module, compiled.function, compiled.packed_metadata = None, FUNCTION, (4, 1, 0)
        compiled._run = lambda *args: called.append(args)
        ordinary.append(self)
        return compiled

    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(Launch, "__call__", launch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        recorded, "empty_strided_cuda", lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
    )
    monkeypatch.setattr(triton_private, "UNTRIED", ())
    repeated.configure(get_device=lambda tensor: 0)
    with assume(TARGET):
        yield ordinary, called
    repeated.configure(get_device=torch.Tensor.get_device)


def inputs_of(M=32, N=64, dtype=torch.bfloat16, D=64, offset=0):
    def draw(rows):
        return torch.empty(4 * rows * D + offset, dtype=dtype)[offset:].view(1, 4, rows, D)

    return AttentionInputs(draw(M), draw(N), draw(N), D**-0.5, right=0)


def forward_of(name, **sizes):
    inputs = inputs_of(**sizes)
    problem = AttentionProblem.of(inputs, extra=frozenset({"lse"}))._replace(device="cuda:0")
    return inputs, problem, KERNELS[name].tiles(problem)[0]


def backward_of(dtype=torch.bfloat16):
    inputs = inputs_of(N=136, dtype=dtype)  # more than one block of keys has
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


def test_no_log_sum_exp_is_made_where_nobody_asked(device):
    for name in ("triton_flash", "triton_decode"):
        inputs, problem, tile = forward_of(name, N=2048)
        problem = problem._replace(features=problem.features - {"lse"})
        results, again = KERNELS[name].record((inputs,), problem, tile)
        assert results.lse is None
        assert again(*inputs[:3])[1] is None
        assert len(again.forms) == (1 if name == "triton_flash" else 2)


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
    inputs = inputs._replace(**MASKS["padding"](32, 136))
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_the_caller_does_not_get_is_one_tensor(dtype, device, monkeypatch):
    """delta and the float16 parts of a backward lie in one tensor beside the gradients, apart from one another."""
    seen = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 3, ctypes.c_void_p)

    @kind
    def launch(config, function, arguments, extra):
        places = ctypes.cast(arguments, ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64)))
        seen.append([places[i][0] for i in range(counts[len(seen)])])
        return 0

    counts, sizes = [], []

    def driver_launch(compiled, grid, args, number_of):
        found = [leaf for leaf in leaves_of(args) if isinstance(getattr(leaf, "base", leaf), torch.Tensor)]
        numbers = [number_of(leaf) for leaf in found]
        counts.append(len(numbers))
        sizes.append([(t.base if hasattr(t, "base") else t).nbytes for t in found])
        pairs = [value for place, number in enumerate(numbers) for value in (place, number)]
        offsets = [8 * place for place in range(len(numbers))]
        packed = (array("i", values).tobytes() for values in (offsets, pairs, ()))
        entry = ctypes.cast(launch, ctypes.c_void_p).value
        return (entry, 0, 1, grid, (32, 1, 1), 0, False, bytes(8 * len(numbers)), b"", *packed)

    def leaves_of(value):
        return [leaf for part in value for leaf in leaves_of(part)] if isinstance(value, tuple | list) else [value]

    monkeypatch.setattr(recorded, "driver_launch", driver_launch)
    made = []

    def empty(size, stride, dtype):
        made.append(torch.empty_strided(size, stride, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(recorded, "empty_strided_cuda", empty)
    tensors, problem, tile = backward_of(dtype)
    _, again = flash.record(tensors, problem, tile)
    inputs, results, upstream = tensors
    given = [t.clone() for t in (*inputs[:3], *results, upstream.out)]
    found = again(*given)
    assert len(made) == 4 and all(one is other for one, other in zip(found[:3], made, strict=False))
    known = {t.data_ptr() for t in (*given, *made[:3])}
    pool = range(made[3].data_ptr(), made[3].data_ptr() + made[3].nbytes)
    parts = {}
    for addresses, lengths in zip(seen, sizes, strict=True):
        for address, length in zip(addresses, lengths, strict=True):
            if address not in known:
                assert address in pool and address + length - 1 in pool
                assert parts.setdefault(address, length) == length
    places = sorted(parts.items())
    assert len(places) == (1 if dtype == torch.bfloat16 else 9)
    assert all(one + length <= other for (one, length), (other, _) in itertools.pairwise(places))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_another_alignment_is_not_run_again(dtype, device):
    ordinary, called = device
    inputs, problem, tile = forward_of("triton_flash", dtype=dtype)
    again = flash.record((inputs,), problem, tile)[1]
    shifted, _, _ = forward_of("triton_flash", dtype=dtype, offset=1)
    assert again(*shifted[:3]) is None
    assert not called
    shifted_again = flash.record((shifted,), problem, tile)[1]
    assert specialised(ordinary[0]) != specialised(ordinary[-1])
    assert shifted_again(*inputs[:3]) is None
    assert shifted_again(*shifted[:2], inputs.v) is None
    assert not called
    assert shifted_again(*shifted[:3]) is not None
    assert called


def test_a_tensor_in_two_fields_is_given_once(device):
    ordinary, called = device
    inputs, problem, tile = forward_of("triton_flash")
    again = flash.record((inputs._replace(v=inputs.k),), problem, tile)[1]
    others = inputs._replace(q=inputs.q.clone(), k=inputs.k.clone())
    others = others._replace(v=others.k)
    assert len(read_of(others)) == 2
    found = again(*read_of(others))
    flash.record((others,), problem, tile)
    same_launches(called, ordinary[1:], read_of(others), found)
    called.clear()
    assert again(*others[:3]) is None
    assert not called


def test_two_tensors_at_one_address_are_not_recorded(device):
    inputs, problem, tile = forward_of("triton_flash")
    assert flash.record((inputs._replace(v=inputs.k.view_as(inputs.k)),), problem, tile)[1] is None


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


def test_another_current_device_is_not_run_again(device):
    inputs, problem, tile = forward_of("triton_flash")
    again = flash.record((inputs,), problem, tile)[1]
    repeated.configure(get_device=lambda tensor: 1)
    assert again(*inputs[:3]) is None


@pytest.mark.parametrize("change", ["hip", "release", "cpu"])
def test_where_nothing_is_remembered(change, device, monkeypatch):
    inputs, problem, tile = forward_of("triton_flash")
    if change == "release":
        monkeypatch.setattr(triton_private, "VERSION", (99, 0))
    if change == "cpu":
        problem = problem._replace(device="cpu")
    target = TARGET._replace(backend="hip", arch="gfx942", shared_memory=64 << 10) if change == "hip" else TARGET
    with assume(target):
        assert flash.record((inputs,), problem, tile)[1] is None


def record_both(module, tensors, others, problem, device):
    """Record a call and repeat it with other tensors: (what the repeat returns, whether launchers were told what an
    ordinary call of the others tells them)."""
    ordinary, called = device
    ordinary.clear(), called.clear()
    tile = module.tiles(problem)[0]
    first, again = module.record(tensors, problem, tile)
    launches = len(ordinary)
    given = given_of(others)
    found = again(*given)
    assert [(t.shape, t.stride(), t.dtype) for t in tensors_in(found)] == [
        (t.shape, t.stride(), t.dtype) for t in tensors_in(first)
    ]
    module.record(others, problem, tile)
    filled = found[:3] if len(found) == 5 else tensors_in(found)  # torch makes those of bias and sinks
    same_launches(called, ordinary[launches:], given, [t for t in filled if t is not None])
    return found


FORWARDS = [
    *((flash, kind, M) for kind in KINDS),
    (decode, "paged", M),
    *((decode, kind, 1) for kind in sorted(DECODED)),
]


@pytest.mark.parametrize("lse", [True, False], ids=["lse", "no lse"])
@pytest.mark.parametrize("module,kind,rows", FORWARDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_every_kind_of_forward_again(module, kind, rows, lse, device):
    tensors, others = ((call_of(kind, seed, rows=rows),) for seed in (1, 2))
    problem = problem_of(tensors, "forward", {"lse"} if lse else (), "cuda:0")
    found = record_both(module, tensors, others, problem, device)
    assert len(found) == 2 and (found[1] is not None) == lse


@pytest.mark.parametrize("lse_grad", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_backward_again(kind, lse_grad, device):
    tensors, others = (backward_tensors(call_of(kind, seed), seed, lse_grad) for seed in (1, 2))
    biased = tensors[0].bias is not None
    problem = problem_of(tensors, "backward", {"bias_grad"} if biased else (), "cuda:0")
    found = record_both(flash, tensors, others, problem, device)
    found = Gradients(*found)
    assert (found.bias is not None) == biased and (found.sinks is not None) == (tensors[0].sinks is not None)


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("packed") and "sinks" not in kind])
def test_every_kind_of_weights_again(kind, averaged, device):
    lse = torch.zeros(2, 4, 64 if kind in ("segments of one tensor", "strided segments") else 32)
    tensors, others = ((call_of(kind, seed), lse + seed) for seed in (1, 2))
    problem = problem_of(tensors, "weights", {"averaged"} if averaged else (), "cuda:0")
    record_both(flash, tensors, others, problem, device)


def test_gradients_that_arrive_expanded_or_padded_are_copied_again(device):
    """As `out.sum().backward()` hands them down, and as another kernel's log-sum-exp lies in memory."""
    both = []
    for seed in (1, 2):
        inputs, results, upstream = backward_tensors(call_of("plain", seed), seed)
        padded = torch.nn.functional.pad(results.lse, (0, 7))[..., :-7]
        both.append(
            (inputs, Results(results.out, padded), Results(upstream.out[:1, :1, :1, :1].expand_as(results.out), None))
        )
    tensors, others = both
    problem = problem_of(tensors, "backward", (), "cuda:0")
    _, called = device
    _, again = flash.record(tensors, problem, flash.tiles(problem)[0])
    assert again.copy.keywords == {"copied": [(4, (128, 32, 1)), (5, (8192, 2048, 64, 1))]}
    assert again(*given_of(others)) is not None
    assert len(called) == 1


def test_the_gradients_of_sinks_and_bias_are_made_again(device, monkeypatch):
    """By operations of torch behind the launches: of this call's tensors, and of what was made for it."""
    monkeypatch.setattr(recorded, "empty_strided_cuda", lambda size, stride, dtype: torch.ones(size, dtype=dtype))
    tensors, others = (backward_tensors(call_of("everything", seed), seed) for seed in (1, 2))
    problem = problem_of(tensors, "backward", {"bias_grad"}, "cuda:0")
    _, again = flash.record(tensors, problem, flash.tiles(problem)[0])
    found = again(*given_of(others))
    inputs, results, _ = others
    delta = torch.ones(inputs.q.shape[:3])
    assert torch.equal(found.sinks, sinks_grad(inputs.sinks, results.lse, delta))
    parts = again.forms[-1][0][0]
    assert torch.equal(found.bias, torch.full(inputs.bias.shape, parts, dtype=inputs.bias.dtype))


def test_what_no_launch_writes_is_cleared_again(device, monkeypatch):
    """Rows of packed sequences behind the sequences' own lengths."""
    monkeypatch.setattr(recorded, "empty_strided_cuda", lambda size, stride, dtype: torch.ones(size, dtype=dtype))
    tensors, others = (backward_tensors(call_of("packed with lengths", seed), seed) for seed in (1, 2))
    for direction, wanted in (("forward", (0.0, -torch.inf)), ("backward", (0.0, 0.0, 0.0))):
        part = slice(0, 1) if direction == "forward" else slice(None)
        problem = problem_of(tensors, direction, {"lse"}, "cuda:0")
        _, again = flash.record(tensors[part], problem, flash.tiles(problem)[0])
        found = tensors_in(again(*given_of(others[part])))
        assert [t.unique().tolist() for t in found] == [[value] for value in wanted]


def test_what_takes_more_than_a_number_to_clear_is_not_recorded(device):
    inputs = call_of("packed with lengths", 1)._replace(sinks=torch.zeros(4))
    problem = problem_of((inputs,), "forward", {"lse"}, "cuda:0")
    assert flash.record((inputs,), problem, flash.tiles(problem)[0])[1] is None


@pytest.mark.parametrize("freed", ["q", "v", "bias"])
def test_freed_tensors_are_refused_in_a_sentence(freed, device):
    """As torch refuses them; the kernel would end the process. Recorded, before that, and at an offset."""
    ordinary, called = device
    sound = call_of("bias", 1)
    problem = problem_of((sound,), "forward", {"lse"}, "cuda:0")
    tile = flash.tiles(problem)[0]
    _, again = flash.record((sound,), problem, tile)
    launches = len(ordinary)
    for offset in (0, 64, 1 << 20):
        buffer = torch.zeros(offset + getattr(sound, freed).numel(), dtype=torch.float16)
        broken = sound._replace(**{freed: buffer[offset:].view_as(getattr(sound, freed))})
        buffer.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=r"memory behind them; got one of shape \(.*0 bytes"):
            again(*read_of(broken))
        with pytest.raises(RuntimeError, match=r"memory behind them; got one of shape \(.*0 bytes"):
            flash.forward(broken, problem, tile)
    assert len(ordinary) == launches and not called


def test_a_freed_tensor_that_would_be_copied_is_refused_too(device):
    tensors = backward_tensors(call_of("plain", 1), 1)
    strided = torch.stack([tensors[2].out] * 2, -1)[..., 0]
    tensors = (*tensors[:2], Results(strided, None))
    problem = problem_of(tensors, "backward", (), "cuda:0")
    _, again = flash.record(tensors, problem, flash.tiles(problem)[0])
    assert again(*given_of(tensors)) is not None
    strided.untyped_storage().resize_(0)
    for call in (lambda: again(*given_of(tensors)), lambda: flash.record(tensors, problem, flash.tiles(problem)[0])):
        with pytest.raises(RuntimeError, match="0 bytes"):
            call()
