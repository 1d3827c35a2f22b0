"""sdpa.warm_up: the calls of a function are found without running it, each is run once, and nothing else changes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel as torchs_kernel
from torch.utils.checkpoint import checkpoint

import sdpa
import sdpa.nn
from helpers import int32, operands, qkv
from sdpa.bench import warm_up as module
from sdpa.bench.warm_up import Modes, Noted, StandIn, filled
from sdpa.kernels.math import composite

attention = sdpa.scaled_dot_product_attention
SIZES = {"B": 2, "H": 4, "M": 16, "N": 16, "D": 8}


def told(warmed):
    """What ran, as direction and kernel."""
    return [(one.problem.split()[0], one.kernel) for one in warmed]


def features(warmed):
    """What the problem of the only call asks beside its sizes."""
    (one,) = warmed
    return set(one.problem.partition(": ")[2].split(", "))


BOTH = [("forward", "cpu_flash"), ("backward", "cpu_flash")]


class Layer(torch.nn.Module):
    """Attention to itself with a residual."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.project = torch.nn.Linear(width, 3 * width)

    def forward(self, x):  # (B, N, width)
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def layers(count=3):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Layer() for _ in range(count)))


ROWS = torch.zeros(2, 16, 8)  # what a Layer takes


# which calls are found


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, nullcontext])
def test_a_forward_alone_where_nothing_learns(around):
    with around():
        (one,) = sdpa.warm_up(attention, *qkv(**SIZES, grad=around is not nullcontext))
    assert one.problem == "forward B=2 H=4 Hkv=4 M=16 N=16 D=8 Dv=8 float32 on cpu: no mask"
    assert one.kernel == "cpu_flash" and 0 < one.seconds < 60


def test_training_has_its_backward():
    forward, backward = sdpa.warm_up(attention, *qkv(**SIZES, grad=True))
    assert forward.problem == "forward B=2 H=4 Hkv=4 M=16 N=16 D=8 Dv=8 float32 on cpu: lse"
    assert backward.problem == "backward B=2 H=4 Hkv=4 M=16 N=16 D=8 Dv=8 float32 on cpu: no mask"
    assert told([forward, backward]) == BOTH


def test_each_different_call_once():
    model = layers()
    assert told(sdpa.warm_up(model, ROWS)) == BOTH
    with torch.no_grad():
        assert told(sdpa.warm_up(model, ROWS)) == BOTH[:1]
    sizes = (ROWS, torch.zeros(2, 24, 8), ROWS)
    warmed = sdpa.warm_up(lambda *batches: [model(batch) for batch in batches], *sizes)
    assert [(one.problem.split()[0], "M=24" in one.problem) for one in warmed] == [
        ("forward", False),
        ("forward", True),
        ("backward", False),
        ("backward", True),
    ]


def test_what_is_told_is_of_the_call_itself():
    """Also where a call like it ran before, and another one in between."""
    small, wide = qkv(**SIZES), qkv(**{**SIZES, "D": 16})
    first, other, again = (sdpa.warm_up(attention, *given)[0].problem for given in (small, wide, small))
    assert first == again and "D=16" in other


def test_a_function_that_runs_its_own_backward():
    """With its loss returned or not; towards leaves that it was given, and towards others."""
    model, leaf = layers(1), torch.zeros(2, 2, 16, 8, requires_grad=True)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    assert told(sdpa.warm_up(step, ROWS)) == BOTH
    assert told(sdpa.warm_up(lambda x: torch.autograd.grad(attention(x, x, x).sum(), x), leaf)) == BOTH
    assert leaf.grad is None and all(parameter.grad is None for parameter in model.parameters())


def test_checkpointed_calls():
    q, k, v = qkv(**SIZES, grad=True)
    assert told(sdpa.warm_up(checkpoint, attention, q, k, v, use_reentrant=False)) == BOTH


MASKED = {
    "lengths": (sdpa.Mask(lengths=torch.tensor([3, 16])), {"k_lengths"}),
    "segments": (sdpa.Mask(causal=True, segments=torch.arange(16, dtype=torch.int32) // 5), {"causal", "segments"}),
    "cu_seqlens": (sdpa.Mask(causal=True, cu_seqlens=int32(0, 6, 16)), {"causal", "segments"}),
    "allowed": (torch.ones(2, 1, 16, 16, dtype=torch.bool).tril(), {"allowed"}),
    "alibi": (sdpa.Mask(causal=True, alibi=torch.tensor([0.5, 0.25, 0.125, 0.0625])), {"causal", "alibi"}),
    "prefix": (sdpa.Mask(causal=True, prefix=torch.tensor([3, 5])), {"causal", "prefix"}),
    "bias": (torch.zeros(1, 4, 16, 16), {"bias"}),
}


@pytest.mark.parametrize("name", MASKED)
def test_masks(name, matches_torch):
    """In the argument, and in what the function makes itself; real calls afterwards are right."""
    mask, wanted = MASKED[name]
    q, k, v = qkv(**SIZES)
    assert features(sdpa.warm_up(attention, q, k, v, mask)) == wanted
    assert features(sdpa.warm_up(lambda q: attention(q, k, v, attn_mask=mask), q)) == wanted
    assert told(sdpa.warm_up(attention, *qkv(**SIZES, grad=True), mask)) == BOTH
    dense = mask.dense(2, 4, 16, 16) if isinstance(mask, sdpa.Mask) else mask
    assert matches_torch(q, k, v, dense, ours=mask).shape == q.shape


def test_a_bias_that_learns():
    bias = torch.zeros(1, 4, 16, 16, requires_grad=True)
    forward, backward = sdpa.warm_up(attention, *qkv(**SIZES), bias)
    assert "bias, lse" in forward.problem and "bias, bias_grad" in backward.problem and bias.grad is None


@pytest.mark.parametrize("own", [True, False])
def test_packed_sequences(own):
    tensors, places = operands(own, dtype=torch.float32)
    forward, backward = sdpa.warm_up(sdpa.varlen_attention, *tensors, *places)
    told_of = "segments" if own else "k_lengths"
    assert told_of in forward.problem and told_of in backward.problem and told([forward, backward]) == BOTH
    with torch.no_grad():
        assert told(sdpa.warm_up(sdpa.varlen_attention, *tensors, *places)) == BOTH[:1]


def test_pages():
    query, cache = torch.zeros(2, 1, 4, 8), torch.zeros(8, 4, 2, 8)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    (one,) = sdpa.warm_up(sdpa.paged_attention, query, cache, cache, table, int32(5, 9), enable_gqa=True)
    assert one.problem == "forward B=2 H=4 Hkv=2 M=1 N=16 D=8 Dv=8 float32 on cpu: gqa, k_lengths"


def test_options():
    """Dropout, sinks, autocast, the log-sum-exp."""
    q, k, v = qkv(**SIZES)
    assert features(sdpa.warm_up(attention, q, k, v, dropout_p=0.1)) == {"dropout"}
    assert features(sdpa.warm_up(attention, q, k, v, sinks=torch.zeros(4), return_lse=True)) == {"sinks", "lse"}
    with torch.autocast("cpu"):
        warmed = sdpa.warm_up(attention, *qkv(**SIZES, grad=True))
    assert told(warmed) == BOTH and all("bfloat16" in one.problem for one in warmed)


def test_weights():
    attend = sdpa.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.zeros(2, 8, 16)
    assert told(sdpa.warm_up(attend, x, x, x)) == [BOTH[0], ("weights", "math"), BOTH[1]]


# by whom


def by_math(q, k, v):
    with sdpa.sdpa_kernel("math"):
        return attention(q, k, v)


def by_torchs_math(q, k, v):
    with torchs_kernel(SDPBackend.MATH):
        return attention(q, k, v)


def opened(q, k, v):
    """By any kernel, whatever is allowed around it."""
    with sdpa.sdpa_kernel(), torchs_kernel(list(SDPBackend.__members__.values())):
        return attention(q, k, v)


def test_a_kernel_named_inside_of_the_function():
    given = qkv(**SIZES, grad=True)
    maths = [("forward", "math"), ("backward", "math")]
    assert told(sdpa.warm_up(by_math, *given)) == maths
    assert told(sdpa.warm_up(attention, *given, kernel="math")) == maths
    assert told(sdpa.warm_up(lambda *x: (by_math(*x), attention(*x)), *given)) == [maths[0], *BOTH, maths[1]]


def test_the_backward_of_an_eager_call_runs_by_the_same(monkeypatch):
    """A backward that autograd runs outside of the with-block."""
    seen = []
    monkeypatch.setattr(composite, "backward", spy(composite.backward, seen))
    by_math(*qkv(**SIZES, grad=True)).sum().backward()
    assert len(seen) == 1
    sdpa.warm_up(by_math, *qkv(**SIZES, grad=True))
    assert len(seen) == 2


def spy(function, seen):
    def noted(*args):
        seen.append(args)
        return function(*args)

    return noted


def test_torchs_switches_inside_of_the_function():
    """They hold for the forward; the backward runs when they are back."""
    assert told(sdpa.warm_up(by_torchs_math, *qkv(**SIZES, grad=True))) == [("forward", "math"), BOTH[1]]


@pytest.mark.parametrize("around", [sdpa.sdpa_kernel, torchs_kernel])
def test_a_block_around_holds_where_the_function_opens_none(around):
    """As it does for an eager call."""
    given = qkv(**SIZES)
    with around(SDPBackend.MATH):
        attention(*given)
        eager = sdpa.last_choice().kernel
        assert eager.family == "math" and told(sdpa.warm_up(attention, *given)) == [("forward", eager.name)]
        assert told(sdpa.warm_up(opened, *given)) == BOTH[:1]
    assert told(sdpa.warm_up(attention, *given)) == BOTH[:1]


def test_torchs_function_inside_of_patch():
    q, k, v = qkv(**SIZES, grad=True)

    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with sdpa.patch():
        assert told(sdpa.warm_up(function, q, k, v)) == BOTH
    with pytest.raises(ValueError, match=r"function makes no attention call of this library; is it inside of sdpa"):
        sdpa.warm_up(function, q, k, v)


@pytest.mark.parametrize("padded", [False, True])
def test_torchs_modules_with_our_attention(padded):
    torch.manual_seed(0)
    layer = sdpa.nn.TransformerEncoderLayer(16, 2, batch_first=True)
    padding = torch.arange(8) >= torch.tensor([8, 5])[:, None] if padded else None
    x = torch.randn(2, 8, 16)
    warmed = sdpa.warm_up(layer, x, src_key_padding_mask=padding)
    assert told(warmed) == BOTH and "dropout" in warmed[0].problem and ("allowed" in warmed[0].problem) == padded
    layer.eval()
    with torch.no_grad():
        assert told(sdpa.warm_up(layer, x, src_key_padding_mask=padding)) == BOTH[:1]
    assert layer(x, src_key_padding_mask=padding).isfinite().all()


# nothing else changes


class Counting(Layer):
    """Writes its buffers, in place and by other tensors, keeps one that it computed, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(16)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))
        self.calls, self.last = 0, None

    def forward(self, x):
        self.calls += 1
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean((0, 1))
        self.last = x
        self.first = x
        return self.norm(super().forward(x))


def train(model, x):
    model(x).sum().backward()


@pytest.mark.parametrize("way", ["module", "method", "argument"])
def test_a_model_stays_as_it_was(way):
    model = torch.nn.Sequential(Counting(), torch.nn.Dropout(0.5), Counting())
    marked = next(model.parameters())
    marked.grad = torch.ones_like(marked)
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    state = torch.get_rng_state()
    given = {"module": (model, ROWS), "method": (model.forward, ROWS), "argument": (train, model, ROWS)}[way]
    assert told(sdpa.warm_up(*given)) == BOTH
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is value and torch.equal(value, copy) for name, (value, copy) in before.items())
    assert torch.equal(marked.grad, torch.ones_like(marked)) and torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters() if parameter is not marked)
    for layer in (model[0], model[2]):
        assert layer.calls == 0 and layer.last is None and not hasattr(layer, "first")
    train(model, torch.randn(2, 16, 8))
    assert model[0].steps == model[0].calls == 1 and model[2].norm.num_batches_tracked == 1


def test_it_stays_so_where_the_function_raises():
    class Broken(Counting):
        def forward(self, x):
            super().forward(x).sum().backward()
            raise KeyError("mine")

    model = Broken()
    with pytest.raises(KeyError, match="mine"):
        sdpa.warm_up(model, ROWS)
    assert model.calls == model.steps == 0 and torch.equal(model.mean, torch.zeros(8))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_real_tensors_are_not_written():
    """Those that are given and those that the function has: by numbers, by each other, and by what it is given."""
    held, given, leaf = torch.zeros(2, 4, 16, 8), torch.zeros(2, 4, 16, 8), torch.zeros(2, 4, 16, 8, requires_grad=True)

    def function(q):
        q.add_(1)
        held.add_(1)
        held[:, :, 2:3] = q[:, :, :1]
        with torch.no_grad():
            held.copy_(leaf + 1)
            torch.add(leaf, 1, out=held)
            leaf.mul_(3).add_(q)
        return attention(q, held, leaf)

    assert told(sdpa.warm_up(function, given)) == BOTH
    assert not any(tensor.any() for tensor in (held, given, leaf)) and leaf.grad is None


def test_random_numbers_of_dropout_are_not_drawn():
    q, k, v = qkv(**SIZES)
    torch.manual_seed(3)
    wanted = attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    sdpa.warm_up(attention, q, k, v, dropout_p=0.5)
    assert torch.equal(attention(q, k, v, dropout_p=0.5), wanted)


def test_real_calls_are_right_afterwards(matches_torch, nothing_remembered):
    q, k, v = qkv(**SIZES, Hkv=2, dtype=torch.bfloat16)
    sdpa.warm_up(attention, *(t.clone().requires_grad_() for t in (q, k, v)), is_causal=True, enable_gqa=True)
    matches_torch(q, k, v, is_causal=True, enable_gqa=True)


# what is given


def test_tensors_that_lie_otherwise(nothing_remembered):
    """Expanded, transposed, computed from others, parts of one."""
    one = torch.randn(1, 4, 16, 8, requires_grad=True)
    assert told(sdpa.warm_up(attention, *(one.detach().expand(5, -1, -1, -1),) * 3)) == BOTH[:1]
    assert told(sdpa.warm_up(attention, one.expand(5, -1, -1, -1), one[..., :1].expand(5, -1, -1, 8), one * 2)) == BOTH
    assert told(sdpa.warm_up(attention, *(one.transpose(1, 2),) * 3)) == BOTH
    rows = torch.randn(2, 16, 3, 4, 8, requires_grad=True)
    assert told(sdpa.warm_up(attention, *(t.transpose(1, 2) for t in rows.unbind(2)))) == BOTH
    assert one.grad is None and rows.grad is None


def test_calls_that_meet_no_key_are_left_out():
    q, k, v = qkv(**SIZES)

    def function(q, k, v):
        return attention(q[:, :, :0], k, v), attention(q, k[:, :, :0], v[:, :, :0]), attention(q, k, v)

    assert told(sdpa.warm_up(function, q, k, v)) == BOTH[:1]
    with pytest.raises(ValueError, match="makes no attention call"):
        sdpa.warm_up(attention, q[:, :, :0], k, v)


def stand_in(*shape, dtype=torch.float32, stride=None, device="cpu"):
    strides = torch.empty(shape, device="meta").stride() if stride is None else stride
    return StandIn(tuple(shape), tuple(strides), dtype, device)


@pytest.mark.parametrize(
    ("rows", "documents", "longest", "end"),
    [(30, 3, 12, 30), (31, 3, 11, 31), (64, 3, 5, 15), (7, 7, 1, 7), (5, 0, 4, 0)],
)
def test_document_ends_are_valid(rows, documents, longest, end):
    """No document is longer than the longest; rows may be left over."""
    like = stand_in(documents + 1, dtype=torch.int32)
    given: Mapping = {"q": stand_in(1, 4, 99, 8), "k": stand_in(1, 4, rows, 8), "max_q": 99, "max_k": longest}
    ends = filled("cu_k", like, given)
    assert ends.dtype == torch.int32 and ends[0] == 0 and ends[-1] == end
    assert not documents or (0 < ends.diff().max() <= longest and ends.diff().min() >= 0)


def test_lengths_and_masks_let_every_query_see_keys():
    lengths = stand_in(2, dtype=torch.int64)
    given = {"q": stand_in(2, 4, 5, 8), "k": stand_in(2, 4, 16, 8)}
    assert filled("k_lengths", lengths, given).tolist() == [16, 16]
    assert filled("k_lengths", lengths, {**given, "block_table": None}).tolist() == [16, 16]
    assert filled("q_lengths", lengths, given).tolist() == [5, 5]
    table = stand_in(2, 3, dtype=torch.int32)
    assert filled("k_lengths", lengths, {**given, "block_table": table}).tolist() == [48, 48]
    assert filled("block_table", table, given).tolist() == [[0, 0, 0]] * 2
    assert filled("allowed", stand_in(2, 1, 5, 16, dtype=torch.bool), given).all()
    assert not filled("bias", stand_in(2, 1, 5, 16), given).any()


@pytest.mark.parametrize("stride", [(0, 16, 0, 1), (320, 8, 32, 1), (1000, 100, 10, 1), (0, 0, 0, 0)])
def test_tensors_have_the_same_sizes_and_strides(stride):
    made = filled("q", stand_in(2, 4, 10, 8, dtype=torch.bfloat16, stride=stride), {})
    assert (made.shape, made.stride(), made.dtype) == ((2, 4, 10, 8), stride, torch.bfloat16) and not made.any()
    assert filled("q", stand_in(2, 0, 10, 8, stride=stride), {}).shape == (2, 0, 10, 8)


# what is refused


def looks(q):
    return attention(q, q, q) if q.sum() > 0 else q


def counts(q):
    return attention(q, q, q, scale=len(q.nonzero()))


def reads(q):
    return attention(q, q, q, scale=q.sum().item())


@pytest.mark.parametrize("function", [looks, counts, reads])
def test_a_function_that_looks_at_values(function):
    said = (
        rf"^{function.__name__} looks at the values of tensors, and warm_up\(\) runs it on fake ones, which have none: "
    )
    with pytest.raises(ValueError, match=said) as raised:
        sdpa.warm_up(function, qkv(**SIZES)[0])
    assert "\n" not in str(raised.value)


def test_values_of_constants_may_be_read():
    q, k, v = qkv(**SIZES)
    assert told(sdpa.warm_up(lambda q: attention(q, k, v, scale=torch.tensor(0.5).item()), q)) == BOTH[:1]


def test_other_refusals():
    q, k, v = qkv(**SIZES)
    with pytest.raises(TypeError, match=r"^warm_up\(\): argument 'function' must be callable, not Tensor$"):
        sdpa.warm_up(q, k, v)
    for jobs, name in ((2.0, "float"), (True, "bool"), ("2", "str")):
        with pytest.raises(TypeError, match=rf"^warm_up\(\): argument 'jobs' must be int, not {name}$"):
            sdpa.warm_up(attention, q, k, v, jobs=jobs)
    with pytest.raises(ValueError, match=r"^Expected jobs >= 1, but got 0 instead\.$"):
        sdpa.warm_up(attention, q, k, v, jobs=0)
    with pytest.raises(
        ValueError, match=r"^Linear makes no attention call of this library; is it inside of sdpa.patch"
    ):
        sdpa.warm_up(torch.nn.Linear(8, 8), q)
    nested = torch.nested.nested_tensor([torch.zeros(4, 3, 8), torch.zeros(4, 5, 8)], layout=torch.jagged)
    with pytest.raises(
        ValueError, match=r"^warm_up\(\) runs functions on fake tensors, which nested tensors have none"
    ):
        sdpa.warm_up(attention, nested, nested, nested)


def test_errors_of_the_function_are_its_own():
    class OwnError(Exception):
        pass

    def function(q):
        attention(q, q, q)
        raise OwnError(q.shape)

    with pytest.raises(OwnError) as raised:
        sdpa.warm_up(function, qkv(**SIZES)[0])
    assert raised.value.args == ((2, 4, 16, 8),)
    q, k, v = qkv(**SIZES)
    with pytest.raises(RuntimeError, match="Expected query, key and value to have equal numbers of heads"):
        sdpa.warm_up(attention, q, k[:, :3], v)
    with pytest.raises(sdpa.NoKernelError, match="runs on cuda, got cpu"):
        sdpa.warm_up(attention, q, k, v, kernel="triton_flash")


# in other processes


def noted(device="cpu", D=8, setting=""):
    """A forward; zeros of its tensors are made where it is run."""
    tensor = stand_in(2, 4, 16, D, device=device)
    return Noted(
        "attention_forward", (("q", tensor), ("k", tensor), ("v", tensor), ("scale", 0.5), ("setting", setting))
    )


@pytest.fixture
def started(monkeypatch):
    """What processes would be given."""
    seen = []

    def run(command, input, **options):
        assert command == [sys.executable, "-m", "sdpa.bench.warm_up"] and options["check"] is False
        seen.append(pickle.loads(input))

    monkeypatch.setattr(subprocess, "run", run)
    return seen


def test_no_process_is_started_for_a_cpu(started):
    module.compile_elsewhere([noted(D=8 * n) for n in range(1, 9)], 4)
    given = qkv(**SIZES, grad=True)
    assert told(sdpa.warm_up(attention, *given, jobs=4)) == BOTH and started == []


def test_processes_are_given_the_calls_of_a_gpu(started, monkeypatch):
    on_gpu = [noted("cuda:0", 8 * n) for n in range(1, 6)]
    module.compile_elsewhere([noted(), *on_gpu], 3)
    module.compile_elsewhere([noted(), *on_gpu[:2]], 2)
    assert started == [(3, Modes(False, False), tuple(on_gpu)), (2, Modes(False, False), tuple(on_gpu[:2]))]
    started.clear()
    module.compile_elsewhere(on_gpu, 1)
    module.compile_elsewhere(on_gpu[:1], 4)
    module.compile_elsewhere(on_gpu[: module.FEW_CALLS], None)
    assert started == []
    for cores, jobs in ((14, module.MOST_JOBS), (2, 2)):
        monkeypatch.setattr(module.pool, "default_jobs", lambda cores=cores: cores)
        module.compile_elsewhere(on_gpu, None)
        assert started.pop()[0] == jobs
    monkeypatch.setattr(module.pool, "default_jobs", lambda: 1)
    module.compile_elsewhere(on_gpu, None)
    assert started == []


def test_processes_are_told_of_torchs_modes(started, monkeypatch):
    """However they were set; where the newer switches were used, torch's older question raises."""
    monkeypatch.setattr(module, "float32_precision", lambda: "tf32")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: pytest.fail("asked"))
    module.compile_elsewhere([noted("cuda:0"), noted("cuda:0", 16)], 2)
    ((_, modes, calls),) = started
    assert modes == Modes(tf32=True, deterministic=True) and len(calls) == 2


def test_a_process_has_these_modes(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", seen.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", seen.append)
    monkeypatch.setattr(module, "run", seen.append)
    module.run_with((Modes(True, True), "a call"))
    module.run_with((Modes(False, False), "another"))
    assert seen == ["high", True, "a call", "highest", "another"]


def test_the_process_runs_what_it_is_given():
    """Two calls that run here, and one that cannot, which is counted and ends no other."""
    work = pickle.dumps((2, Modes(False, False), (noted(), noted(setting="triton_flash;f"), noted(D=16))))
    given = [sys.executable, "-m", "sdpa.bench.warm_up"]
    done = subprocess.run(given, input=work, capture_output=True, check=False, timeout=300)
    assert (done.returncode, done.stdout) == (1, b""), done.stderr.decode()
