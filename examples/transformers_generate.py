"""A Mistral-shaped model of transformers with our attention: greedy generation, the same tokens as their own ways.

    pip install transformers
    python examples/transformers_generate.py

The first run of each loads libraries and chooses kernels, and is not timed; the speed is that of the fastest other run.
Weights are random, so nothing is downloaded; with a real model give `from_pretrained` the same attn_implementation.
"""

from __future__ import annotations

import sys
import time

import torch

try:
    from transformers import AutoModelForCausalLM, MistralConfig
except ModuleNotFoundError as error:
    print(f"this example needs {error.name}: pip install {error.name}", file=sys.stderr)
    sys.exit(2)

import sdpa
import sdpa.integrations.transformers  # registers the name below

NAME = "sdp_kernels"
TOKENS = 32
ROUNDS = 3


def main() -> None:
    config = MistralConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, sliding_window=64, pad_token_id=0,
    )  # fmt: skip
    prompt = torch.randint(1, 1000, (2, 200), generator=torch.Generator().manual_seed(0))
    given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": TOKENS, "do_sample": False}
    tokens = {}
    for implementation in ("eager", "sdpa", NAME):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
        tokens[implementation] = model.generate(prompt, **given)
        seconds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            model.generate(prompt, **given)
            seconds.append(time.perf_counter() - start)
        print(f"{implementation}: {TOKENS * len(prompt) / min(seconds):.0f} tokens/s", flush=True)
    same = all(torch.equal(tokens[NAME], other) for other in tokens.values())
    print(f"last kernel: {sdpa.last_choice().kernel.name}; same tokens: {same}")


if __name__ == "__main__":
    main()
