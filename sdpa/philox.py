"""Dropout's random numbers: Philox4x32-10 (Salmon et al., SC 2011), the same bits in every kernel of ours."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1
WORD = 0xFFFFFFFF
HALF = 0xFFFF


def draw_seed(device: torch.device) -> Tensor:
    """A (2,) int64 key and offset from torch's generator of `device`, so that manual_seed and checkpointing hold."""
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


def keep_mask(rng: Tensor, p: float, shape: tuple[int, int, int, int], streams: Tensor | None = None) -> Tensor:
    """Bool (B, H, M, N), True where the pair is kept, with probability 1 - p.

    Counter words are (j >> 2, i, b * H + h, low word of rng[1]) and the key is rng[0]; word j & 3 of the result
    belongs to key j. `streams` (B * H,) are the b * H + h where B and H are those of a part only.
    """
    B, H, M, N = shape
    device = rng.device
    groups = torch.arange((N + 3) // 4, device=device).view(1, 1, -1)
    rows = torch.arange(M, device=device).view(1, M, 1)
    heads = (torch.arange(B * H, device=device) if streams is None else streams).view(-1, 1, 1)
    counter = torch.broadcast_tensors(groups, rows, heads, (rng[1] & WORD).view(1, 1, 1))
    words = torch.stack(philox(counter, (rng[0] & WORD, (rng[0] >> 32) & WORD)), dim=-1)  # [B*H, M, N/4, 4]
    threshold = int(p * 2**32)
    return (words.flatten(-2)[..., :N] >= threshold).view(B, H, M, N)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds on four counter words and two key words, each a 32-bit value held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = multiply(c0, MULTIPLIERS[0])
        high1, low1 = multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & WORD, (k1 + KEY_INCREMENTS[1]) & WORD
    return c0, c1, c2, c3


def multiply(word: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, by halves of the constant: int64 would overflow, which is
    undefined in the C++ that Inductor writes."""
    low, high = word * (constant & HALF), word * (constant >> 16)  # below 2^48
    return (high + (low >> 16)) >> 16, (low + ((high & HALF) << 16)) & WORD
