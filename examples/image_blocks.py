"""Blocks of an image generator, as in Stable Diffusion 3, whose image and text attend to each other: torch's and ours.

    pip install diffusers
    python examples/image_blocks.py [--size 64] [--rounds 3] [--device cuda]

Weights are random, so nothing is downloaded. `sdpa.integrations.diffusers.accelerate` routes the attention inside of
the processors here; of a real pipeline give it `pipeline.transformer`. The images are equal to rounding.
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
from timing import fastest, positive, table, usable

try:
    from diffusers import SD3Transformer2DModel
except ModuleNotFoundError as error:
    print(f"this example needs {error.name}: pip install {error.name}", file=sys.stderr)
    sys.exit(2)

import sdpa
import sdpa.integrations.diffusers

TEXT = 77  # tokens of the prompt
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=positive, default=64, help="of the latent image, whose patches are 2 x 2")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--device", type=usable, default="cpu")
    given = parser.parse_args()
    torch.manual_seed(SEED)
    plain = SD3Transformer2DModel(
        sample_size=given.size, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=64, num_attention_heads=6,
        joint_attention_dim=128, caption_projection_dim=384, pooled_projection_dim=64, out_channels=4,
        pos_embed_max_size=given.size,
    ).to(given.device).eval()  # fmt: skip
    ours = copy.deepcopy(plain)
    print(sdpa.integrations.diffusers.accelerate(ours))
    noise = torch.randn(1, 4, given.size, given.size, device=given.device)
    prompt = torch.randn(1, TEXT, 128, device=given.device)
    pooled, time = torch.randn(1, 64, device=given.device), torch.tensor([500], device=given.device)
    images: dict[str, torch.Tensor] = {}

    def way(name: str, model: SD3Transformer2DModel):
        @torch.no_grad()
        def run() -> None:
            images[name] = model(noise, prompt, pooled, time).sample

        return run

    names = ("torch", "sdpa")
    ways = {name: way(name, model) for name, model in zip(names, (plain, ours), strict=True)}
    seconds = fastest(ways, given.rounds, given.device)
    tokens = (given.size // 2) ** 2 + TEXT
    print(f"2 blocks of {tokens} tokens")
    print(table(seconds, tokens, "tokens"))
    same = torch.allclose(*images.values(), rtol=1e-3, atol=1e-4)
    print(f"last kernel: {sdpa.last_choice().kernel.name}; same image: {same}")


if __name__ == "__main__":
    main()
