"""A GPT of `sdpa.nn` layers learns on processes that share its heads and features, and its parameters besides.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py [--steps 8] [--tensor 2]
    torchrun --nproc-per-node 4 examples/tensor_parallel.py

`--tensor` ranks share each layer's heads and features (tensor parallelism, by `sdpa.distributed.tensor_parallel_plan`).
The other dimension of the mesh has parts of the batch, and shards parameters and the optimizer's state (FSDP2). The
losses are those of one process, which the first rank computes beside it, and the trained state loads there. With GPUs
each rank takes its own.

torch warns of two things that cost time and change no result. On CPUs gloo has no all-to-all, which torch makes of
another exchange. The whole state, at the end, is gathered along one dimension of the mesh and then along the other.
torchrun itself says that it gives each process one thread; OMP_NUM_THREADS gives another number.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pack_documents import SEED, documents
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import sdpa.nn
from sdpa.distributed import tensor_parallel_plan

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 128, 4, 2, 128, 8


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = sdpa.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.blocks = sdpa.nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, batch: Tensor) -> Tensor:
        """The mean loss of (B, L + 1) bytes, of which each but the first is predicted."""
        text, following = batch[:, :-1], batch[:, 1:]
        places = torch.arange(text.shape[1], device=text.device)
        causal = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        rows = self.blocks(self.embedding(text) + self.positions(places), causal, is_causal=True)
        return F.cross_entropy(self.head(rows).flatten(0, 1), following.flatten())


def make(kind: str) -> GPT:
    torch.manual_seed(SEED)
    return GPT().to(kind)


def share(model: GPT, mesh: DeviceMesh) -> GPT:
    """Heads and features first, then what is left of each parameter."""
    parallelize_module(model, mesh["tensor"], tensor_parallel_plan(model))
    for block in model.blocks.layers:
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def train(model: GPT, batches: list[Tensor], data: DeviceMesh | None) -> Iterator[float]:
    """The mean loss of each batch, of which ranks of `data` have parts."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches:
        loss = model(batch if data is None else batch.chunk(data.size())[data.get_local_rank()])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if data is not None:
            dist.all_reduce(mean, group=data.get_group())
            mean /= data.size()
        yield mean.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tensor", type=int, default=2)
    given = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("expected torchrun to start it: torchrun --nproc-per-node 2 examples/tensor_parallel.py")
    if given.tensor < 1 or int(os.environ["WORLD_SIZE"]) % given.tensor:
        parser.error(f"expected --tensor to divide {os.environ['WORLD_SIZE']} processes, got {given.tensor}")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    shape = int(os.environ["WORLD_SIZE"]) // given.tensor, given.tensor
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("data", "tensor"))
    rows = torch.cat(documents()).to(kind).unfold(0, LENGTH + 1, LENGTH)
    batches = [rows[step * BATCH : (step + 1) * BATCH] for step in range(given.steps)]

    model, rank = share(make(kind), mesh), dist.get_rank()
    held = sum(p.to_local().numel() for p in model.parameters())
    losses = []
    for step, loss in enumerate(train(model, batches, mesh["data"])):
        losses.append(loss)
        if rank == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # whole on the first rank
    if rank == 0:
        alone = make(kind)
        whole = sum(p.numel() for p in alone.parameters())
        print(f"data x tensor {shape[0]} x {shape[1]}: each rank has {held / whole:.0%} of {whole} parameters")
        expected = list(train(alone, batches, None))
        alone.load_state_dict(state)
        farthest = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
        print(f"largest distance of the losses from one process: {farthest:.1e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
