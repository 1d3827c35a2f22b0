"""Which models of transformers are served, and each argument of its attention interface: done, harmless or refused."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="pip install transformers")

from sdpa.integrations.transformers import HARMLESS, HONOURED, NAME, attention_forward  # noqa: E402
from sdpa.integrations.transformers_masks import FieldMask, attention_mask  # noqa: E402
from sdpa.integrations.transformers_models import adds_masks, attention_of  # noqa: E402
from sdpa.mask import Mask  # noqa: E402

SMALL = {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4}
OWN = "computes attention by its own code and not by transformers' attention interface"
NONE = torch.nn.Module()


def qkv(B=2, H=4, Hkv=2, M=5, N=5, D=8):
    torch.manual_seed(0)
    shapes = ((B, H, M, D), (B, Hkv, N, D), (B, Hkv, N, D))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def written_out(q, k, v, hidden=None, sinks=None):
    """(B, M, H, D), with sinks (B, H, M, 1)."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


def test_a_model_with_attention_of_its_own_is_refused_when_it_is_made():
    config = transformers.BloomConfig(**SMALL)
    with pytest.raises(ValueError, match=f"BloomModel {OWN}.*attn_implementation='eager'"):
        transformers.AutoModel.from_config(config, attn_implementation=NAME)
    config = transformers.FalconConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(ValueError, match=f"FalconModel {OWN}.*'sdpa' inside of sdpa.patch()"):
        transformers.AutoModel.from_config(config, attn_implementation=NAME)


def test_a_name_set_behind_transformers_back_is_refused_where_a_mask_is_made():
    config = transformers.BloomConfig(**SMALL)
    with pytest.raises(ValueError, match=f"Bloom.* {OWN}"):
        attention_mask(batch_size=1, q_length=3, kv_length=3, config=config)


def test_a_part_with_attention_of_its_own_is_told():
    config = transformers.PegasusXConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, pad_token_id=0,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, block_size=4, num_global_tokens=2,
    )  # fmt: skip
    with pytest.warns(UserWarning, match=f"PegasusXEncoder {OWN}; {NAME} serves the other parts"):
        transformers.AutoModel.from_config(config, attn_implementation=NAME)


@pytest.mark.parametrize("name,answer", [
    ("LlamaModel", "interface"), ("LlamaForCausalLM", "interface"), ("GPT2Model", "interface"),
    ("MambaModel", "none"), ("ResNetModel", "none"), ("BloomForCausalLM", "own"), ("DebertaV2Model", "own"),
    ("FunnelModel", "own"), ("GitModel", "own"), ("GPTNeoModel", "own"), ("XLNetModel", "own"), ("CvtModel", "own"),
    ("FalconForCausalLM", "own"), ("SamModel", "own"), ("PegasusXModel", "interface"), ("PegasusXEncoder", "part"),
])  # fmt: skip
def test_who_computes_attention(name, answer):
    kind = getattr(transformers, name, None)
    if kind is None:
        kind = getattr(transformers.models.pegasus_x.modeling_pegasus_x, name)
    assert attention_of(kind) == answer
    assert attention_of(type("Mine", (kind,), {"__module__": __name__})) == answer


def test_models_that_are_given_another_name_are_not_asked():
    config = transformers.BloomConfig(**SMALL)
    assert (
        transformers.AutoModel.from_config(config, attn_implementation="eager").config._attn_implementation == "eager"
    )


def test_continuous_batching_says_what_helps():
    config = transformers.LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                      num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=NAME)
    helps = re.escape("call sdpa.install() and use attn_implementation='sdpa'")
    with pytest.raises(ValueError, match=helps):
        model.init_continuous_batching()
    with pytest.raises(ValueError, match=helps):
        model.get_correct_attn_implementation(f"paged|{NAME}")
    with pytest.raises(ValueError, match=helps):
        attention_forward(NONE, *qkv(), None, cache=object())


@pytest.mark.parametrize("name", ["block_indices", "bias", "something"])
def test_an_unknown_argument_is_named(name):
    q, k, v = qkv()
    with pytest.raises(ValueError, match=f"does not know what {name}= asks"):
        attention_forward(NONE, q, k, v, None, **{name: torch.ones(2)})
    attention_forward(NONE, q, k, v, None, **{name: None})
    attention_forward(NONE, q, k, v, None, **{name: False})


def test_every_harmless_argument_is_taken():
    q, k, v = qkv()
    wanted = attention_forward(NONE, q, k, v, None)[0]
    assert torch.equal(attention_forward(NONE, q, k, v, None, **dict.fromkeys(HARMLESS, torch.ones(1)))[0], wanted)


def test_what_transformers_own_function_takes_is_known():
    theirs = transformers.integrations.sdpa_attention.sdpa_attention_forward
    names = {name for name, p in inspect.signature(theirs).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert names <= {*inspect.signature(attention_forward).parameters, *HARMLESS, *HONOURED}


@pytest.mark.parametrize("argument", ["s_aux", "sinks"])
@pytest.mark.parametrize("by_query", [False, True])
def test_sinks(argument, by_query):
    q, k, v = qkv()
    sinks = torch.randn((2, 4, 5, 1) if by_query else (4,), dtype=torch.float64, requires_grad=True)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    wanted = written_out(q, k, v, causal, sinks if by_query else sinks.view(1, 4, 1, 1).expand(2, 4, 5, 1))
    found = attention_forward(NONE, q, k, v, None, is_causal=True, **{argument: sinks})[0]
    given = (q, k, v, sinks)
    grads = [torch.autograd.grad(out.square().sum(), given) for out in (found, wanted)]
    torch.testing.assert_close((found, grads[0]), (wanted, grads[1]))


def test_a_sink_of_each_query_where_nothing_is_seen():
    q, k, v = qkv()
    sinks = torch.randn(2, 4, 5, 1, dtype=torch.float64, requires_grad=True)
    out = attention_forward(NONE, q, k, v, torch.zeros(2, 1, 5, 5, dtype=torch.bool), sinks=sinks)[0]
    grads = torch.autograd.grad(out.sum(), (q, k, v, sinks))
    assert not out.any() and not any(grad.any() for grad in grads)


@pytest.mark.parametrize("mask", [None, "causal", "bool", "float"])
def test_indices_choose_keys(mask):
    q, k, v = qkv()
    indices = torch.tensor([[[0, 1], [1, 0], [2, 1], [0, 3], [4, 2]]], dtype=torch.int32).expand(2, -1, -1)
    hidden = torch.ones(2, 1, 5, 5, dtype=torch.bool).scatter(-1, indices.long()[:, None], False)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    given = {
        None: None, "causal": FieldMask(Mask(causal=True), (2, 1, 5, 5), "cpu"), "bool": ~causal[None, None],
        "float": torch.zeros(1, 1, 5, 5, dtype=torch.float64).masked_fill(causal, -torch.inf),
    }[mask]  # fmt: skip
    found = attention_forward(NONE, q, k, v, given, indices=indices)[0]
    torch.testing.assert_close(found, written_out(q, k, v, hidden | causal))


def test_factors_of_heads():
    q, k, v = qkv()
    factors = torch.tensor([0.0, 1.0, 2.0, 0.5], dtype=torch.float64)
    found = attention_forward(NONE, q, k, v, None, is_causal=False, head_mask=factors.view(1, 4, 1, 1))[0]
    torch.testing.assert_close(found, written_out(q, k, v) * factors.view(1, 1, 4, 1))
    with pytest.raises(ValueError, match="a factor for each of 4 heads, got"):
        attention_forward(NONE, q, k, v, None, head_mask=torch.ones(1, 4, 5, 5))


def test_lengths_of_documents():
    q, k, v = qkv(B=1, M=7, N=7)
    lengths, ids = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    hidden = (ids[:, None] != ids) | torch.ones(7, 7, dtype=torch.bool).triu(1)
    given = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 4, "max_length_k": 4}
    packed = FieldMask(Mask(causal=True, segments=ids[None]), (1, 1, 7, 7), "cpu")
    for mask in (None, packed, packed.tensor()):
        torch.testing.assert_close(attention_forward(NONE, q, k, v, mask, **given)[0], written_out(q, k, v, hidden))


def test_masks_that_are_added_are_minus_infinity_and_0():
    assert adds_masks(transformers.BigBirdPegasusConfig) and not adds_masks(transformers.LlamaConfig)
    later = "q_length" in inspect.signature(transformers.masking_utils.eager_mask).parameters
    queries = {"q_length": 2, "device": "cpu"} if later else {"cache_position": torch.arange(2)}
    mask = attention_mask(batch_size=1, kv_length=2, config=transformers.BigBirdPegasusConfig(), **queries)
    assert mask.tolist() == [[[[0.0, torch.finfo(torch.float32).min], [0.0, 0.0]]]]
    fields, scores = FieldMask(Mask(causal=True), (1, 1, 2, 2), "cpu"), torch.ones(1, 1, 2, 2)
    for added in (scores + fields, fields + scores, torch.add(scores, fields), scores.clone().add_(fields)):
        assert added.softmax(-1).tolist() == [[[[1.0, 0.0], [0.5, 0.5]]]]


def test_a_field_mask_is_a_tensor_for_who_asks():
    mask = FieldMask(Mask(causal=True), (1, 1, 2, 2), "cpu")
    assert isinstance(mask, torch.Tensor) and isinstance(mask, FieldMask) and type(mask) is FieldMask
    wider = torch.cat([mask, torch.zeros(1, 1, 2, 3).to(mask.dtype)], dim=-1)  # as DeepSeek-V4 does
    assert wider.dtype == torch.bool and wider.shape == (1, 1, 2, 5)
    assert torch.nn.functional.pad(mask, (0, 2)).shape == (1, 1, 2, 4)


@pytest.mark.parametrize("positions,field", [([0, 1, 2], True), ([4, 5, 6], True), ([0, 2, 4], False)])
def test_positions_of_earlier_releases(positions, field, monkeypatch):
    """Of which a mask function is given the positions of the queries."""
    theirs = []
    monkeypatch.setattr("sdpa.integrations.transformers_masks.sdpa_mask", lambda **given: theirs.append(given))
    N = positions[-1] + 1
    found = attention_mask(batch_size=2, cache_position=torch.tensor(positions), kv_length=N)
    if field:
        assert torch.equal(found[...], (torch.arange(N) <= torch.tensor(positions)[:, None]).expand(2, 1, 3, N))
    else:
        assert found is None and theirs[0]["cache_position"].tolist() == positions and "q_length" not in theirs[0]
