"""A GPT learns from documents of different lengths: padded batches by torch, and packed rows without padding by ours.

    python examples/pack_documents.py [--steps 8] [--device cuda]

The documents are functions of this Python's own library. Both ways see the same documents in the same order, and their
losses agree. Packed, no row is padding, and no document sees another: `sdpa.varlen_attention` takes where each begins.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import fastest, positive, table, usable
from torch import Tensor, nn
from training import trainer

import sdpa

FILES = ("argparse.py", "dataclasses.py", "inspect.py", "subprocess.py", "tarfile.py", "turtle.py", "typing.py")
WIDTH, HEADS, LAYERS, LONGEST, BATCH = 128, 4, 2, 1024, 8
SEED = 0


class Block(nn.Module):
    """Of a GPT; `attend` takes and returns (..., H, D) of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, attend) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        x = x + self.proj(attend(q, k, v).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor, places: Tensor, attend) -> Tensor:
        x = self.embedding(text) + self.positions(places)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(x)


def documents() -> list[Tensor]:
    """Bytes of each function, at most LONGEST + 1 of them: one more than is read, to be predicted."""
    found = []
    for name in FILES:
        text = (Path(sysconfig.get_path("stdlib")) / name).read_text()
        functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
        found += [ast.get_source_segment(text, node).encode()[: LONGEST + 1] for node in functions]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(SEED)).tolist()
    return [torch.tensor(list(found[number])) for number in order]


def padded_loss(model: GPT, batch: list[Tensor], device: str) -> Tensor:
    """torch's way: (B, N) with padding behind each document, which a causal mask hides from those before."""
    text = nn.utils.rnn.pad_sequence(batch, batch_first=True).to(device)
    lengths = torch.tensor([len(document) - 1 for document in batch], device=device)
    places = torch.arange(text.shape[1] - 1, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, N, D)
        return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)

    logits = model(text[:, :-1], places.expand(len(batch), -1), attend)
    there = places < lengths[:, None]
    return F.cross_entropy(logits[there], text[:, 1:][there])


def packed_loss(model: GPT, batch: list[Tensor], device: str) -> Tensor:
    """Ours: (T,) rows, one document after the other."""
    lengths = [len(document) - 1 for document in batch]
    cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device, torch.int32)
    longest = max(lengths)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa.varlen_attention(q, k, v, cu_seqlens, cu_seqlens, longest, longest, is_causal=True)  # (T, H, D)

    text, following = (torch.cat([d[part] for d in batch]).to(device) for part in (slice(-1), slice(1, None)))
    places = torch.cat([torch.arange(length) for length in lengths]).to(device)
    return F.cross_entropy(model(text, places, attend), following)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=8)
    parser.add_argument("--device", type=usable, default="cpu")
    given = parser.parse_args()
    data = documents()
    losses: dict[str, list[float]] = {"padded, torch": [], "packed, sdpa": []}
    steps = {
        name: way(loss_of, data, losses[name], given.device)
        for (name, loss_of) in zip(losses, (padded_loss, packed_loss), strict=True)
    }
    seconds = fastest(steps, given.steps, given.device)
    print(f"{len(data)} documents of {min(map(len, data))} to {max(map(len, data))} bytes, {BATCH} a step")
    print(table(seconds, BATCH, "documents"))
    padded, packed = losses.values()
    distance = max(abs(x - y) for x, y in zip(padded, packed, strict=True))
    print(f"loss {packed[0]:.3f} to {packed[-1]:.3f}; largest distance of the losses: {distance:.1e}")


def way(loss_of, data: list[Tensor], losses: list[float], device: str):
    """A function that takes one step of a model of its own, and notes its loss."""
    torch.manual_seed(SEED)
    model = GPT().to(device)

    def loss_of_step(number: int) -> Tensor:
        begin = BATCH * number % (len(data) - BATCH)
        return loss_of(model, data[begin : begin + BATCH], device)

    return trainer(model, loss_of_step, losses)


if __name__ == "__main__":
    main()
