"""Layers and stacks of sdpa.nn against torch's: padding of any pattern packed, and zeros in its place."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sdpa import nn
from sdpa.nn import padding, stacks

D, HEADS, B, S, T = 24, 3, 4, 6, 5
KINDS = {
    torch.nn.TransformerEncoderLayer: nn.TransformerEncoderLayer,
    torch.nn.TransformerDecoderLayer: nn.TransformerDecoderLayer,
}


def draw(rows, batch_first, seed=0, batch=B):
    made = torch.randn(batch, rows, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return made if batch_first else made.transpose(0, 1)


def holes(rows, seed=0):
    """Padding anywhere; one sequence without any, one that is nothing else."""
    mask = torch.rand(B, rows, generator=torch.Generator().manual_seed(seed)) > 0.5
    mask[0], mask[1], mask[2:, rows // 2] = False, True, False
    return mask


def transformers(**options):
    made = []
    for kind in (torch.nn.Transformer, nn.Transformer):
        torch.manual_seed(1)
        made.append(kind(D, HEADS, 2, 2, 32, dropout=0.0, dtype=torch.float64, **options))
    assert all(torch.equal(a, b) for a, b in zip(*(m.state_dict().values() for m in made), strict=True))
    return made


def only_there(output, mask, batch_first):
    """torch's output with zeros in the padding, where it has whatever padding gives."""
    return output.masked_fill((mask if batch_first else mask.t()).unsqueeze(-1), 0.0)


def agree(got, wanted, about=""):
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-9, msg=lambda text: f"{about}: {text}")


CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)
CALLS = {
    "plain": lambda: {},
    "causal_found": lambda: {"tgt_mask": CAUSAL},
    "causal_float": lambda: {"tgt_mask": torch.nn.Transformer.generate_square_subsequent_mask(T).double()},
    "causal_hint": lambda: {"tgt_mask": CAUSAL, "tgt_is_causal": True},
    "dense": lambda: {"src_mask": torch.eye(S, dtype=torch.bool).roll(1, 0), "memory_mask": torch.zeros(T, S).double()},
    "memory": lambda: {"memory_key_padding_mask": partly(S)},
    "target": lambda: {"tgt_key_padding_mask": partly(T), "tgt_mask": CAUSAL},
    "all": lambda: {
        "src_key_padding_mask": partly(S),
        "memory_key_padding_mask": partly(S),
        "tgt_key_padding_mask": partly(T),
        "tgt_mask": CAUSAL,
    },
    "dense_and_padding": lambda: {
        "src_mask": torch.eye(S, dtype=torch.bool).roll(1, 0),
        "src_key_padding_mask": ends(S),
        "memory_key_padding_mask": ends(S),
    },
}


def partly(rows):
    """Padding anywhere, but no sequence of nothing else, of which torch makes NaN."""
    mask = holes(rows)
    mask[1, 0] = False
    return mask


def ends(rows):
    return torch.arange(rows) >= torch.tensor([rows, rows - 1, 4, rows])[:, None]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("batch_first,norm_first,bias", itertools.product([False, True], repeat=3))
def test_transformer_like_torchs(call, batch_first, norm_first, bias):
    torchs, ours = transformers(batch_first=batch_first, norm_first=norm_first, bias=bias)
    arguments = CALLS[call]()
    results = []
    for module in (torchs, ours):
        src, tgt = (draw(rows, batch_first, rows).requires_grad_() for rows in (S, T))
        out = module(src, tgt, **arguments)
        if "tgt_key_padding_mask" in arguments:
            out = only_there(out, arguments["tgt_key_padding_mask"], batch_first)
        grads = torch.autograd.grad((out * draw(T, batch_first, 9)).sum(), [src, tgt, *module.parameters()])
        results.append((out, grads))
    agree(results[1], results[0], call)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("causal", [None, True])
@pytest.mark.parametrize("batch_first", [True, False])
def test_encoder_packs_any_pattern(batch_first, causal, training, packed, monkeypatch):
    """Each sequence gets what it would alone, padded outputs are 0, and no padded row reaches a layer."""
    layer = nn.TransformerEncoderLayer(D, HEADS, 32, 0.0, batch_first=batch_first, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(D, dtype=torch.float64)).train(training)
    src, mask, seen = draw(S, batch_first), holes(S), []
    attend = padding.Packed.attend
    spy = lambda inside, module, query, key: seen.append(query.shape) or attend(inside, module, query, key)  # noqa: E731
    monkeypatch.setattr(padding.Packed, "attend", spy)
    attn_mask = torch.ones(S, S, dtype=torch.bool).triu(1) if causal else None
    out = encoder(src, attn_mask, mask)
    assert len(packed) == 1 and seen == [(int((~mask).sum()), D)] * 2
    rows = out if batch_first else out.transpose(0, 1)
    assert not rows[mask].any()
    for b in range(B):
        own = (src if batch_first else src.transpose(0, 1))[b][~mask[b]]
        small = None if attn_mask is None else attn_mask[: len(own), : len(own)]
        if len(own):
            agree(rows[b][~mask[b]], encoder(own, small), b)


def test_padding_of_nothing_is_no_padding():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS, 32, 0.0, batch_first=True), 1).double()
    src, none = draw(S, True), torch.zeros(B, S, dtype=torch.bool)
    agree(encoder(src, src_key_padding_mask=none), encoder(src))
    assert not encoder(src, src_key_padding_mask=~none).any()
    assert encoder(src[:0], src_key_padding_mask=none[:0]).shape == (0, S, D)


class NoHost(TorchDispatchMode):
    """Nothing may bring a value to the host, nor a size that depends on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.equal.default,
        ), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch_first", [True, False])
def test_lengths_never_reach_the_host(batch_first):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS, 32, 0.0, batch_first=batch_first), 2).double()
    src, lengths = draw(S, batch_first), torch.tensor([S, 0, 3, 1])
    with NoHost():
        out = encoder(src, src_key_padding_mask=lengths)
    agree(out, encoder(src, src_key_padding_mask=torch.arange(S) >= lengths[:, None]))


def test_float_padding_stays_padded():
    torchs, ours = transformers(batch_first=True)
    bias = torch.randn(B, S, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    agree(
        ours.encoder(draw(S, True), src_key_padding_mask=bias), torchs.encoder(draw(S, True), src_key_padding_mask=bias)
    )


@pytest.mark.parametrize(
    "activation", ["gelu", torch.nn.functional.silu, torch.nn.ReLU()], ids=["gelu", "silu", "relu"]
)
@pytest.mark.parametrize("torchs", KINDS)
def test_layers_alone(torchs, activation):
    made = []
    for kind in (torchs, KINDS[torchs]):
        torch.manual_seed(1)
        made.append(kind(D, HEADS, 32, 0.0, activation, dtype=torch.float64, batch_first=True).eval())
    memory = [draw(S, True, 5)] * (torchs is torch.nn.TransformerDecoderLayer)
    agree(made[1](draw(T, True), *memory), made[0](draw(T, True), *memory))
    agree(made[1](draw(T, True)[0], *(m[0] for m in memory)), made[0](draw(T, True)[0], *(m[0] for m in memory)))
    for again in (copy.deepcopy(made[1]), pickle.loads(pickle.dumps(made[1]))) if activation == "gelu" else ():
        assert type(again) is KINDS[torchs] and type(again.self_attn) is nn.MultiheadAttention
        agree(again(draw(T, True), *memory), made[1](draw(T, True), *memory))


def test_layers_of_others_get_what_they_expect():
    """A subclass may look at its mask, so it is not given packed rows."""
    seen = []

    class Own(nn.TransformerEncoderLayer):
        def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
            seen.append((src.shape, src_key_padding_mask))
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)

    encoder = nn.TransformerEncoder(Own(D, HEADS, 32, 0.0, batch_first=True, dtype=torch.float64), 1)
    src, mask = draw(S, True), holes(S)
    out = encoder(src, src_key_padding_mask=mask)
    assert seen[0][0] == src.shape and seen[0][1] is mask and not out[mask].any()


def test_learned_keys_belong_to_no_sequence():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS, 32, 0.0, batch_first=True), 1).double()
    encoder.layers[0].self_attn.add_zero_attn = True
    assert not stacks.takes_rows(encoder.layers[0])
    src, mask = draw(S, True), holes(S)
    assert not encoder(src, src_key_padding_mask=mask)[mask].any()


def inner_objects():
    """What stacks tell their attentions instead of masks."""
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, HEADS, 32, batch_first=True), 1)
    packing, cache = padding.Packing.of(holes(S), True), decoder.new_cache(draw(S, True).float(), T)
    return packing, padding.Packed(packing, packing), cache.own[0], cache.memory[0]


@pytest.mark.parametrize("name", ["MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer"])
def test_a_mask_is_a_tensor(name):
    """What stacks say to their layers is no mask."""
    module = getattr(nn, name)(D, HEADS, batch_first=True)
    inputs = [draw(S, True).float()] * {"MultiheadAttention": 3, "TransformerEncoderLayer": 1}.get(name, 2)
    masks = [mask for mask in inspect.signature(module.forward).parameters if mask.endswith("mask")]
    assert masks and "_inside" not in inspect.signature(module.forward).parameters
    for mask, given in itertools.product(masks, inner_objects()):
        message = rf"{name}\(\): argument '{mask}' must be Tensor or None, not {type(given).__name__}"
        with pytest.raises(TypeError, match=message):
            module(*inputs, **{mask: given})


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_hooks_of_every_module_see_the_rows(stack, packed):
    """Those of all modules at once, which profilers have, fire for packed layers and attentions."""
    model, mask, seen = transformers(batch_first=True)[1], holes(S), []
    x = draw(S, True)
    inputs, given = (
        ((x,), {"src_key_padding_mask": mask}) if stack == "encoder" else ((x, x), {"tgt_key_padding_mask": mask})
    )
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, i, o: seen.append((type(m), i[0].shape)))
    try:
        getattr(model, stack)(*inputs, **given)
    finally:
        handle.remove()
    rows = (int((~mask).sum()), D)
    kind, attentions = (nn.TransformerEncoderLayer, 2) if stack == "encoder" else (nn.TransformerDecoderLayer, 4)
    assert packed and seen.count((kind, rows)) == 2 and seen.count((nn.MultiheadAttention, rows)) == attentions


@pytest.mark.parametrize("batch_first", [True, False])
def test_packing_there_and_back(batch_first):
    batch, mask = draw(S, batch_first), holes(S)
    packing = padding.Packing.of(mask, batch_first)
    rows = packing.pack(batch)
    assert packing.longest == S and packing.cu.tolist() == [0, *(~mask).sum(1).cumsum(0).tolist()]
    assert torch.equal(rows, (batch if batch_first else batch.transpose(0, 1))[~mask])
    assert torch.equal(packing.unpack(rows, batch), only_there(batch, mask, batch_first))
    everything = padding.whole(batch, batch_first)
    assert torch.equal(everything.unpack(everything.pack(batch), batch), batch)
    assert everything.cu.tolist() == [S * b for b in range(B + 1)]


def test_compiled_whole_with_padding():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS, 32, 0.0, batch_first=True), 2)
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    src, mask = draw(S, True).float(), holes(S)
    torch.testing.assert_close(compiled(src, src_key_padding_mask=mask), encoder(src, src_key_padding_mask=mask))


def test_masks_are_checked_in_torchs_words():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS, 32, 0.0, batch_first=True), 1).double()
    with pytest.raises(AssertionError, match="only bool and floating types of src_key_padding_mask are supported"):
        encoder(draw(S, True), src_key_padding_mask=torch.zeros(B, S, dtype=torch.int64))
    with pytest.raises(AssertionError, match=r"Expected key_padded_mask.shape\[1\] to be 6, but got 7"):
        encoder(draw(S, True), src_key_padding_mask=torch.zeros(B, S + 1, dtype=torch.bool))
