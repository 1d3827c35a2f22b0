"""A GPT learns from one long row of documents, of which each process holds a part.

    torchrun --nproc-per-node 2 examples/long_context.py [--steps 4] [--documents 16]

Each rank embeds, normalises and projects its own part of the row. Inside of `sdpa.distributed.context_parallel`
attention sees the whole row, by a mask that is the whole row's: causal, and each document by itself. Gradients are
summed over the ranks. The losses are those of one process, which the first rank computes beside it. With GPUs each rank
takes its own.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pack_documents import GPT, SEED, documents
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import sdpa
from sdpa.distributed import context_parallel, shard


def row_of(batch: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(T,) bytes, the bytes that follow them, positions in their documents, and the documents' numbers."""
    lengths = [len(document) - 1 for document in batch]
    text, following = (torch.cat([d[part] for d in batch]) for part in (slice(-1), slice(1, None)))
    places = torch.cat([torch.arange(length) for length in lengths])
    return text, following, places, torch.arange(len(batch)).repeat_interleave(torch.tensor(lengths))


def loss_of(model: GPT, text: Tensor, following: Tensor, places: Tensor, numbers: Tensor, whole: int) -> Tensor:
    """The share of these positions in the mean over the whole row; `numbers` are those of the whole row."""
    mask = sdpa.Mask(causal=True, segments=numbers[None])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (t.transpose(0, 1)[None] for t in (q, k, v))  # (1, H, own length, D)
        return sdpa.scaled_dot_product_attention(*heads, mask)[0].transpose(0, 1)

    return F.cross_entropy(model(text, places, attend), following, reduction="sum") / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--documents", type=int, default=16)
    given = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("expected torchrun to start it: torchrun --nproc-per-node 2 examples/long_context.py")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))
    rank, data = mesh.get_local_rank(), documents()
    models = []
    for _ in range(2):  # this rank's of all, and the first rank's own
        torch.manual_seed(SEED)
        models.append(GPT().to(kind))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    farthest = 0.0
    for step in range(given.steps):
        begin = given.documents * step % (len(data) - given.documents)
        row = [t.to(kind) for t in row_of(data[begin : begin + given.documents])]
        parts, numbers, whole = [shard(t, mesh, 0) for t in row[:3]], row[3], len(row[0])
        optimizers[0].zero_grad()
        with context_parallel(mesh):
            loss = loss_of(models[0], *parts, numbers, whole)
            loss.backward()
        for parameter in models[0].parameters():
            dist.all_reduce(parameter.grad)
        optimizers[0].step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            optimizers[1].zero_grad()
            alone = loss_of(models[1], *row, whole)
            alone.backward()
            optimizers[1].step()
            farthest = max(farthest, abs(alone.item() - total.item()))
            print(f"step {step}: {whole} positions on {mesh.size()} ranks, loss {total.item():.4f}", flush=True)
    if rank == 0:
        print(f"largest distance of the losses from one process: {farthest:.1e}")
    dist.barrier()  # who ends first would close connections that others still use
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
