"""A vision transformer of timm with our attention by `sdpa.patch`: images per second and the same logits.

    pip install timm
    python examples/timm_vit.py

Weights are random, so nothing is downloaded.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext

import torch

import sdpa

ROUNDS = 2


@torch.no_grad()
def main() -> None:
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that was built for another torch
        needed = f"timm and a torchvision built for torch {torch.__version__}"
        print(f"this example needs {needed}: pip install timm torchvision ({error})", file=sys.stderr)
        sys.exit(2)
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10).eval()
    images, logits = torch.randn(4, 3, 224, 224), {}
    for name, patched in (("torch", nullcontext()), ("ours", sdpa.patch())):
        with patched:
            logits[name] = model(images)
            start = time.perf_counter()
            for _ in range(ROUNDS):
                model(images)
            print(f"{name}: {ROUNDS * len(images) / (time.perf_counter() - start):.1f} images/s")
    same = torch.allclose(*logits.values(), rtol=1e-3, atol=1e-4)
    print(f"last kernel: {sdpa.last_choice().kernel.name}; same logits: {same}")


if __name__ == "__main__":
    main()
