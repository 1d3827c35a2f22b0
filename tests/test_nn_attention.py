"""sdpa.nn.MultiheadAttention against torch's: every option, mask and layout; weights, errors, lengths, dead rows."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch

from sdpa import nn

E, H, L, S, B = 36, 3, 5, 7, 2  # an odd number of heads, which torch's fast path does not know


def pair(**options):
    """torch's module and ours from the same seed, in float64."""
    made = []
    for kind in (torch.nn.MultiheadAttention, nn.MultiheadAttention):
        torch.manual_seed(1)
        made.append(kind(E, H, dtype=torch.float64, **options))
    return made


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tensors(kind, batch_first, kdim=E, vdim=E):
    """query, key and value, of which some are one as `kind` says."""
    rows = L if kind == "self" else S
    made = {"query": draw(B, L, E), "key": draw(B, rows, kdim, seed=1), "value": draw(B, rows, vdim, seed=2)}
    if not batch_first:
        made = {name: t.transpose(0, 1) for name, t in made.items()}
    q, k, v = made.values()
    return {"self": (q, q, q), "memory": (q, k, k), "apart": (q, k, v)}[kind]


def hidden(*shape, seed=3):
    """A bool mask that leaves the first key to everyone."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.6
    mask[..., 0] = False
    return mask


MASKS = {
    "none": lambda N: {},
    "bool": lambda N: {"attn_mask": hidden(L, N)},
    "float": lambda N: {"attn_mask": draw(L, N)},
    "per_head": lambda N: {"attn_mask": draw(B * H, L, N)},
    "per_head_bool": lambda N: {"attn_mask": hidden(B * H, L, N)},
    "padding": lambda N: {"key_padding_mask": hidden(B, N)},
    "float_padding": lambda N: {"key_padding_mask": draw(B, N)},
    "both": lambda N: {"attn_mask": hidden(L, N), "key_padding_mask": hidden(B, N, seed=4)},
    "both_float": lambda N: {"attn_mask": draw(L, N), "key_padding_mask": draw(B, N, seed=4)},
    "infinite": lambda N: {"attn_mask": torch.zeros(L, N, dtype=torch.float64).masked_fill(hidden(L, N), -torch.inf)},
}
OPTIONS = {
    "plain": {},
    "no_bias": {"bias": False},
    "learned_key": {"add_bias_kv": True},
    "zero_key": {"add_zero_attn": True},
    "both_keys": {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    "widths": {"kdim": 24, "vdim": 20},
    "widths_no_bias": {"kdim": 24, "bias": False},
}


def agree(ours, torchs, about=""):
    torch.testing.assert_close(ours, torchs, rtol=1e-9, atol=1e-10, msg=lambda text: f"{about}: {text}")


def gradients(module, inputs, **arguments):
    """Output, weights, and the gradients of both with respect to inputs and parameters."""
    distinct = {id(t): t.detach().requires_grad_() for t in inputs}
    out, weights = module(*(distinct[id(t)] for t in inputs), **arguments)
    loss = (out * draw(*out.shape, seed=8)).sum()
    if weights is not None:
        loss = loss + (weights * draw(*weights.shape, seed=9)).sum()
    learned = [*distinct.values(), *module.parameters()]
    return out, weights, torch.autograd.grad(loss, learned, allow_unused=True)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_like_torch(mask, batch_first, options):
    options = OPTIONS[options]
    torchs, ours = pair(batch_first=batch_first, **options)
    widths = {name: options[name] for name in ("kdim", "vdim") if name in options}
    for kind in ("apart",) if widths else ("self", "memory", "apart"):
        inputs = tensors(kind, batch_first, **widths)
        arguments = MASKS[mask](inputs[1].shape[1 if batch_first else 0])
        for need_weights, average in ((True, True), (True, False), (False, True)):
            asked = {**arguments, "need_weights": need_weights, "average_attn_weights": average}
            agree(gradients(ours, inputs, **asked), gradients(torchs, inputs, **asked), (kind, asked))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", ["none", "bool", "both"])
def test_without_a_batch(mask, need_weights):
    torchs, ours = pair()
    inputs = [draw(rows, E, seed=rows) for rows in (L, S, S)]
    arguments = {name: t if name == "attn_mask" else t[0] for name, t in MASKS[mask](S).items()}
    arguments["need_weights"] = need_weights
    agree(gradients(ours, inputs, **arguments), gradients(torchs, inputs, **arguments))


def test_state_dicts_go_both_ways():
    for options in OPTIONS.values():
        torchs, ours = pair(**options)
        assert all(torch.equal(a, b) for a, b in zip(torchs.parameters(), ours.parameters(), strict=True))
        assert list(torchs.state_dict()) == list(ours.state_dict())
        for source, target in ((torchs, ours), (ours, torchs)):
            with torch.no_grad():
                for parameter in target.parameters():
                    parameter.add_(1.0)
            target.load_state_dict(source.state_dict(), strict=True)
            assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
        inputs = [draw(2, B, width) for width in (E, ours.kdim, ours.vdim)]
        for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert type(again) is nn.MultiheadAttention
            agree(again(*inputs)[0], ours(*inputs)[0])


def test_causal_hint():
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    torchs, ours = pair(batch_first=True)
    inputs = tensors("self", True)
    for padding in (None, hidden(B, L)):
        for need_weights in (True, False):
            asked = {"attn_mask": causal, "is_causal": True, "key_padding_mask": padding, "need_weights": need_weights}
            agree(ours(*inputs, **asked), torchs(*inputs, **asked))
    torchs, ours = pair(add_zero_attn=True, batch_first=True)
    asked = {"attn_mask": causal, "key_padding_mask": hidden(B, L)}
    agree(ours(*inputs, **asked, is_causal=True), torchs(*inputs, **asked))


def plain_module(dropout):
    """Projections that do nothing, so that the output is weights @ value."""
    module = nn.MultiheadAttention(8, 1, dropout=dropout, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(8).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(8))
    return module


@pytest.mark.parametrize("dropout", [0.0, 0.5, 1.0])
def test_weights_are_those_that_were_used(dropout):
    module = plain_module(dropout).train()
    q, v = draw(3, L, 8), draw(3, S, 8, seed=1)
    out, weights = module(q, v, v)
    agree(out, weights @ v)
    assert (weights == 0).any() == (dropout > 0)
    if dropout == 0.5:
        kept = weights[weights != 0] * 0.5
        whole = torch.softmax(q @ v.mT * 8**-0.5, -1)[weights != 0]
        agree(kept, whole)
    agree(module.eval()(q, v, v)[0], torch.softmax(q @ v.mT * 8**-0.5, -1) @ v)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_half_precisions_add_up(dtype):
    """Large scores: a log-sum-exp rounded to the dtype would be off by percents."""
    module = plain_module(0.0).to(dtype)
    q, v = (8 * draw(3, 64, 8, seed=seed).to(dtype) for seed in (0, 1))
    weights = module(q, v, v)[1]
    assert weights.dtype == dtype
    torch.testing.assert_close(weights.double().sum(-1), torch.ones(3, 64).double(), rtol=0, atol=0.02)


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_row_that_sees_no_key_is_zero(need_weights):
    _, ours = pair(batch_first=True)
    inputs = tensors("memory", True)
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[1] = True
    out, weights, found = gradients(ours, inputs, key_padding_mask=padding, need_weights=need_weights)
    agree(out[1], ours.out_proj.bias.expand(L, E))
    assert weights is None or not weights[1].any()
    assert all(g is None or g.isfinite().all() for g in found)


@pytest.mark.parametrize("options", ["plain", "both_keys"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_lengths_in_place_of_padding(options, batch_first):
    _, ours = pair(batch_first=batch_first, **OPTIONS[options])
    inputs, lengths = tensors("memory", batch_first), torch.tensor([4, 1])
    padding = torch.arange(S) >= lengths[:, None]
    for causal in (False, True):
        mask = {"attn_mask": torch.ones(L, S, dtype=torch.bool).triu(1), "is_causal": True} if causal else {}
        agree(ours(*inputs, lengths, **mask), ours(*inputs, padding, **mask))


BAD = {
    "integer_mask": ((L, B, E), {"attn_mask": torch.zeros(L, S, dtype=torch.int64)}),
    "integer_padding": ((L, B, E), {"key_padding_mask": torch.zeros(B, S, dtype=torch.int64)}),
    "mask_2d": ((L, B, E), {"attn_mask": torch.zeros(L, S + 1)}),
    "mask_3d": ((L, B, E), {"attn_mask": torch.zeros(B, L, S)}),
    "mask_4d": ((L, B, E), {"attn_mask": torch.zeros(B, H, L, S)}),
    "padding_batch": ((L, B, E), {"key_padding_mask": torch.zeros(B + 1, S, dtype=torch.bool)}),
    "padding_keys": ((L, B, E), {"key_padding_mask": torch.zeros(B, S + 1, dtype=torch.bool)}),
    "padding_1d": ((L, B, E), {"key_padding_mask": torch.zeros(S, dtype=torch.bool)}),
    "hint_alone": ((L, B, E), {"is_causal": True}),
    "width": ((L, B, E + 1), {}),
    "rank": ((1, L, B, E), {}),
    "unbatched_query": ((L, E), {}),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("need_weights", [True, False])
def test_complaints_are_torchs(name, need_weights):
    shape, arguments = BAD[name]
    torchs, ours = (module.float() for module in pair())
    inputs = (torch.zeros(shape), torch.zeros(S, B, E), torch.zeros(S, B, E))
    with pytest.raises((AssertionError, RuntimeError)) as wanted:
        torchs(*inputs, **arguments, need_weights=need_weights)
    with pytest.raises(wanted.type) as got:
        ours(*inputs, **arguments, need_weights=need_weights)
    assert str(got.value) == str(wanted.value)


@pytest.mark.parametrize("need_weights", [True, False])
def test_autocast(need_weights):
    torchs, ours = (module.float() for module in pair(batch_first=True))
    inputs = [t.float() for t in tensors("apart", True)]
    arguments = {"key_padding_mask": hidden(B, S), "attn_mask": torch.randn(L, S), "need_weights": need_weights}
    with torch.autocast("cpu", torch.bfloat16):
        got, weights = ours(*inputs, **arguments)
        wanted, _ = torchs(*inputs, **arguments)
    assert got.dtype == wanted.dtype == torch.bfloat16
    assert weights is None or weights.isfinite().all()
    exact = torchs(*inputs, **arguments)[0]
    assert (got - exact).abs().max() <= 2 * (wanted - exact).abs().max() + 2**-8


@pytest.mark.parametrize("training,need_weights", itertools.product([True, False], [True, False]))
def test_compiled_whole(training, need_weights):
    _, ours = pair(batch_first=True)
    ours.float().train(training)
    inputs = [t.float() for t in tensors("self", True)]
    asked = {"key_padding_mask": hidden(B, L), "need_weights": need_weights}
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs, **asked), ours(*inputs, **asked))


def test_meta_device_and_default_dtype():
    with torch.device("meta"):
        module = nn.MultiheadAttention(E, H)
        out, weights = module(torch.zeros(L, B, E), torch.zeros(S, B, E), torch.zeros(S, B, E))
    assert out.shape == (L, B, E) and weights.shape == (B, L, S) and out.device.type == "meta"
