"""torch's own `context_parallel` in suite distributed: a rank at a time on one GPU.

Its ranks are of torch's fake process group, whose collectives return at once. So a figure has what one rank computes,
copies and merges, as those of our modes. What would have been received is memory that nobody filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdpa.bench.distributed import DIRECTIONS, Case, in_turns

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class Peer(NamedTuple):
    """torch's block on one case."""

    backend: str
    seconds: dict[str, list[float]]  # by direction, of every rank
    refused: str = ""  # why it has no figures


def torchs(case: Case, ranks: int, device: str) -> Iterator[Peer]:
    """By each backend that its block takes. It balances a causal mask by giving each rank a chunk of either end."""
    for name, backend in BACKENDS.items():
        found: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
        try:
            for rank in range(ranks):
                with fake_mesh(ranks, rank, device) as mesh, sdpa_kernel(backend):
                    for direction, seconds in of_rank(case, mesh, device).items():
                        found[direction].append(seconds)
        except Exception as error:
            yield Peer(name, {}, str(error).partition("\n")[0])
            continue
        yield Peer(name, found)


@contextmanager
def fake_mesh(ranks: int, rank: int, device: str) -> Iterator[DeviceMesh]:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=ranks)
    try:
        yield init_device_mesh(device.partition(":")[0], (ranks,))
    finally:
        dist.destroy_process_group()


def of_rank(case: Case, mesh: DeviceMesh, device: str) -> dict[str, float]:
    """Seconds of one rank by direction."""
    from torch.distributed.tensor.experimental import context_parallel

    def made(heads: int) -> torch.Tensor:
        return torch.randn(1, heads, case.each, case.D, device=device, dtype=case.dtype).requires_grad_()

    q, k, v = made(case.H), made(case.Hkv), made(case.Hkv)
    positions = torch.arange(case.each * mesh.size(), device=device)
    with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):

        def forward() -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=case.H != case.Hkv)

        out = forward()
        upstream = torch.randn_like(out)

        def backward() -> object:
            return torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True)

        return dict(zip(DIRECTIONS, in_turns([forward], [backward], device), strict=True))
