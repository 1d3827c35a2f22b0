"""A UNet of diffusers with our attention: a few steps of denoising, the same image as by its own processors.

    pip install diffusers
    python examples/diffusers_unet.py

Weights are random, so nothing is downloaded; of a real pipeline accelerate `pipeline.unet` or `pipeline.transformer`.
"""

from __future__ import annotations

import sys
import time

import torch

try:
    from diffusers import DDIMScheduler, UNet2DConditionModel
except ModuleNotFoundError as error:
    print(f"this example needs {error.name}: pip install {error.name}", file=sys.stderr)
    sys.exit(2)

import sdpa
import sdpa.integrations.diffusers

STEPS = 10


def denoised(unet: UNet2DConditionModel, noise: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """(B, 4, height, width) latents after all steps."""
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(STEPS)
    latents = noise
    for step in scheduler.timesteps:
        latents = scheduler.step(unet(latents, step, encoder_hidden_states=text).sample, step, latents).prev_sample
    return latents


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=32, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, cross_attention_dim=48,
        attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()  # fmt: skip
    noise, text = torch.randn(1, 4, 32, 32), torch.randn(1, 20, 48)
    images = {}
    for name in ("diffusers", "ours"):
        if name == "ours":
            print(sdpa.integrations.diffusers.accelerate(unet))
        images[name] = denoised(unet, noise, text)  # loads libraries and chooses kernels, so it is not timed
        start = time.perf_counter()
        denoised(unet, noise, text)
        print(f"{name}: {STEPS / (time.perf_counter() - start):.1f} steps/s", flush=True)
    same = torch.allclose(*images.values(), rtol=1e-3, atol=1e-3)
    print(f"last kernel: {sdpa.last_choice().kernel.name}; same image: {same}")


if __name__ == "__main__":
    main()
