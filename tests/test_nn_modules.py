"""sdpa.nn's modules beside torch's: torch's own samples, and every constructor option under every kind of mask."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from nn_helpers import (
    CAUSAL,
    CLOSE,
    DTYPES,
    PAD,
    Ledger,
    additive,
    built,
    decoders,
    encoders,
    outcome,
    randn,
    rows_of,
    stirred,
)
from torch.testing._internal.common_modules import module_db

import sdpa.nn

SAMPLED = (
    "MultiheadAttention",
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "Transformer",
)
HEAD_MASK = (randn(3 * 2, 5, 5) > 0.3) & (torch.arange(5) > 0)  # (B * H, L, L); every row sees the first key
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
modes = pytest.mark.parametrize("training", (True, False), ids=("train", "eval"))


# torch's own samples


def samples(name, training):
    info = next(info for info in module_db if info.module_cls is getattr(torch.nn, name))
    torch.manual_seed(0)
    return list(info.module_inputs_func(info, "cpu", torch.float32, requires_grad=False, training=training))


def as_called(name, sample):
    """A sample's keyword arguments and the rows of its result that torch leaves to chance."""
    given = dict(sample.forward_input.kwargs)
    if given.get("src_key_padding_mask") is not None and name == "Transformer":
        given["memory_key_padding_mask"] = given["src_key_padding_mask"]  # else the decoder would see those rows
    mask = given.get({"Transformer": "tgt_key_padding_mask", "TransformerEncoder": "src_key_padding_mask"}.get(name))
    batch_first = sample.constructor_input.kwargs.get("batch_first", True)
    return given, None if mask is None else rows_of(mask, batch_first)


@modes
@dtypes
@pytest.mark.parametrize("name", SAMPLED)
def test_samples_of_torch(name, dtype, training):
    ledger = Ledger(dtype)
    for i, sample in enumerate(samples(name, training)):
        constructor = sample.constructor_input
        pair = [module.train(training) for module in built(name, *constructor.args, **constructor.kwargs)]
        ours, theirs = (module.state_dict() for module in pair)
        assert list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)
        given, hidden = as_called(name, sample)
        ledger.add((i, sample.desc), pair, sample.forward_input.args, given, hidden)
        if hidden is not None:
            assert not pair[0](*sample.forward_input.args, **given)[hidden.squeeze(-1)].any()
    ledger.check(at_least=19)


def test_every_module_with_samples_is_sampled():
    listed = {info.module_cls for info in module_db}
    ours = {getattr(torch.nn, name) for name in sdpa.nn.__all__ if hasattr(torch.nn, name)}
    assert ours - {torch.nn.TransformerDecoder} == {getattr(torch.nn, name) for name in SAMPLED} <= listed


@modes
@dtypes
def test_samples_of_the_decoder_layer_in_a_decoder(dtype, training):
    """torch lists none for TransformerDecoder."""
    ledger = Ledger(dtype)
    for i, sample in enumerate(samples("TransformerDecoderLayer", training)):
        layer = torch.nn.TransformerDecoderLayer(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        pair = [module.train(training) for module in built("TransformerDecoder", layer, 2)]
        given, mask = sample.forward_input.kwargs, sample.forward_input.kwargs.get("tgt_key_padding_mask")
        hidden = None if mask is None else rows_of(mask, layer.self_attn.batch_first)
        ledger.add(i, pair, sample.forward_input.args, given, hidden)
    ledger.check(at_least=60)


# Constructor options

MASKS = {
    "none": {},
    "padding": {"key_padding_mask": PAD},
    "float padding": {"key_padding_mask": additive(PAD)},
    "2-D": {"attn_mask": CAUSAL},
    "float 3-D": {"attn_mask": randn(6, 5, 5)},
    "both": {"attn_mask": HEAD_MASK, "key_padding_mask": PAD},
    "both float": {"attn_mask": randn(5, 5), "key_padding_mask": additive(PAD)},
    "mixed": {"attn_mask": randn(5, 5), "key_padding_mask": PAD},
    "hint": {"attn_mask": CAUSAL, "is_causal": True},
    "hint, float": {"attn_mask": additive(CAUSAL), "is_causal": True, "key_padding_mask": additive(PAD)},
}
WEIGHTS = ({"need_weights": False}, {}, {"average_attn_weights": False})
ATTENTIONS = {
    "plain": (8, 2, {}),
    "odd heads": (9, 3, {}),
    "no bias": (8, 2, {"bias": False}),
    "bias_k and bias_v": (8, 2, {"add_bias_kv": True}),
    "zero": (8, 2, {"add_zero_attn": True}),
    "both extra": (8, 2, {"add_bias_kv": True, "add_zero_attn": True, "bias": False}),
    "kdim": (8, 2, {"kdim": 6, "vdim": 10}),
    "kdim, no bias": (8, 2, {"vdim": 4, "bias": False, "add_bias_kv": True}),
}


def inputs_of(attention, kind):
    """(query, key, value): of self-attention, of cross-attention, or three tensors; with or without a batch."""
    own, kdim, vdim = attention.embed_dim, attention.kdim, attention.vdim
    query, key, value = randn(3, 5, own), randn(3, 5, kdim, seed=1), randn(3, 5, vdim, seed=2)
    if own == kdim == vdim:
        key, value = {"self": (query, query), "cross": (key, key), "three": (key, value)}[kind]
    if attention.batch_first:
        return query, key, value
    turned = {id(t): t.transpose(0, 1).contiguous() for t in (query, key, value)}
    return tuple(turned[id(t)] for t in (query, key, value))


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@dtypes
@pytest.mark.parametrize("options", ATTENTIONS)
def test_options_of_attention(options, dtype):
    embed_dim, heads, given = ATTENTIONS[options]
    pairs = [
        stirred(built("MultiheadAttention", embed_dim, heads, batch_first=order, **given)) for order in (True, False)
    ]
    ledger, inputs = Ledger(dtype), itertools.cycle(("self", "cross", "three"))
    masks = {name: mask for name, mask in MASKS.items() if heads == 2 or mask.get("attn_mask", CAUSAL).dim() == 2}
    if given.get("add_bias_kv") or given.get("add_zero_attn"):
        masks.pop("hint")  # torch then counts the extra keys as later ones
    for (name, mask), pair, weights in itertools.product(masks.items(), pairs, WEIGHTS):
        label = name, pair[0].batch_first, *weights
        ledger.add(label, pair, inputs_of(pair[0], next(inputs)), mask | weights)
    ledger.check(at_least=36)


@pytest.mark.parametrize("options", ATTENTIONS)
def test_attention_to_one_sequence(options):
    embed_dim, heads, given = ATTENTIONS[options]
    pair = stirred(built("MultiheadAttention", embed_dim, heads, **given))
    ledger = Ledger()
    for name, mask in {"none": {}, "padding": {"key_padding_mask": PAD[0]}, "mask": {"attn_mask": CAUSAL}}.items():
        args = [t[:, 0].contiguous() for t in inputs_of(pair[0], "three")]
        ledger.add(name, pair, args, mask)
    ledger.add("3-D", pair, args, {"attn_mask": randn(heads, 5, 5)})
    ledger.check()


LAYERS = {
    "relu": {"activation": "relu"},
    "callable": {"activation": F.silu},
    "module": {"activation": torch.nn.GELU()},
    "foreign module": {"activation": torch.nn.Softplus()},
    "eps": {"layer_norm_eps": 0.1},
    "norm_first": {"norm_first": True},
    "no bias": {"bias": False},
    "all": {"activation": F.gelu, "layer_norm_eps": 0.1, "norm_first": True, "bias": False},
}
STACK_MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": PAD},
    "float padding": {"src_key_padding_mask": additive(PAD)},
    "expanded padding": {"src_key_padding_mask": PAD[0].expand(3, 5)},
    "strided padding": {"src_key_padding_mask": PAD.t().contiguous().t()},
    "causal": {"mask": CAUSAL},
    "causal and padding": {"mask": additive(CAUSAL), "src_key_padding_mask": additive(PAD)},
    "causal hint and padding": {"mask": CAUSAL, "src_key_padding_mask": PAD, "is_causal": True},
    "heads": {"mask": HEAD_MASK, "src_key_padding_mask": PAD},
    "learned": {"mask": randn(5, 5), "src_key_padding_mask": additive(PAD)},
    "hint of 3-D": {"mask": CAUSAL.expand(6, 5, 5), "src_key_padding_mask": PAD, "is_causal": True},
}


def alternating(masks, options):
    """Masks with batch_first or without: over all options each has both."""
    orders = itertools.cycle((True, False))
    return zip(masks.items(), itertools.islice(orders, list(LAYERS).index(options) % 2, None), strict=False)


@dtypes
@pytest.mark.parametrize("options", LAYERS)
def test_options_of_the_encoder(options, dtype):
    norm = torch.nn.LayerNorm(8) if options in ("relu", "norm_first") else None
    ledger = Ledger(dtype)
    pairs = {order: encoders(norm=norm, batch_first=order, **LAYERS[options]) for order in (True, False)}
    for (name, masks), batch_first in alternating(STACK_MASKS, options):
        pair = pairs[batch_first]
        x = randn(*((3, 5, 8) if batch_first else (5, 3, 8)))
        mask = masks.get("src_key_padding_mask")
        hidden = None if mask is None else rows_of(mask != 0, batch_first)
        ledger.add(name, pair, (x,), masks, hidden)
        if mask is not None:
            assert not pair[0](x, **masks)[hidden.squeeze(-1)].any()
    ledger.check()


DECODER_MASKS = {
    "none": {},
    "target": {"tgt_key_padding_mask": PAD},
    "memory": {"memory_key_padding_mask": PAD[:, :3]},
    "both": {"tgt_key_padding_mask": PAD, "memory_key_padding_mask": PAD[:, :3]},
    "causal target": {"tgt_key_padding_mask": PAD, "tgt_mask": CAUSAL, "tgt_is_causal": True},
    "causal, memory": {"memory_key_padding_mask": PAD[:, :3], "tgt_mask": CAUSAL},
    "dense": {"tgt_mask": additive(CAUSAL), "memory_mask": randn(5, 3)},
    "dense, target": {"tgt_mask": randn(5, 5), "memory_mask": randn(5, 3), "tgt_key_padding_mask": additive(PAD)},
}


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@dtypes
@pytest.mark.parametrize("options", LAYERS)
def test_options_of_the_decoder(options, dtype):
    ledger = Ledger(dtype)
    norm = torch.nn.LayerNorm(8)
    pairs = {order: decoders(norm=norm, batch_first=order, **LAYERS[options]) for order in (True, False)}
    for (name, masks), batch_first in alternating(DECODER_MASKS, options):
        x, memory = randn(3, 5, 8), randn(3, 3, 8, seed=1)
        args = (x, memory) if batch_first else (x.transpose(0, 1), memory.transpose(0, 1))
        hidden = rows_of(PAD, batch_first) if "tgt_key_padding_mask" in masks else None
        ledger.add(name, pairs[batch_first], args, masks, hidden)
    ledger.check()


def test_the_other_options_of_the_encoder():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16)
    for options in ({"enable_nested_tensor": False}, {"mask_check": False}, {"norm": None}):
        ours, theirs = built("TransformerEncoder", layer, num_layers=2, **options)
        kept = [
            {name: vars(m)[name] for name in ("enable_nested_tensor", "use_nested_tensor", "mask_check")}
            for m in (ours, theirs)
        ]
        assert kept[0] == kept[1] and ours.norm is None and type(ours.layers[0]) is sdpa.nn.TransformerEncoderLayer
    assert type(layer) is torch.nn.TransformerEncoderLayer


def test_a_transformer_leaves_custom_stacks_alone():
    encoder, decoder = encoders(batch_first=True)[1], decoders(batch_first=True)[1]
    model = sdpa.nn.Transformer(8, 2, custom_encoder=encoder, custom_decoder=decoder, batch_first=True)
    assert (type(model.encoder), type(model.decoder)) == (torch.nn.TransformerEncoder, torch.nn.TransformerDecoder)
    assert type(encoder.layers[0]) is torch.nn.TransformerEncoderLayer
    positional = sdpa.nn.Transformer(8, 2, 1, 1, 16, 0.0, F.relu, encoder)
    assert type(positional.encoder) is torch.nn.TransformerEncoder
    assert type(positional.decoder) is sdpa.nn.TransformerDecoder


def test_padded_memory_is_0_for_a_decoder_that_is_not_told():
    ours, theirs = built("Transformer", 8, 2, 1, 1, 16, 0.0, batch_first=True)
    src, tgt = randn(3, 5, 8), randn(3, 4, 8, seed=1)
    memory = theirs.encoder(src, src_key_padding_mask=PAD).masked_fill(rows_of(PAD), 0.0)
    torch.testing.assert_close(ours(src, tgt, src_key_padding_mask=PAD), theirs.decoder(tgt, memory), **CLOSE)


def test_transforms_of_a_functional_call():
    results = []
    for module in stirred(built("MultiheadAttention", 8, 2, batch_first=True)):
        parameters = dict(module.named_parameters())

        def loss(parameters, x, module=module):
            out, weights = torch.func.functional_call(module, parameters, (x, x, x))
            return out.square().sum() + weights.square().sum()

        each = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, randn(3, 5, 8))
        tangent = torch.func.jvp(lambda x, m=module: m(x, x, x)[0], (randn(3, 5, 8),), (randn(3, 5, 8, seed=1),))[1]
        results.append((each, tangent))
    torch.testing.assert_close(*results, **CLOSE)


# Padding beside code that sees whole sequences


class Centred(torch.nn.LayerNorm):
    def forward(self, x):
        return super().forward(x - x.mean(1, keepdim=True))


class Halved(torch.nn.Dropout):
    def forward(self, x):
        return x * (torch.arange(x.shape[1]) % 2)[:, None]


class Placed(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.arange(x.shape[1])[:, None]


class Called(torch.nn.Linear):
    def __call__(self, x):
        return super().__call__(x).cumsum(1)


class Summed(torch.nn.ReLU):
    def forward(self, x):
        return x.cumsum(1)


def on_itself(layer):
    plain = layer.linear1.forward
    layer.linear1.forward = lambda x: plain(x).cumsum(1)


SEEING_SEQUENCES = {
    "softmax": lambda layer: setattr(layer, "activation", lambda x: F.softmax(x, 1)),
    "cumsum": lambda layer: setattr(layer, "activation", lambda x: x.cumsum(1)),
    "pool": lambda layer: setattr(
        layer, "activation", lambda x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)
    ),
    "partial": lambda layer: setattr(layer, "activation", partial(torch.cumsum, dim=1)),
    "option": lambda layer: setattr(layer, "activation", partial(F.threshold, threshold=0.1, value=0.0)),
    "activation": lambda layer: setattr(layer, "activation", Summed()),
    "norm": lambda layer: setattr(layer, "norm1", Centred(8)),
    "dropout": lambda layer: setattr(layer, "dropout2", Halved(0.0)),
    "linear": lambda layer: setattr(layer, "linear1", Placed(8, 16)),
    "call": lambda layer: setattr(layer, "linear1", Called(8, 16)),
    "instance": on_itself,
}


@pytest.mark.parametrize("what", SEEING_SEQUENCES)
def test_what_sees_sequences_gets_a_batch(what, packed):
    """Functions and subclasses that run code of their own, which rows of all sequences together would mislead."""
    pair = encoders(batch_first=True)
    for module in pair:
        torch.manual_seed(0)
        SEEING_SEQUENCES[what](module.layers[-1])
    results = [outcome(module, (randn(3, 5, 8),), {"src_key_padding_mask": PAD}, rows_of(PAD)) for module in pair]
    assert not packed
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_a_norm_of_the_stack_that_sees_sequences_gets_a_batch(packed):
    ours, theirs = encoders(norm=Centred(8), batch_first=True)
    got, wanted = (module(randn(3, 5, 8), src_key_padding_mask=PAD)[~PAD] for module in (ours, theirs))
    torch.testing.assert_close(got, wanted, **CLOSE)
    assert not packed


def test_subclasses_that_run_the_known_code_are_packed(packed):
    """As those that parametrize and fully_shard make."""
    ours, theirs = encoders(batch_first=True)
    for module in (ours, theirs):
        layer = module.layers[0]
        layer.linear1.__class__ = type("Named", (torch.nn.Linear,), {"rank": 1})
        layer.norm1.__class__ = type("Named", (torch.nn.LayerNorm,), {})
        torch.nn.utils.parametrizations.weight_norm(layer.linear2)
    for cast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            got, wanted = (module(randn(3, 5, 8), src_key_padding_mask=PAD)[~PAD] for module in (ours, theirs))
        torch.testing.assert_close(got, wanted, **({"rtol": 0.05, "atol": 0.05} if cast else CLOSE))
    assert len(packed) == 2
