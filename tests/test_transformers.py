"""transformers' models with our attention: logits and gradients against their eager attention, and generation."""

from __future__ import annotations

import re
import runpy
import time
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="pip install transformers")

import sdpa  # noqa: E402
from sdpa.integrations.transformers import NAME, attention_forward  # noqa: E402

SMALL = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "head_dim": 8}
CAUSAL = {
    "llama": lambda: transformers.LlamaConfig(**DECODER),
    "mistral": lambda: transformers.MistralConfig(**DECODER, sliding_window=5),
    "gemma2": lambda: transformers.Gemma2Config(
        **DECODER, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=4
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **{**DECODER, "intermediate_size": 64},
        sliding_window=5,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=None,
    ),
}
MODELS = {
    **CAUSAL,
    "bert": lambda: transformers.BertConfig(**SMALL),
    "vit": lambda: transformers.ViTConfig(
        hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, image_size=12, patch_size=4
    ),
    "t5": lambda: transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, decoder_start_token_id=0
    ),
    "whisper": lambda: transformers.WhisperConfig(
        vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, pad_token_id=0,
        decoder_attention_heads=4, encoder_ffn_dim=37, decoder_ffn_dim=37, num_mel_bins=8, max_source_positions=10,
        max_target_positions=20, decoder_start_token_id=1, bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip
UNPADDED = ("vit", "whisper")
KINDS = {"bert": "AutoModel", "vit": "AutoModel", "t5": "AutoModelForSeq2SeqLM", "whisper": "AutoModelForSpeechSeq2Seq"}


def made(name, implementation):
    torch.manual_seed(0)
    kind = getattr(transformers, KINDS.get(name, "AutoModelForCausalLM"))
    try:
        model = kind.from_config(MODELS[name](), attn_implementation=implementation).eval()
    except ValueError as refusal:  # T5 and BERT of earlier releases
        pytest.skip(str(refusal))
    if name == "gpt_oss":  # their sinks begin as they lie in memory
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def ids(rows, columns, seed=1):
    return torch.randint(3, 99, (rows, columns), generator=torch.Generator().manual_seed(seed))


def left_padded(rows, columns):
    return (torch.arange(columns) >= torch.tensor([0, 3, 5][:rows])[:, None]).long()


def arguments_of(name, padded):
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 12, 12)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": ids(2, 7)}
    given = {"input_ids": ids(3, 11)}
    if padded:
        given["attention_mask"] = left_padded(3, 11)
    return given | ({"decoder_input_ids": ids(3, 7, 2)} if name == "t5" else {})


@pytest.mark.parametrize("name,padded", [(n, p) for n in MODELS for p in (False, True)[: 1 + (n not in UNPADDED)]])
def test_like_eager(name, padded):
    results = []
    for implementation in ("eager", NAME):
        model, arguments = made(name, implementation), arguments_of(name, padded)
        torch.manual_seed(3)
        out = model(**{k: v.clone() for k, v in arguments.items()})
        result = out.last_hidden_state if name in ("bert", "vit") else out.logits
        if padded and name in (*CAUSAL, "bert"):
            result = result[arguments["attention_mask"].bool()]
        grads = torch.autograd.grad(result.square().mean(), [p for p in model.parameters() if p.requires_grad],
                                    allow_unused=True)  # fmt: skip
        results.append((result, [g for g in grads if g is not None]))
    assert sdpa.last_choice() is not None
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CAUSAL)
def test_generate(name, cache):
    found = []
    for implementation in ("eager", NAME):
        model = made(name, implementation)
        options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
        found.append(model.generate(ids(3, 9), attention_mask=left_padded(3, 9), **options))
    assert torch.equal(found[0], found[1])


def test_wrong_calls():
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="returns no weights"):
        attention_forward(torch.nn.Module(), q, q, q, None, output_attentions=True)
    with pytest.raises(ValueError, match="continuous batching"):
        attention_forward(torch.nn.Module(), q, q, q, None, cache=object())


def test_example(capsys):
    path = Path(__file__).parents[1] / "examples/transformers_generate.py"
    runpy.run_path(str(path), run_name="__main__")
    told = capsys.readouterr().out
    assert "same tokens: True" in told
    assert re.findall(r"^(\w+): \d+ tokens/s$", told, re.MULTILINE) == ["eager", "sdpa", "sdp_kernels"]


def test_example_times_no_first_call(monkeypatch):
    """Each model generates once before the clock runs."""
    path, seen, running = Path(__file__).parents[1] / "examples/transformers_generate.py", [], []
    clock, generate = time.perf_counter, transformers.GenerationMixin.generate

    def noted_clock():
        if not running:
            seen.append("clock")
        return clock()

    def noted_generate(*args, **options):
        seen.append("generate")
        running.append(True)
        out = generate(*args, **options)
        running.pop()
        return out

    monkeypatch.setattr(time, "perf_counter", noted_clock)
    monkeypatch.setattr(transformers.GenerationMixin, "generate", noted_generate)
    runpy.run_path(str(path), run_name="__main__")
    assert seen == 3 * ["generate", *3 * ["clock", "generate", "clock"]]
