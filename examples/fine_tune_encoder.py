"""An encoder learns to tell Python's packages apart by a snippet of their code, in batches with padding.

    python examples/fine_tune_encoder.py [--steps 20] [--device cuda]

The data are files of this Python's own library, so nothing is downloaded. The same `nn.TransformerEncoder` is trained
twice, as torch has it and after `sdpa.accelerate(model)`, which computes on the rows that are there: losses agree.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import fastest, positive, table, usable
from torch import Tensor, nn
from training import trainer

import sdpa

PACKAGES = ("asyncio", "email", "json", "logging", "unittest", "xml")
WIDTH, HEADS, LAYERS, LONGEST, BATCH = 128, 4, 3, 256, 16
SEED = 0
Batch = tuple[Tensor, Tensor, Tensor]  # bytes (B, N), True where padded (B, N), the package's number (B,)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(torch.randn(LONGEST, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(PACKAGES))

    def forward(self, text: Tensor, padding: Tensor) -> Tensor:
        x = self.embedding(text) + self.positions[: text.shape[1]]
        x = self.encoder(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0.0)
        return self.head(x.sum(1) / (~padding).sum(1, keepdim=True))


def snippets() -> list[tuple[bytes, int]]:
    """Pieces of code of any length up to LONGEST, each with its package's number."""
    library, choose = Path(sysconfig.get_path("stdlib")), random.Random(SEED)
    found = []
    for number, package in enumerate(PACKAGES):
        for file in sorted((library / package).rglob("*.py"))[:20]:
            text = file.read_bytes()
            for begin in range(0, max(1, len(text) - LONGEST), 2 * LONGEST):
                found.append((text[begin : begin + choose.randint(24, LONGEST)] or b"#", number))
    choose.shuffle(found)
    return found


def batches(device: str) -> list[Batch]:
    pieces, made = snippets(), []
    for begin in range(0, len(pieces) - BATCH, BATCH):
        rows = pieces[begin : begin + BATCH]
        text = nn.utils.rnn.pad_sequence([torch.tensor(list(row)) for row, _ in rows], batch_first=True)
        lengths = torch.tensor([len(row) for row, _ in rows])
        padding = torch.arange(text.shape[1]) >= lengths[:, None]
        made.append(tuple(t.to(device) for t in (text, padding, torch.tensor([number for _, number in rows]))))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--device", type=usable, default="cpu")
    given = parser.parse_args()
    data = batches(given.device)
    models, losses, steps = {}, {}, {}
    for name in ("torch", "sdpa.accelerate(model)"):
        torch.manual_seed(SEED)
        model = Classifier().to(given.device)
        if name != "torch":
            print(sdpa.accelerate(model))
        models[name], losses[name] = model, []
        steps[name] = trainer(model, lambda number, model=model: loss_of(model, data[number % len(data)]), losses[name])
    seconds = fastest(steps, given.steps, given.device)
    kept = 1 - sum(float(padding.float().mean()) for _, padding, _ in data) / len(data)
    print(f"{kept:.0%} of the rows are there, the others are padding; training, {LAYERS} layers of {WIDTH} columns:")
    print(table(seconds, BATCH, "snippets"))
    ours, torchs = losses.values()
    distance = max(abs(x - y) for x, y in zip(ours, torchs, strict=True))
    print(f"loss {ours[0]:.3f} to {ours[-1]:.3f}; largest distance of the losses: {distance:.1e}")


def loss_of(model: Classifier, batch: Batch) -> Tensor:
    text, padding, packages = batch
    return F.cross_entropy(model(text, padding), packages)


if __name__ == "__main__":
    main()
