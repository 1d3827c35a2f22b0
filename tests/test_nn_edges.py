"""sdpa.nn's modules off the path: empty and padded batches, errors, autocast, hooks, graphs, and modules of others."""

from __future__ import annotations

import copy
import pickle
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from nn_helpers import (
    CAUSAL,
    CLOSE,
    PAD,
    additive,
    built,
    decoders,
    encoders,
    is_routed,
    outcome,
    randn,
    rows_of,
    stirred,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import sdpa
import sdpa.nn
from sdpa.testing import ERROR_FACTOR

HEAD_MASK = randn(3 * 2, 5, 5) > 0.8
TANH_GELU = partial(F.gelu, approximate="tanh")
ACTIVATIONS = ("relu", "gelu", F.relu, F.silu, torch.tanh, TANH_GELU, torch.nn.GELU(), torch.nn.ReLU())
modes = pytest.mark.parametrize("training", (True, False), ids=("train", "eval"))


@modes
def test_empty_inputs(training):
    (encoder, _), (decoder, _) = encoders(batch_first=True), decoders(batch_first=True)
    x = randn(3, 5, 8)
    for module in (encoder.train(training), decoder.train(training)):
        others = (x[:0],) if module is decoder else ()
        name = "tgt_key_padding_mask" if module is decoder else "src_key_padding_mask"
        assert module(x[:0], *others, **{name: PAD[:0]}).shape == (0, 5, 8)
        assert module(x[:, :0], *(x for _ in others), **{name: PAD[:, :0]}).shape == (3, 0, 8)
        with pytest.raises(IndexError):  # as torch
            built(type(module).__name__, module.layers[0], 0)[0](x, *(x for _ in others))
    assert decoder(x, x[:, :0], tgt_key_padding_mask=PAD).shape == (3, 5, 8)


@modes
def test_a_batch_of_padding_is_0_with_gradients_of_0(training):
    encoder = encoders(batch_first=True)[0].train(training)
    x = randn(3, 5, 8).requires_grad_()
    for mask in (
        torch.ones(3, 5).bool(),
        PAD | torch.tensor([[0], [1], [0]]).bool(),
        additive(torch.ones(3, 5).bool()),
    ):
        out = encoder(x, src_key_padding_mask=mask)
        hidden = mask != 0
        assert not out[hidden].any() and out.isfinite().all()
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        assert not grad[hidden].any() and grad.isfinite().all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in encoder.parameters())


def test_hidden_scores_that_overflow_leave_gradients_finite():
    attention = sdpa.nn.MultiheadAttention(4, 1, bias=False, batch_first=True)
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.eye(4).repeat(3, 1) * 10)
    x = (randn(1, 4, 4) * torch.tensor([1.0, 1.0, 1.0, 99.0])[:, None]).requires_grad_()
    hidden = torch.tensor([0, 0, 0, 1]).bool().expand(4, 4)
    attention(x, x, x, attn_mask=hidden)[1].square().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("batch_first", (True, False))
def test_integer_lengths_are_padding(batch_first):
    (encoder, _), (decoder, _) = encoders(batch_first=batch_first), decoders(batch_first=batch_first)
    lengths = torch.tensor([4, 0, 5])
    mask = torch.arange(5) >= lengths[:, None]
    x = randn(3, 5, 8) if batch_first else randn(5, 3, 8)
    extra = sdpa.nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True, batch_first=batch_first)
    for attention in (encoder.layers[0].self_attn, extra):
        for given in ({}, {"attn_mask": CAUSAL}, {"attn_mask": CAUSAL, "is_causal": True}):
            got, wanted = (attention(x, x, x, key_padding_mask=m, **given) for m in (lengths, mask))
            torch.testing.assert_close(got, wanted, **CLOSE)
    got, wanted = (encoder(x, src_key_padding_mask=m) for m in (lengths, mask))
    torch.testing.assert_close(got, wanted, **CLOSE)
    got, wanted = (decoder(x, x, tgt_key_padding_mask=m, memory_key_padding_mask=m) for m in (lengths, mask))
    torch.testing.assert_close(got, wanted, **CLOSE)


def refusal(call):
    with pytest.raises((AssertionError, RuntimeError)) as error:
        call()
    return type(error.value), str(error.value)


def test_errors_are_those_of_torch():
    pair = built("MultiheadAttention", 8, 2, batch_first=True)
    x, integers = randn(3, 5, 8), torch.ones(3, 5, dtype=torch.int64)
    calls = (
        lambda m: m(x, x, x, key_padding_mask=integers),
        lambda m: m(x[0], x[0], x[0], key_padding_mask=integers[0]),
        lambda m: m(x, x, x, attn_mask=integers),
        lambda m: m(x, x, x, is_causal=True),
        lambda m: m(x, x, x, attn_mask=CAUSAL[:4]),
        lambda m: m(x, x, x, attn_mask=HEAD_MASK[:4]),
        lambda m: m(x, x, x, attn_mask=HEAD_MASK[None]),
        lambda m: m(x, x, x, key_padding_mask=PAD[:2]),
        lambda m: m(x, x, x, key_padding_mask=PAD[:, :4]),
        lambda m: m(x[..., :4], x, x),
        lambda m: m(x, x, x[0]),
    )
    for call in calls:
        assert refusal(lambda call=call: call(pair[0])) == refusal(lambda call=call: call(pair[1]))
    assert refusal(lambda: pair[0](x, x[:1], x[:1]))[0] is RuntimeError
    wider = additive(torch.ones(9, 9).bool().triu(1))  # what a hint tells is not read
    torch.testing.assert_close(*(m(x, x, x, attn_mask=wider, is_causal=True, need_weights=False) for m in pair))
    for call in (
        lambda m: m(x, src_key_padding_mask=integers),
        lambda m: m(x, mask=integers[:1].expand(5, 5)),
        lambda m: m(x, is_causal=True, src_key_padding_mask=PAD),
    ):
        ours, theirs = (refusal(lambda call=call, m=m: call(m)) for m in encoders(batch_first=True))
        assert ours == theirs


X, BATCH = randn(3, 5, 8), {"batch_first": True}
TARGET = ("tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask")
# kind: (the module, its inputs, its masks); the stacks of a Transformer answer for its masks
ARGUMENTS = {
    "MultiheadAttention": (lambda: ATTENTION[0], ("query", "key", "value"), ("key_padding_mask", "attn_mask")),
    "TransformerEncoderLayer": (lambda: ENCODER.layers[0], ("src",), ("src_mask", "src_key_padding_mask")),
    "TransformerEncoder": (lambda: ENCODER, ("src",), ("mask", "src_key_padding_mask")),
    "TransformerDecoderLayer": (lambda: DECODER.layers[0], ("tgt", "memory"), TARGET),
    "TransformerDecoder": (lambda: DECODER, ("tgt", "memory"), TARGET),
    "Transformer": (lambda: built("Transformer", 8, 2, 1, 1, 16, **BATCH)[0], ("src", "tgt"), ()),
    "Transformer's stacks": (lambda: built("Transformer", 8, 2, 1, 1, 16, **BATCH)[0], ("src", "tgt"), TARGET),
}
ATTENTION = built("MultiheadAttention", 8, 2, **BATCH)
ENCODER, DECODER = encoders(**BATCH)[0], decoders(**BATCH)[0]


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_what_is_no_tensor_is_told_by_its_name(kind):
    build, inputs, masks = ARGUMENTS[kind]
    module, given = build(), dict.fromkeys(inputs, X)
    for name in masks if kind.endswith("stacks") else (*inputs, *masks):
        for wrong in ("a", [1, 2, 3], sdpa.Mask(causal=True)):
            with pytest.raises(TypeError) as error:
                module(**given | {name: wrong})
            speaker = "TransformerDecoder" if kind.endswith("stacks") else kind
            wanted = "Tensor" if name in inputs else "Tensor or None"
            assert str(error.value) == f"{speaker}(): argument '{name}' must be {wanted}, not {type(wrong).__name__}"


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
def test_lengths_are_integers(dtype):
    """torch's error, and one sentence that has what is expected before what was given."""
    lengths = torch.ones(3, dtype=dtype)
    ours, theirs = (refusal(lambda m=m: m(X, X, X, key_padding_mask=lengths)) for m in ATTENTION)
    assert ours[0] == theirs[0] and ours[1] == (
        "For batched (3-D) `query`, expected `key_padding_mask` to be a 2-D mask, bool or floating, or 1-D lengths, "
        f"which are integers, but got a 1-D tensor of {dtype}"
    )
    for call in (
        lambda: ENCODER(X, src_key_padding_mask=lengths),
        lambda: DECODER(X, X, tgt_key_padding_mask=lengths),
        lambda: DECODER(X, X, memory_key_padding_mask=lengths),
    ):
        assert refusal(call) == ours


def test_a_decoder_names_the_mask_of_another_dtype():
    integers = torch.ones(3, 5, dtype=torch.int64)
    for name in TARGET:
        for wrong in (integers, integers * 1j):
            with pytest.raises(AssertionError, match=f"^only bool and floating types of {name} are supported$"):
                DECODER(X, X, **{name: wrong})
    with pytest.raises(AssertionError, match="only bool and floating types of src_key_padding_mask are supported"):
        ENCODER(X, src_key_padding_mask=torch.ones(3) * 1j)


@pytest.mark.parametrize("mask_dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
def test_any_float_mask_under_autocast(mask_dtype):
    ours, theirs = stirred(built("MultiheadAttention", 8, 2, batch_first=True))
    x, mask = randn(3, 5, 8), additive(CAUSAL)
    exact = theirs(x, x, x, attn_mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        plain = theirs(x, x, x, attn_mask=mask)
        found = [ours(x, x, x, attn_mask=mask.to(mask_dtype), need_weights=needed) for needed in (True, False)]
    assert found[1][1] is None
    for got, like, wanted in zip(found[0], plain, exact, strict=True):
        assert got.dtype == like.dtype == torch.bfloat16
        error, rough = ((t - wanted).abs().max() for t in (got, like))
        assert error <= ERROR_FACTOR * rough + torch.finfo(torch.bfloat16).eps * wanted.abs().max()
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(ours(x, x, x, attn_mask=mask.to(mask_dtype)), exact)


@pytest.mark.parametrize("recording", (True, False))
def test_dropped_weights_are_those_of_the_output(recording):
    attention = sdpa.nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    x = randn(3, 40, 8)
    value = attention.project(x, x, x)[2].unflatten(-1, (2, 4)).transpose(1, 2)
    with torch.set_grad_enabled(recording):
        out, weights = attention(x, x, x, average_attn_weights=False)
    wanted = attention.out_proj((weights @ value).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(out, wanted, **CLOSE)
    assert 0.4 < (weights == 0).float().mean() < 0.6 and out.requires_grad == recording
    assert not (attention.eval()(x, x, x)[1] == 0).any()


# Hooks that raise before the one which routes a model's functional calls


class Around(torch.nn.Module):
    """Has a module refuse its call and goes on; on another device as well."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.seen = inner, []

    def forward(self, x):
        for device in ("cpu", "meta"):
            with torch.device(device):
                refused(self.inner)
                self.seen.append(torch.empty(1).device.type == device)
        self.seen.append(is_routed())
        if not x.any():
            raise RuntimeError("on purpose")


def refused(module):
    with pytest.raises(ValueError, match="before ours"):
        module(None)


@pytest.fixture(params=("prepended", "global"))
def routed(request):
    """Makes a module's functional calls ours, and a call with nothing raise before that."""
    handles = []

    def refuse(module, inputs):
        if inputs == (None,):
            raise ValueError("before ours")

    def make(module):
        sdpa.nn.accelerate(module, functional=True)
        if request.param == "prepended":
            handles.append(module.register_forward_pre_hook(refuse, prepend=True))
        return module

    if request.param == "global":
        handles.append(torch.nn.modules.module.register_module_forward_pre_hook(refuse))
    yield make
    for handle in handles:
        handle.remove()


def test_a_hook_that_raises_first_leaves_modes_of_others_alone(routed):
    module = routed(Around(routed(torch.nn.Identity())))
    with torch.device("meta"):
        refused(module)
        assert torch.empty(1).is_meta
    for repeats in (1, 2):
        module(X)
        assert module.seen == [True] * 3 * repeats and not is_routed()
    with pytest.raises(RuntimeError, match="on purpose"):
        module(torch.zeros(1))
    assert module.seen == [True] * 9 and not is_routed()


@pytest.mark.parametrize("again", (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))))
def test_a_copy_that_is_refused_in_another_thread(again, routed):
    module, found = torch.nn.Identity(), []
    sdpa.nn.accelerate(module, functional=True)
    twin = routed(again(module))

    def other():
        with torch.device("meta"):
            refused(twin)
            found.append(torch.empty(1).is_meta)
        found.append(is_routed())

    def meanwhile(module, inputs):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        found.append(is_routed())

    module.register_forward_pre_hook(meanwhile)
    module(X)
    assert found == [True, False, True] and not is_routed()


# Whose rows may be packed


def test_padding_is_packed_once_wherever_every_row_stands_alone(packed):
    x = randn(3, 5, 8)
    for activation in ACTIVATIONS:
        encoders(batch_first=True, activation=activation)[0](x, src_key_padding_mask=PAD)
    assert len(packed) == len(ACTIVATIONS)
    decoders(norm=torch.nn.LayerNorm(8))[0](x.transpose(0, 1), x.transpose(0, 1), memory_key_padding_mask=PAD)
    assert len(packed) == len(ACTIVATIONS) + 1
    encoders(batch_first=True)[0](x, src_key_padding_mask=torch.zeros(3, 5).bool())
    encoders(batch_first=True, activation=torch.nn.Softplus())[0](x, src_key_padding_mask=PAD)  # of unknown kind
    assert len(packed) == len(ACTIVATIONS) + 1


def test_hooks_and_foreign_modules_see_a_batch(packed):
    x, seen = randn(3, 5, 8), []
    ours, theirs = encoders(batch_first=True)
    ours.layers[0].linear1.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    wanted = theirs(x, src_key_padding_mask=PAD)
    torch.testing.assert_close(ours(x, src_key_padding_mask=PAD)[~PAD], wanted[~PAD], **CLOSE)
    assert seen == [(3, 5, 16)] and not packed
    ours, theirs = encoders(norm=torch.nn.LayerNorm((5, 8)), batch_first=True)
    assert ours(x, src_key_padding_mask=PAD).shape == (3, 5, 8) and not packed
    ours.norm = None
    ours.layers[0].forward = theirs.layers[0].forward
    ours(x, src_key_padding_mask=PAD)
    assert not packed


@pytest.mark.parametrize("graph", ("meta", "fake", "make_fx", "trace", "export", "vmap"))
def test_a_graph_serves_every_mask(graph, packed):
    encoder = encoders(batch_first=True)[0].requires_grad_(False)
    x, other = randn(3, 5, 8), PAD.flip(0)

    def call(x, mask):
        return encoder(x, src_key_padding_mask=mask)

    if graph == "meta":
        assert copy.deepcopy(encoder).to("meta")(x.to("meta"), src_key_padding_mask=PAD.to("meta")).shape == x.shape
    elif graph == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert call(mode.from_tensor(x), mode.from_tensor(PAD)).shape == x.shape
    elif graph == "vmap":
        got = torch.vmap(call, (0, None))(x.expand(2, 3, 5, 8), other)[1]
    elif graph == "export":
        got = torch.export.export(encoder, (x,), {"src_key_padding_mask": PAD}).module()(x, src_key_padding_mask=other)
    else:
        made = make_fx(call)(x, PAD) if graph == "make_fx" else torch.jit.trace(call, (x, PAD), check_trace=False)
        got = made(x, other)
    assert not packed
    if graph not in ("meta", "fake"):
        torch.testing.assert_close(got, call(x, other), **CLOSE)


def test_scripting_says_what_to_do():
    with pytest.raises(NotImplementedError, match=r"sdpa\.nn\.restore"):
        torch.jit.script(encoders()[0])


def test_nested_tensors_take_the_path_of_torch():
    x = torch.nested.nested_tensor([randn(4, 8), randn(2, 8)])
    ours, theirs = (module.eval() for module in encoders(batch_first=True))
    with torch.no_grad():
        got, wanted = (module(x).to_padded_tensor(0.0) for module in (ours, theirs))
    torch.testing.assert_close(got, wanted, **CLOSE)
    assert refusal(lambda: ours.train()(x)) == refusal(lambda: theirs.train()(x))


def test_layers_of_others_get_what_torch_gives_them():
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn = torch.nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
            x = src.unsqueeze(1)
            return F.scaled_dot_product_attention(x, x, x, src_key_padding_mask[:, None, None]).squeeze(1)

    x = randn(3, 5, 8)
    results = [m(x, src_key_padding_mask=PAD) for m in built("TransformerEncoder", Own(), 2)]
    torch.testing.assert_close(*results)
    ours, theirs = encoders(layers=1, batch_first=True)
    for module in (ours, theirs):
        module.layers[0].self_attn = SelfAttention()
    results = [outcome(m, (x,), {"src_key_padding_mask": PAD}, rows_of(PAD)) for m in (ours, theirs)]
    torch.testing.assert_close(*results)
    with pytest.raises(AttributeError, match="self_attn"):  # as torch
        built("TransformerEncoder", torch.nn.Linear(8, 8), 2)[0](x)


class SelfAttention(torch.nn.Module):
    """An attention of another make, which adds its masks."""

    batch_first, _qkv_same_embed_dim, in_proj_bias = True, False, None

    def forward(self, query, key, value, attn_mask=None, key_padding_mask=None, need_weights=False, is_causal=False):
        q, k, v = (t.unsqueeze(1) for t in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, key_padding_mask[:, None, None]).squeeze(1), None
