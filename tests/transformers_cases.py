"""Small models of many architectures of transformers, each with our attention beside its own: forward, gradients,
generation, graphs. What is not equal has to be refused in a sentence.

    python tests/transformers_cases.py                                   # every architecture, the installed release
    PYTHONPATH=/tmp/tf/5.0.0:/tmp/tf/hub python tests/transformers_cases.py llama bert   # some, of another one

Another release is put there by `pip install --no-deps --target /tmp/tf/5.0.0 transformers==5.0.0`, and the
huggingface-hub and tokenizers that it asks for by the same with `--target /tmp/tf/hub`.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import time
import warnings
from typing import Any

import torch
import transformers

from sdpa.integrations.transformers import NAME

SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "sliding_window": 5, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "n_inner": 48,
    "n_heads": 4, "n_layers": 2, "dim": 32, "hidden_dim": 48, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
    "num_heads": 4, "num_decoder_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 1,
    "attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32, "embedding_size": 32, "image_size": 12,
    "patch_size": 4, "num_frames": 2, "tubelet_size": 1, "num_local_experts": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_num_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 8, "n_group": 1, "topk_group": 1, "num_mel_bins": 8,
    "max_source_positions": 10, "max_target_positions": 20, "ffn_hidden_size": 48, "query_pre_attn_scalar": 8,
    "attention_chunk_size": 4, "intermediate_size_mlp": 48, "hidden_size_per_layer_input": 8, "attention_dropout": 0.0,
    "index_topk": 4, "index_n_heads": 2, "index_head_dim": 16, "block_size": 4, "num_random_blocks": 1, "state_size": 4,
    "expand": 2, "projection_dim": 16, "local_attention": 6, "global_attn_every_n_layers": 2, "type_vocab_size": 2,
    "use_cache": True, "max_seq_len": 64, "num_buckets": 4, "relative_attention_num_buckets": 8, "mlp_hidden_size": 48,
}  # fmt: skip
UNSETTABLE = {
    "XLNet": ("max_position_embeddings",),
    "ProphetNet": ("num_hidden_layers",),
}
# The names of configurations without "Config", by what a model is given; sizes beside a name are its own.
CAUSAL = """
    Llama Mistral Mixtral Qwen2 Qwen3 Qwen2Moe Qwen3Moe Gemma Gemma2 Gemma3Text GPT2 GPTNeoX OPT Phi Phi3 Olmo Olmo2
    Olmo3 Cohere Cohere2 Starcoder2 StableLm Granite GraniteMoe Glm Glm4 Nemotron Persimmon Helium SmolLM3 SeedOss
    Ernie4_5 Exaone4 Arcee Apertus DiffLlama Dots1 DeepseekV2 DeepseekV3 GptOss Llama4Text BitNet BioGpt GPTBigCode
    Doge HunYuanDenseV1 VaultGemma ModernBertDecoder MiniMax Jamba Bloom Falcon GPTJ GPTNeo CodeGen XGLM OpenAIGPT
    XLNet CTRL DeepseekV32 GlmMoeDsa DeepseekV4 Mpt CpmAnt Lfm2 Bamba Inkling2Text
""".split()
ENCODERS = """
    Bert Roberta Electra DistilBert Albert MPNet Camembert XLMRoberta Ernie ModernBert Esm LayoutLM NomicBert
    EuroBert Splinter MegatronBert RemBert RoFormer ConvBert Deberta DebertaV2 Mra Yoso BigBird Git
""".split()
VISION = "ViT DeiT Dinov2 Beit SiglipVision CLIPVision IJepa Data2VecVision Cvt Pvt SamVision".split()
PAIRS = """
    T5 MT5 Bart MBart Pegasus Marian M2M100 Blenderbot PLBart BigBirdPegasus PegasusX ProphetNet FSMT LongT5
    SwitchTransformers UMT5 Whisper
""".split()
KINDS = dict.fromkeys(CAUSAL, "causal") | dict.fromkeys(ENCODERS, "encoder") | dict.fromkeys(VISION, "vision")
KINDS |= dict.fromkeys(PAIRS, "pair")
OWN: dict[str, dict[str, Any]] = {
    "Gemma2": {"attn_logit_softcapping": 2.0},
    "PegasusX": {"num_global_tokens": 2},
    "BigBirdPegasus": {"attention_type": "original_full"},
    "BigBird": {"attention_type": "original_full"},
    "Camembert": {"type_vocab_size": 1}, "Persimmon": {"num_key_value_heads": 4},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "window_size": 5, "num_layers": 2, "num_heads": 4},
    "XLNet": {}, "Bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "attn_layer_indices": [1]},
    "ProphetNet": {"num_encoder_layers": 2, "num_decoder_layers": 2},
    "Pvt": {"image_size": 32}, "Cvt": {"image_size": 32},
    "Splinter": {"question_token_id": 98},
}  # fmt: skip
AUTO = {
    "causal": "AutoModelForCausalLM",
    "encoder": "AutoModel",
    "vision": "AutoModel",
    "pair": "AutoModelForSeq2SeqLM",
}
AUTOS = {"Whisper": "AutoModelForSpeechSeq2Seq"}
TOLERANCE = 2e-4  # of the largest number of a result, in float32


class Refused(Exception):
    """Our sentence."""


def config_of(name: str) -> Any:
    kind = getattr(transformers, f"{name}Config")
    known = kind()
    given = {
        size: value
        for size, value in SIZES.items()
        if is_settable(known, size) and size not in UNSETTABLE.get(name, ())
    }
    return kind(**given | OWN.get(name, {}))


def is_settable(config: Any, size: str) -> bool:
    """Whether a configuration has a size, as one number, and not computed of others."""
    computed = getattr(type(config), size, None)
    if isinstance(computed, property) and computed.fset is None:
        return False
    return size.endswith("token_id") or (
        hasattr(config, size) and not isinstance(getattr(config, size), (list, tuple, dict))
    )


def made(name: str, implementation: str, like: torch.nn.Module | None = None) -> Any:
    """A model with weights that make attention sharp, or those of another one."""
    auto = getattr(transformers, AUTOS.get(name, AUTO[KINDS[name]]))
    torch.manual_seed(0)
    try:
        model = auto.from_config(config_of(name), attn_implementation=implementation).eval()
    except ValueError as error:
        if NAME in str(error) and implementation == NAME:
            raise Refused(str(error)) from error
        raise
    if like is not None:
        model.load_state_dict(like.state_dict())
        return model
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim > 1 or "sink" in key or not weight.isfinite().all():
                weight.normal_(std=0.2)
    return model


def ids(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 99, (rows, columns), generator=torch.Generator().manual_seed(seed))


def seen(rows: int, columns: int, side: str) -> torch.Tensor:
    left = torch.arange(columns) >= torch.tensor([0, 1, 3])[:rows, None]
    return (left if side == "left" else left.flip(1)).long()


def arguments(name: str, config: Any, padded: str | None) -> dict[str, Any]:
    kind = KINDS[name]
    if kind == "vision":
        size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        return {"pixel_values": torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(2))}
    if name == "Whisper":
        return {"input_features": torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(2)),
                "decoder_input_ids": ids(3, 8, 2)}  # fmt: skip
    given = {"input_ids": ids(3, 12)}
    if padded is not None:
        given["attention_mask"] = seen(3, 12, padded)
    return given | ({"decoder_input_ids": ids(3, 8, 2)} if kind == "pair" else {})


def results(model: Any, name: str, padded: str | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What is not padding, and the gradients of its squares."""
    given = arguments(name, model.config, padded)
    out = model(**given)
    found = out.logits if KINDS[name] in ("causal", "pair") else out[0]
    if padded is not None and KINDS[name] != "pair":
        found = found[given["attention_mask"].bool()]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    grads = torch.autograd.grad(found.square().mean(), weights, allow_unused=True)
    return found.detach(), [torch.zeros(1) if grad is None else grad for grad in grads]


def equal(found: Any, wanted: Any) -> str | None:
    """None, or how far apart the results of two models are."""
    if isinstance(wanted, tuple):
        return equal(found[0], wanted[0]) or next(
            (f"gradients: {far}" for f, w in zip(found[1], wanted[1], strict=True) if (far := equal(f, w))), None
        )
    if wanted.dtype == torch.long:
        return None if torch.equal(found, wanted) else "other tokens"
    if found.shape != wanted.shape:
        return f"{tuple(found.shape)} instead of {tuple(wanted.shape)}"
    off = (found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)
    return None if off <= TOLERANCE else f"{off:.1e} off"


def generated(model: Any, padded: str, cache: str | None) -> torch.Tensor:
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "disable_compile": True}
    options |= {} if cache is None else {"cache_implementation": cache}
    return model.generate(ids(3, 9), attention_mask=seen(3, 9, padded), **options)


def compiled(model: Any, given: dict[str, Any]) -> tuple[int, torch.Tensor, torch.Tensor]:
    """How many graphs Dynamo makes of a call, its result, and that of the same call without it."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    def result(call: Any) -> torch.Tensor:
        out = call(**given)
        found = (out.logits if hasattr(out, "logits") else out[0]).detach()
        padded = "attention_mask" in given and "decoder_input_ids" not in given
        return found[given["attention_mask"].bool()] if padded else found

    torch._dynamo.reset()
    found = result(torch.compile(model, backend=backend))
    return len(graphs), found, result(model)


def checks(name: str, compiling: bool) -> list[tuple[str, Any]]:
    """(what is done, a function of a model that does it)."""
    kind = KINDS[name]
    sides = (None,) if kind == "vision" or name == "Whisper" else (None, "left", "right")
    found: list[tuple[str, Any]] = [(f"forward {side}", lambda m, s=side: results(m, name, s)) for side in sides]
    if kind in ("causal", "pair") and name != "Whisper":
        for side in ("left", "right"):
            for cache in (None, "static"):
                found.append((f"generate {side} {cache}", lambda m, s=side, c=cache: generated(m, s, c)))
    if compiling:
        cases: list[dict[str, Any]] = [{"use_cache": False} if kind == "causal" else {}]
        cases += [{"attention_mask": seen(3, 12, "left")}] if len(sides) > 1 else []
        if kind == "causal":
            positions = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(3, -1)
            cases += [{"use_cache": False, "position_ids": positions}]
        for case in cases:
            label = f"graphs {' '.join(case)}"
            found.append((label, lambda m, c=case: compiled(m, arguments(name, m.config, None) | c)))
    return found


def attempt(run: Any, model: Any) -> Any:
    try:
        return run(model)
    except Exception as error:
        return error


def verdict(label: str, ours: Any, others: list[Any]) -> str | None:
    """None where ours is as one of the others', or refused; else what is wrong."""
    others = [other for other in others if not isinstance(other, Exception)]
    if isinstance(ours, Exception):
        if NAME in str(ours) and isinstance(ours, ValueError):
            return "refused"
        return f"{label}: {type(ours).__name__}: {str(ours)[:300]}" if others else None
    if not others:
        return None
    if label.startswith("graphs"):
        if ours[0] > others[0][0]:
            return f"{label}: {ours[0]} graphs instead of {others[0][0]}"
        ours, others = ours[1], [ours[2]]
    far = [equal(ours, other) for other in others]
    return None if None in far else f"{label}: {far[0]}"


def check(name: str, compiling: bool = True) -> str:
    """ "equal", "refused: ...", "absent" or what is wrong."""
    if not hasattr(transformers, f"{name}Config"):
        return "absent"
    try:
        eager = made(name, "eager")
    except Exception as error:
        return f"absent: {type(error).__name__} {str(error)[:120]}"
    models = [eager]
    with contextlib.suppress(Exception):
        models.append(made(name, "sdpa", eager))
    try:
        ours = made(name, NAME, eager)
    except Refused as refusal:
        return f"refused: {refusal}"
    except Exception as error:
        return f"made: {type(error).__name__}: {error}"
    wrong, refusals = [], []
    for label, run in checks(name, compiling):
        others = models[-1:] if label.startswith("graphs") else models  # graphs as of "sdpa", where it serves the model
        found = verdict(label, attempt(run, ours), [attempt(run, model) for model in others])
        (refusals if found == "refused" else wrong).append(f"{label}" if found == "refused" else found)
    wrong = [text for text in wrong if text]
    return "; ".join(wrong) or ("equal" if not refusals else f"refused: {', '.join(refusals)}")


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    names = [name for name in sys.argv[1:] if not name.startswith("--")] or list(KINDS)
    counts: collections.Counter[str] = collections.Counter()
    for name in names:
        before = time.time()
        said = check(name, "--no-graphs" not in sys.argv)
        kind = said.partition(":")[0]
        counts[kind if kind in ("equal", "refused", "absent") else "wrong"] += 1
        print(f"{name} ({time.time() - before:.1f} s): {said}", flush=True)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}: {dict(counts)}")


if __name__ == "__main__":
    main()
