"""A Mistral-shaped model of transformers with our attention: greedy generation, the same tokens as their eager way.

    pip install transformers
    python examples/transformers_generate.py

Weights are random, so nothing is downloaded; with a real model give `from_pretrained` the same attn_implementation.
"""

from __future__ import annotations

import time

import torch
from transformers import AutoModelForCausalLM, MistralConfig

import sdpa
import sdpa.integrations.transformers  # registers the name below

NAME = "sdp_kernels"


def main() -> None:
    config = MistralConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, sliding_window=64, pad_token_id=0,
    )  # fmt: skip
    prompt = torch.randint(1, 1000, (2, 200), generator=torch.Generator().manual_seed(0))
    tokens = {}
    for implementation in ("eager", NAME):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
        start = time.perf_counter()
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, do_sample=False)
        tokens[implementation] = out
        print(f"{implementation}: {32 * len(prompt) / (time.perf_counter() - start):.0f} tokens/s")
    print(f"last kernel: {sdpa.last_choice().kernel.name}; same tokens: {torch.equal(*tokens.values())}")


if __name__ == "__main__":
    main()
