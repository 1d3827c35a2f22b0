"""The native CPU kernel on every instruction set of this machine, within the budget of sdpa.testing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cpu_cases import DTYPES, Case, Sizes, check_forward, coins, expect, lay_out, lengths, make, random, run_forward
from torch import Tensor

import sdpa
from sdpa import philox
from sdpa.dense import visible
from sdpa.kernels.cpu import flash, library
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile, read_of
from sdpa.reference import attention
from sdpa.testing import accumulator, backward_bands, check_inputs, compare, from_scores, largest

if library.load_error() is not None:
    pytest.skip(library.load_error(), allow_module_level=True)


def documents(B: int, length: int) -> Tensor:
    return torch.randint(0, 3, (B, length), dtype=torch.int32).sort(-1).values


S = Sizes()
FEATURES = {
    "plain": lambda: {},
    "causal": lambda: {"right": 0},
    "causal_bottom_right": lambda: {"right": 0, "bottom_right": True},
    "window": lambda: {"left": 9, "right": 4},
    "window_bottom_right": lambda: {"left": 70, "right": 0, "bottom_right": True},
    "lengths": lambda: {"k_lengths": lengths(0, 71)},
    "both_lengths": lambda: {
        "k_lengths": lengths(50, 66), "q_lengths": lengths(31, 0), "right": 0, "bottom_right": True,
    },
    "more_queries_than_keys": lambda: {"k_lengths": lengths(5, 20), "right": 0, "bottom_right": True},
    "segments": lambda: {"q_segments": documents(S.B, S.M), "k_segments": documents(S.B, S.N)},
    "one_row_of_segments": lambda: {"q_segments": documents(1, S.M), "k_segments": documents(1, S.N), "right": 8},
    "prefix": lambda: {"right": 0, "prefix": lengths(19, 65)},
    "prefix_window": lambda: {"left": 5, "right": 0, "prefix": lengths(0, 11), "k_lengths": lengths(83, 9)},
    "alibi": lambda: {"alibi": torch.rand(1, S.H), "right": 0},
    "alibi_bottom_right": lambda: {"alibi": torch.rand(S.B, S.H), "bottom_right": True},
    "bias": lambda: {"bias": random(S.B, S.H, S.M, S.N)},
    "bias_of_heads": lambda: {"bias": random(1, S.H, S.M, S.N)},
    "bias_of_keys": lambda: {"bias": random(S.B, 1, 1, S.N), "right": 0},
    "bias_of_rows": lambda: {"bias": random(1, S.H, S.M, 1)},
    "bias_single": lambda: {"bias": random(1, 1, 1, 1)},
    "bias_minus_infinity": lambda: {"bias": random(1, 1, S.M, S.N).masked_fill(~coins(S.M, 1), -torch.inf)},
    "allowed": lambda: {"allowed": coins(S.B, S.H, S.M, S.N)},
    "allowed_empty_rows": lambda: {"allowed": coins(S.B, 1, S.M, S.N) & coins(1, 1, S.M, 1)},
    "allowed_padding": lambda: {"allowed": coins(S.B, 1, 1, S.N)},
    "allowed_strided": lambda: {"allowed": coins(S.H, S.B, S.N, S.M).permute(1, 0, 3, 2), "left": 20},
    "softcap": lambda: {"softcap": 2.5},
    "softcap_bias_causal": lambda: {"softcap": 30.0, "bias": random(1, S.H, S.M, S.N), "right": 0},
    "sinks": lambda: {"sinks": random(S.H), "right": 0},
    "sinks_nothing_seen": lambda: {"sinks": random(S.H), "k_lengths": lengths(0, 3)},
    "dropout": lambda: {"dropout_p": 0.3, "rng": torch.tensor([0x123456789ABCDEF, 77])},
    "dropout_softcap_bias": lambda: {
        "dropout_p": 0.5, "rng": torch.tensor([5, 2**40 + 3]), "softcap": 5.0, "bias": random(S.B, 1, S.M, S.N),
    },
}  # fmt: skip

SHAPES = [
    Sizes(1, 1, 1, 1, 1, 1, 1),
    Sizes(1, 4, 4, 1, 301, 64, 64),
    Sizes(2, 8, 1, 1, 131, 40, 16),
    Sizes(1, 6, 2, 3, 67, 33, 7),
    Sizes(2, 3, 3, 5, 29, 128, 129),
    Sizes(1, 2, 1, 257, 193, 16, 48),
    Sizes(1, 4, 2, 97, 65, 80, 80),
    Sizes(1, 1, 1, 7, 1, 256, 3),
    Sizes(2, 11, 1, 1, 70, 40, 24),
    Sizes(1, 2, 1, 193, 33, 19, 8),
    Sizes(1, 2, 1, 19, 33, 0, 24),
    Sizes(1, 2, 1, 19, 33, 24, 0),
]  # fmt: skip


def gradients(inputs: AttentionInputs, upstream: Results) -> dict[str, Tensor]:
    extra = frozenset() if inputs.bias is None else frozenset({"bias_grad"})
    problem = AttentionProblem.of(inputs, "backward", extra)
    found = flash.backward(inputs, run_forward(inputs), upstream, problem, None)
    return {name: grad for name, grad in found._asdict().items() if grad is not None}


def check(inputs: AttentionInputs) -> None:
    """Result, log-sum-exp and gradients against the float64 reference."""
    grad_out = random(*inputs.q.shape[:3], inputs.v.shape[3], dtype=inputs.q.dtype)
    expect(check_inputs("cpu_flash", inputs, grad_out, inputs.bias is not None))


def expected_gradients(inputs: AttentionInputs, upstream: Results, dtype: torch.dtype) -> dict[str, Tensor]:
    """The reference's gradients of q, k and v, by autograd, every operation in `dtype`."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in inputs[:3]]
    out, lse = attention(inputs._replace(**dict(zip("qkv", leaves, strict=True))), dtype)
    loss = (out * upstream.out.to(dtype)).sum()
    if upstream.lse is not None:
        loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * upstream.lse.to(dtype)).sum()
    return dict(zip("qkv", torch.autograd.grad(loss, leaves), strict=True))


def check_gradients(inputs: AttentionInputs, upstream: Results, tame: AttentionInputs | None = None) -> None:
    """The gradients of q, k and v, with a gradient of the log-sum-exp, too.

    Where scores are huge, `tame` is the same problem without that, which rounding bands are taken from.
    """
    exact, plain = (expected_gradients(inputs, upstream, d) for d in (torch.float64, inputs.q.dtype))
    tame = inputs if tame is None else tame
    bands = backward_bands(tame, upstream.out, attention(tame), Gradients(*exact.values()))
    if upstream.lse is not None:
        of_lse = from_scores(inputs, accumulator(inputs.q.dtype) * largest(upstream.lse.double().abs()))
        bands = {n: bands[n] + of_lse[n] if n in of_lse else bands[n] for n in bands}
    found, terms = gradients(inputs, upstream), inputs.q.shape[2] * S.H // S.Hkv + inputs.k.shape[2]
    expect([compare(n, found[n], exact[n], plain[n], terms, bands[n]) for n in "qkv"])


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_features(isa, name, dtype):
    torch.manual_seed(1)
    check(make(Case(features=FEATURES[name]()), dtype))


@pytest.mark.parametrize("name", ["plain", "lengths", "sinks", "allowed_empty_rows", "dropout"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_of_the_log_sum_exp(isa, name, dtype):
    torch.manual_seed(1)
    inputs = make(Case(features=FEATURES[name]()), dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    upstream = Results(random(S.B, S.H, S.M, S.Dv, dtype=dtype), random(S.B, S.H, S.M, dtype=wide))
    check_gradients(inputs, upstream)


# What models add where others have minus infinity: the lowest of the query's dtype, of float32, half of that, and less
# drastic numbers. float16 reaches to -65504; float64 next to -1e9 has no coarser plain version to take a budget from.
LOWEST, LOWEST32 = -torch.inf, torch.finfo(torch.float32).min
FLOORS = {
    torch.float32: (LOWEST32, LOWEST32 / 2, -1e9, -1e4, -3e3),
    torch.bfloat16: (LOWEST, LOWEST32, LOWEST32 / 2, -1e9, -1e4, -3e3),
    torch.float16: (LOWEST, -1e4, -3e3),
    torch.float64: (LOWEST, LOWEST32, LOWEST32 / 2),
}


@pytest.mark.parametrize(("dtype", "floor"), [(d, floor) for d, floors in FLOORS.items() for floor in floors], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, S.M, S.N), (2, 4, S.M, S.N), (2, 1, 1, S.N)], ids=str)
def test_finite_biases_that_hide(isa, dtype, floor, shape):
    """A row that has the same floor everywhere is a softmax of what is left of its scores, in gradients, too."""
    torch.manual_seed(2)
    bias_dtype = dtype if floor == LOWEST else torch.float32
    value = max(floor, torch.finfo(bias_dtype).min)
    hidden = (torch.rand(shape) < 0.4) | (torch.arange(shape[2])[:, None] % 3 == 0)
    bias = random(*shape, dtype=bias_dtype).masked_fill(hidden, value)
    upstream = Results(random(S.B, S.H, S.M, S.Dv, dtype=dtype), None)
    for features in ({"bias": bias}, {"bias": bias, "right": 3}, {"bias": bias, "softcap": 4.0}):
        inputs = make(Case(features=features), dtype)
        check_forward(inputs)
        check_gradients(inputs, upstream, tame=inputs._replace(bias=bias.clamp(min=-9)))


def test_lowest_bias_has_the_log_sum_exp_of_torch(isa):
    lowest = torch.finfo(torch.float32).min
    inputs = make(Case(features={"bias": torch.full((1, 1, 1, 1), lowest)}), torch.float32)
    assert (run_forward(inputs).lse == lowest).all()


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("right", [-1, 0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(isa, sizes, right, dtype):
    check(make(Case(sizes, {"right": right, "bottom_right": True}), dtype))


@pytest.mark.parametrize("tile", [*flash.TILES, Tile(96, 64), Tile(192, 128), Tile(7, 16), Tile(1, 1)], ids=str)
def test_tiles(isa, tile):
    check_forward(make(Case(Sizes(M=211, N=150), {"left": 100, "right": 30}), torch.float32), tile)


@pytest.mark.parametrize("kind", ["bmhd", "strided", "transposed", "unaligned", "expanded"])
@pytest.mark.parametrize("M", [1, 37])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_layouts(isa, kind, M, dtype):
    inputs = make(Case(Sizes(M=M), {"right": 3}), dtype)
    inputs = inputs._replace(**{n: lay_out(getattr(inputs, n), kind) for n in "qkv"})
    check(inputs)
    out = run_forward(inputs).out
    assert (out.transpose(1, 2) if kind == "bmhd" else out).is_contiguous()


# Rows of whole vectors may be operands where they lie. Lengths are around a block with its rest. The last is so long
# that rows far apart are packed.
WHOLE = [(M, N, layout) for M, N in ((54, 64), (73, 108), (97, 109)) for layout in (None, "bmhd", "same_queries")]


@pytest.mark.parametrize(("M", "N", "layout"), [*WHOLE, (270, 260, "bmhd")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_whole_vectors(isa, layout, M, N, dtype):
    """Queries that share a row have no gradient that cancels, as keys or values that do would have."""
    features = (
        {},
        {"right": 0, "q_lengths": lengths(M - 9)},
        {"dropout_p": 0.2, "rng": torch.tensor([3, 4]), "left": 50},
    )
    for given in features:
        inputs = make(Case(Sizes(1, 6, 3, M, N, 64, 32), given), dtype)
        if layout == "same_queries":
            inputs = inputs._replace(q=inputs.q[:, :, :1].expand_as(inputs.q))
        elif layout is not None:
            inputs = inputs._replace(**{n: lay_out(getattr(inputs, n), layout) for n in "qkv"})
        check(inputs)


@pytest.mark.parametrize("sizes", [Sizes(M=0), Sizes(N=0), Sizes(B=0), Sizes(H=0, Hkv=0)], ids=str)
def test_empty(isa, sizes):
    inputs = make(Case(sizes), torch.float32)
    out, lse = run_forward(inputs)
    assert out.shape == (sizes.B, sizes.H, sizes.M, sizes.Dv)
    assert not out.any() and (lse == -torch.inf).all()
    found = gradients(inputs, Results(torch.ones_like(out), None))
    assert all(not grad.any() and grad.shape == getattr(inputs, n).shape for n, grad in found.items())


STRUCTURED = {
    "k_lengths": {"k_lengths": lengths(40, 65)},
    "causal": {"right": 0},
    "window": {"left": 3, "right": 5},
    "prefix": {"right": 0, "prefix": lengths(10, 20)},
    "segments": {
        "q_segments": torch.arange(2 * 37).view(2, 37) // 30,
        "k_segments": torch.arange(2 * 83).view(2, 83) // 30,
    },
    "both_lengths": {"k_lengths": lengths(40, 65), "q_lengths": lengths(20, 30)},
    # Every fourth row sees nothing.
    "allowed": {"allowed": (torch.arange(37) % 4 < 3).view(1, 1, 37, 1).expand(2, 1, 37, 83)},
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURED)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("M", [1, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_values_do_not_leak(isa, name, poison, M, dtype):
    features = {n: t.int() if isinstance(t, Tensor) and n != "allowed" else t for n, t in STRUCTURED[name].items()}
    if name == "segments":
        features["q_segments"] = features["q_segments"][:, :M].contiguous()
    if name == "allowed":
        features["allowed"] = features["allowed"][:, :, :M].contiguous()
    clean = make(Case(Sizes(M=M), features), dtype)
    seen_by = attention_pattern(clean)
    key_hidden, query_hidden = ~seen_by.any(2), ~seen_by.any(3)  # [B, 1, N], [B, 1, M]
    k, v = (t.masked_fill(key_hidden.unsqueeze(-1), poison) for t in clean[1:3])
    q = clean.q.masked_fill(query_hidden.unsqueeze(-1), poison)
    dirty = clean._replace(q=q, k=k, v=v)
    ones = torch.ones(*clean.q.shape[:3], clean.v.shape[3], dtype=dtype)
    upstream = Results(ones.masked_fill(query_hidden.unsqueeze(-1), poison), None)
    exact, plain = attention(clean), attention(clean, dtype)
    expect([compare(n, *r, S.N) for n, *r in zip(Results._fields, run_forward(dirty), exact, plain, strict=True)])
    wanted, rough = (expected_gradients(clean, Results(ones, None), d) for d in (torch.float64, dtype))
    bands = backward_bands(clean, ones, exact, Gradients(*wanted.values()))
    found = gradients(dirty, upstream)
    expect([compare(n, found[n], wanted[n], rough[n], 2 * M + S.N, bands[n]) for n in "qkv"])


def attention_pattern(inputs: AttentionInputs) -> Tensor:
    return visible(inputs).expand(inputs.q.shape[0], 1, inputs.q.shape[2], inputs.k.shape[2])


def test_rows_keep_their_own_values(isa):
    """A key that is not finite reaches the queries that see it, and no other query of the same block."""
    inputs = make(Case(Sizes(M=83), {"right": 0}), torch.float32)
    exact, plain = attention(inputs).out[:, :, :45], attention(inputs, torch.float32).out[:, :, :45]
    for name in "kv":
        poisoned = getattr(inputs, name).clone()
        poisoned[:, :, 45] = torch.nan
        out = run_forward(inputs._replace(**{name: poisoned})).out
        expect([compare("out", out[:, :, :45], exact, plain, S.N)])
        assert out[:, :, 45:].isnan().all()


@pytest.mark.parametrize("where", ["q", "k", "v", "bias"])
@pytest.mark.parametrize("position", [0, 5, 36])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_visible_nan_arrives(isa, where, position, dtype):
    inputs = make(Case(features={"bias": random(1, 1, S.M, S.N)}), dtype)
    poisoned = getattr(inputs, where).clone()
    poisoned[:, :, position] = torch.nan
    out, lse = run_forward(inputs._replace(**{where: poisoned}))
    rows = out[:, :, position] if where in ("q", "bias") else out
    assert rows.isnan().all()
    assert where == "v" or lse[:, :, position].isnan().all()


def test_large_scores_do_not_overflow(isa):
    inputs = make(Case(), torch.float32)
    check(inputs._replace(q=inputs.q * 1e4, k=inputs.k * 1e3))


def test_the_same_bits_twice(isa):
    inputs = make(Case(features={"right": 0, "bias": random(1, 1, S.M, S.N)}), torch.float32)
    upstream = Results(random(S.B, S.H, S.M, S.Dv), None)
    first, second = gradients(inputs, upstream), gradients(inputs, upstream)
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert torch.equal(run_forward(inputs).out, run_forward(inputs).out)


@pytest.mark.parametrize("M", [50, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_change_nothing(isa, two_threads, M, dtype):
    inputs = make(Case(Sizes(M=M, N=300, D=64, Dv=64), {"right": 0}), dtype)
    upstream = Results(random(2, 4, M, 64, dtype=dtype), None)
    together = [*run_forward(inputs), *gradients(inputs, upstream).values()]
    torch.set_num_threads(1)
    alone = [*run_forward(inputs), *gradients(inputs, upstream).values()]
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


FIVE_THREADS = """
import hashlib, os, torch, sdpa
torch.set_num_threads(5)
torch.manual_seed(0)
seen = []
for M in (30, 700):  # as many tasks as threads, and more
    tensors = [torch.randn(1, 3, M, 32, requires_grad=True) for _ in range(3)]
    out = sdpa.scaled_dot_product_attention(*tensors, is_causal=True, kernel="cpu_flash")
    seen += [out.detach(), *torch.autograd.grad(out.sum(), tensors)]
print(hashlib.sha256(b"".join(t.numpy().tobytes() for t in seen)).hexdigest(), len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted by Linux's /proc")
def test_fewer_threads_than_asked_for_do_all_tasks():
    """OpenMP's limit gives one thread the numbers of several."""

    def run(**limit: str) -> tuple[str, int]:
        command = [sys.executable, "-c", FIVE_THREADS]
        said = subprocess.run(command, env=os.environ | limit, capture_output=True, text=True, check=True).stdout
        return said.split()[0], int(said.split()[1])

    (all_five, many), *limited = run(), run(OMP_THREAD_LIMIT="1"), run(OMP_THREAD_LIMIT="2")
    assert [found for found, _ in limited] == [all_five] * 2
    assert all(count < many for _, count in limited)


@pytest.mark.parametrize("name", ["plain", "causal", "sinks", "bias", "bias_of_rows", "bias_of_keys"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_share_the_keys_of_one_head(isa, two_threads, name, dtype):
    """Where key/value heads are fewer than threads, each gets every other block of keys and sums its own dq."""
    sizes = Sizes(B=1, H=2, Hkv=1, M=70, N=530)
    B, H, M, N = sizes.B, sizes.H, sizes.M, sizes.N
    torch.manual_seed(3)
    features = {
        "plain": {}, "causal": {"right": 0, "bottom_right": True}, "sinks": {"sinks": random(H)},
        "bias": {"bias": random(B, H, M, N)}, "bias_of_rows": {"bias": random(B, H, M, 1)},
        "bias_of_keys": {"bias": random(1, 1, 1, N)},
    }[name]  # fmt: skip
    inputs = make(Case(sizes, features), dtype)
    check(inputs)
    upstream = Results(random(B, H, M, sizes.Dv, dtype=dtype), None)
    first, second = gradients(inputs, upstream), gradients(inputs, upstream)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_dropout_is_philox():
    """Values are the identity, so that the output is the dropped probabilities; p_ij is 1 / N."""
    N = 32
    zeros = torch.zeros(2, 3, 9, N)
    rng = torch.tensor([0x0123456789ABCDEF, 42])
    inputs = AttentionInputs(
        zeros, torch.zeros(2, 3, N, N), torch.eye(N).expand(2, 3, N, N), 1.0, dropout_p=0.4, rng=rng
    )
    kept = philox.keep_mask(rng, 0.4, (2, 3, 9, N))
    torch.testing.assert_close(run_forward(inputs).out, kept * philox.kept_factor(0.4) / N)


@pytest.mark.parametrize("masks", [(), ("bias",), ("allowed",), ("bias", "allowed")], ids="+".join)
def test_calls_made_again(masks):
    """What `record` gives to do it again reads everything from the tensors of the new call."""
    features = {"bias": lambda: random(1, S.H, S.M, S.N), "allowed": lambda: coins(S.B, 1, S.M, S.N)}

    def problem(seed: int) -> AttentionInputs:
        case = Case(S, {"left": 30, "right": 9, **{name: features[name]() for name in masks}})
        return make(case, torch.float32, seed)

    first, second = problem(0), problem(1)
    assert not any(map(torch.equal, read_of(first), read_of(second)))
    kind, back = AttentionProblem.of(first, extra={"lse"}), AttentionProblem.of(first, "backward")
    results, again = flash.record((first,), kind, None)
    expected = flash.forward(second, kind)
    assert all(map(torch.equal, results, flash.forward(first, kind)))
    assert all(map(torch.equal, again(*read_of(second)), expected))

    upstream, other = (Results(random(S.B, S.H, S.M, S.Dv), None) for _ in range(2))
    gradients, again = flash.record((first, results, upstream), back, None)
    assert all(map(torch.equal, gradients[:3], flash.backward(first, results, upstream, back)[:3]))
    found = again(*read_of(second), *expected, other.out)
    assert all(map(torch.equal, found[:3], flash.backward(second, expected, other, back)[:3]))
    assert not any(map(torch.equal, gradients[:3], found[:3]))


def test_a_split_forward_made_again_without_a_log_sum_exp(two_threads):
    """Threads share the keys of one query, and combine what they found."""
    first, second = ([random(1, 1, n, 64) for n in (1, 8192, 8192)] for _ in range(2))
    inputs, others = AttentionInputs(*first, 1.0), AttentionInputs(*second, 1.0)
    problem = AttentionProblem.of(inputs)
    again = flash.record((inputs,), problem, None)[1]
    assert torch.equal(again(*second)[0], flash.forward(others, problem).out)


@pytest.mark.parametrize("layout", ["bhmd", "bmhd"])
def test_outputs_made_again_lie_as_the_first(layout):
    q, k, v = (random(2, 5, 3, 8).transpose(1, 2) if layout == "bmhd" else random(2, 3, 5, 8) for _ in range(3))
    inputs = AttentionInputs(q, k, v, 1.0)
    results, again = flash.record((inputs,), AttentionProblem.of(inputs), None)
    assert again(q, k, v)[0].stride() == results.out.stride()
    assert (results.out.stride(1) < results.out.stride(2)) == (layout == "bmhd")


def test_an_empty_option_keeps_its_place():
    """Without keys their segments have no memory, and the sinks stand behind them."""
    q, k = random(2, 2, 3, 8), random(2, 2, 0, 8)
    ids = torch.zeros(2, 3, dtype=torch.int32)
    inputs = AttentionInputs(q, k, k.clone(), 1.0, q_segments=ids, k_segments=ids[:, :0].clone(), sinks=random(2))
    problem = AttentionProblem.of(inputs, extra={"lse"})
    results, again = flash.record((inputs,), problem, None)
    assert all(map(torch.equal, again(*read_of(inputs)), results))


def test_the_operator_is_called_where_addresses_do_not_do():
    """Tensors without memory are for torch to refuse, and a profiler wants to see an operator."""
    first = make(Case(S, {}), torch.float32, 0)
    problem = AttentionProblem.of(first)
    again = flash.record((first,), problem, None)[1]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert again(*read_of(first)) is None
        sdpa.scaled_dot_product_attention(*first[:3], enable_gqa=True, kernel="cpu_flash")
    assert any("sdpa_cpu::flash_forward" in event.key for event in profile.key_averages())
    freed = [t.clone() for t in read_of(first)]
    freed[1].untyped_storage().resize_(0)
    assert again(*freed) is None


@pytest.mark.parametrize("offset", [0, 64])
@pytest.mark.parametrize("calls", [0, 3])
@pytest.mark.parametrize("freed", range(4))
def test_freed_storage_is_refused(freed, calls, offset):
    """By the first call and by a repeated one. Such an address would end the process."""
    q, k, v = (random(offset + 2 * 3 * 5 * 8)[offset:].view(2, 3, 5, 8) for _ in range(3))
    allowed = torch.ones(offset + 25, dtype=torch.bool)[offset:].view(5, 5)
    given = (q, k, v, allowed) if freed == 3 else (q, k, v)
    for _ in range(calls):
        sdpa.scaled_dot_product_attention(*given, kernel="cpu_flash")
    given[freed].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"memory behind them|storage"):
        sdpa.scaled_dot_product_attention(*given, kernel="cpu_flash")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_recorded_call_is_freed(direction, monkeypatch):
    freed, known = [], flash.functions()
    monkeypatch.setattr(flash, "functions", lambda: known._replace(forget=freed.append))
    first = make(Case(S, {}), torch.float32, 0)
    results = run_forward(first)
    learning = (results, Results(results.out, None)) if direction == "backward" else ()
    again = flash.record((first, *learning), AttentionProblem.of(first, direction), None)[1]
    assert not freed
    del again
    gc.collect()
    assert len(freed) == 1
    known.forget(*freed)


AGAIN = {
    "plain": lambda: {},
    "allowed and segments": lambda: {
        "allowed": coins(1, 1, S.M, S.N),
        "q_segments": lengths(1, 2)[:, None].expand(-1, S.M).contiguous(),
        "k_segments": lengths(1, 2)[:, None].expand(-1, S.N).contiguous(),
    },
    "lengths": lambda: {"k_lengths": lengths(5, 20), "q_lengths": lengths(9, 14)},
    "dropout": lambda: {"dropout_p": 0.3, "rng": torch.randint(1 << 40, (2,))},
    "sinks and softcap": lambda: {"sinks": random(S.H), "softcap": 2.0},
    "bias": lambda: {"bias": random(1, S.H, S.M, S.N)},
}


@pytest.mark.parametrize("kind", AGAIN)
def test_calls_of_every_kind_made_again(kind):
    """With a gradient of the log-sum-exp, and of a bias."""
    torch.manual_seed(3)
    first, second = (make(Case(S, AGAIN[kind]()), torch.float32, seed) for seed in (0, 1))
    forward = AttentionProblem.of(first, extra={"lse"})
    results, again = flash.record((first,), forward, None)
    expected = flash.forward(second, forward)
    assert all(map(torch.equal, again(*read_of(second)), expected))
    without, lse = flash.record((first,), AttentionProblem.of(first), None)[1](*read_of(second))
    assert torch.equal(without, expected.out) and lse is None
    assert not torch.equal(results.out, expected.out)
    asked = AttentionProblem.of(first, "backward", frozenset({"lse_grad", *["bias_grad"] * (kind == "bias")}))
    upstream, other = (Results(random(S.B, S.H, S.M, S.Dv), random(S.B, S.H, S.M)) for _ in range(2))
    _, again = flash.record((first, results, upstream), asked, None)
    found = again(*read_of(second), *expected, *other)
    wanted = flash.backward(second, expected, other, asked)
    if kind != "bias" and second.sinks is None:
        assert isinstance(again, flash.LibraryCall), "by addresses"
        assert again(*read_of(second), *expected, other.out) is None, "without the gradient of the log-sum-exp"
    assert [g is None for g in found] == [g is None for g in wanted]
    assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True) if w is not None)


@pytest.mark.parametrize("turned", [False, True])
def test_gradients_made_again_lie_as_the_first_ones(turned):
    """In the order of memory (B, M, H, D) where q, k and v lie so."""
    first, second = (make(Case(S, {}), torch.float32, seed) for seed in (0, 1))
    if turned:
        first, second = (
            i._replace(**{n: getattr(i, n).transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"})
            for i in (first, second)
        )
    problem = AttentionProblem.of(first, "backward")
    results, others = run_forward(first), run_forward(second)
    gradients, again = flash.record((first, results, Results(results.out, None)), problem, None)
    found = again(*second[:3], *others, others.out)
    wanted = flash.backward(second, others, Results(others.out, None), problem)
    assert [g.stride() for g in found[:3]] == [g.stride() for g in gradients[:3]] == [g.stride() for g in wanted[:3]]
    assert all(map(torch.equal, found[:3], wanted[:3])) and found[3] is found[4] is None


def test_a_tensor_in_two_fields_is_given_once_again():
    first, second = (make(Case(S, {}), torch.float32, seed) for seed in (0, 1))
    first, second = (inputs._replace(v=inputs.k) for inputs in (first, second))
    problem = AttentionProblem.of(first)
    again = flash.record((first,), problem, None)[1]
    assert len(read_of(second)) == 2
    assert again(*second[:3]) is None
    out, lse = again(*read_of(second))
    assert torch.equal(out, flash.forward(second, problem).out) and lse is None  # nobody asked for it
    results, others = run_forward(first), run_forward(second)
    backward = AttentionProblem.of(first, "backward")
    again = flash.record((first, results, Results(results.out, None)), backward, None)[1]
    assert again(*second[:3], *others, others.out) is None
    found = again(*read_of(second), *others, others.out)
    wanted = flash.backward(second, others, Results(others.out, None), backward)
    assert all(map(torch.equal, found[:3], wanted[:3]))
