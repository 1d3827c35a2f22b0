"""A byte-level GPT in nanoGPT's architecture; what computes attention is an argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256
INIT_STD = 0.02  # GPT-2's
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # causal attention of (B, H, T, D) tensors


@dataclass(frozen=True)
class Config:
    context: int = 1024
    layers: int = 4
    heads: int = 4
    head_size: int = 32
    batch: int = 2

    @property
    def width(self) -> int:
        return self.heads * self.head_size


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as textbooks have it: every score in memory."""
    T, D = q.shape[-2:]
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(D)  # (B, H, T, T)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The call that models make; torch answers it, or sdpa inside `sdpa.patch()`."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, config: Config, attend: Attend) -> None:
        super().__init__()
        self.heads = config.heads
        self.attend = attend
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(C, dim=-1))  # (B, H, T, D)
        out = self.attend(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, config: Config, attend: Attend) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config, attend)
        self.norm2 = nn.LayerNorm(config.width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, config: Config, attend: Attend) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config, attend) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, BYTES, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(init)
        for block in self.blocks:  # what every layer adds to the residual stream keeps its variance at 1
            for last in (block.attention.proj, block.mlp[-1]):
                nn.init.normal_(last.weight, std=INIT_STD / math.sqrt(2 * config.layers))

    def forward(self, text: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of the next byte; `text` and `targets` are (B, T) bytes."""
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.blocks(self.tokens(text) + self.positions(positions))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)
