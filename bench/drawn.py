"""Problems that nobody can tune to: drawn by a seed from distributions like those of real models.

A family is a kind of model: what it fixes (head sizes, masks, layouts) is chosen among what published models have, and
what its users choose (batches, lengths) is drawn over the range that they use. Lengths are seldom a multiple of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from sdpa.bench.problems import FEW_QUERIES, Problem

Sizes = dict[str, Any]

# (heads, head size) of vision transformers, from DeiT-tiny to SigLIP-so400m, ViT-g and AIMv2.
VISION_HEADS = ((3, 64), (6, 64), (12, 64), (16, 64), (16, 72), (16, 80), (16, 88), (24, 128))
# Patches, and the class or registers: of 224 to 518 pixels in patches of 14 to 32.
VISION_LENGTHS = (50, 197, 201, 256, 257, 261, 577, 729, 1025, 1370)
# Windows of Swin (7 x 7, 8 x 8, 12 x 12), whose heads have 32 features.
WINDOW_LENGTHS = (49, 64, 144)
# Heads and head sizes of latent diffusion: Stable Diffusion 1 to 3, PixArt, Flux.
DIFFUSION_HEADS = ((8, 40), (8, 80), (8, 160), (10, 64), (20, 64), (16, 72), (24, 64), (24, 128))
TEXT_KEYS = (77, 120, 154, 226, 300, 512)
# Heads, heads of keys, head size: GPT-2, Phi, OPT, Llama 2 and 3, Qwen 2 and 3, Gemma 2 and 3, Falcon, gpt-oss.
DECODER_HEADS = (
    (12, 12, 64), (16, 16, 64), (32, 32, 80), (32, 32, 128), (32, 8, 128), (64, 8, 128), (28, 4, 128), (14, 2, 64),
    (40, 8, 128), (32, 4, 128), (16, 8, 256), (8, 4, 256), (71, 1, 64), (64, 8, 64), (16, 16, 96), (48, 8, 128),
)  # fmt: skip
ENCODER_HEADS = ((12, 64), (16, 64), (12, 32), (8, 64))
# Multi-head latent attention as it is trained and prefilled: keys of 128 + 64 features, values of 128.
LATENT_HEADS = (16, 32, 64)
SHORT = 64  # rows that are not made shorter
ODD_HEAD_SIZES = (16, 24, 48, 56, 112, 120, 144, 160, 192, 224, 320, 384, 512)
PAIR_HEADS = ((4, 32), (8, 32), (4, 16), (8, 16))


class Limits(NamedTuple):
    """What one problem may take of a device: products of a forward, elements of its largest tensor."""

    flops: float
    elements: int
    dtypes: tuple[tuple[str, float], ...]  # and how often


GPU_LIMITS = Limits(3e12, 1 << 28, (("bfloat16", 0.6), ("float16", 0.25), ("float32", 0.15)))
CPU_LIMITS = Limits(4e9, 1 << 24, (("float32", 0.55), ("bfloat16", 0.35), ("float16", 0.1)))


def between(random: Random, least: int, most: int) -> int:
    """Any length from `least` to `most`, short ones as often as long ones: uniform in its logarithm."""
    return round(math.exp(random.uniform(math.log(least), math.log(most))))


def vision(random: Random) -> Sizes:
    H, D = random.choice(VISION_HEADS)
    N = random.choice(VISION_LENGTHS)
    return {"B": between(random, 1, 256), "H": H, "M": N, "N": N, "D": D, "layout": "bmhd"}


def windows(random: Random) -> Sizes:
    """Shifted windows: thousands of small problems that share one bias of relative positions."""
    N, H = random.choice(WINDOW_LENGTHS), random.choice((3, 4, 6, 8, 12, 16))
    mask = random.choice(("bias", "bias_grad"))
    return {"B": between(random, 64, 2048), "H": H, "M": N, "N": N, "D": 32, "mask": mask, "layout": "bmhd"}


def diffusion(random: Random) -> Sizes:
    """Self attention of an image or a film, or cross attention to a text."""
    H, D = random.choice(DIFFUSION_HEADS)
    side = random.randint(16, 80)
    M = side * side
    N = random.choice(TEXT_KEYS) if random.random() < 0.4 else M
    return {"B": between(random, 1, 16), "H": H, "M": M, "N": N, "D": D, "layout": "bmhd"}


def speech(random: Random) -> Sizes:
    H = random.choice((6, 8, 12, 16, 20))
    N = between(random, 100, 1500)
    mask = random.choice(("none", "padding", "lengths"))
    return {"B": between(random, 1, 64), "H": H, "M": N, "N": N, "D": 64, "mask": mask, "layout": "bmhd"}


def encoder(random: Random) -> Sizes:
    H, D = random.choice(ENCODER_HEADS)
    N, mask = between(random, 16, 512), random.choice(("padding", "padding", "lengths", "allowed", "none"))
    return {"B": between(random, 1, 256), "H": H, "M": N, "N": N, "D": D, "mask": mask, "layout": "bmhd"}


def position_bias(random: Random) -> Sizes:
    """T5: a learned bias of relative positions, one for all batch entries."""
    N, H = between(random, 32, 2048), random.choice((6, 8, 12, 16, 32))
    return {"B": between(random, 1, 64), "H": H, "M": N, "N": N, "D": 64, "mask": random.choice(("bias", "bias_grad"))}


def pair_bias(random: Random) -> Sizes:
    """Rows of a multiple sequence alignment or of pairs: a bias that hundreds of rows share."""
    H, D = random.choice(PAIR_HEADS)
    N = between(random, 48, 768)
    mask = random.choice(("bias", "bias_grad"))
    return {"B": between(random, 16, 512), "H": H, "M": N, "N": N, "D": D, "mask": mask, "layout": "bmhd"}


def decoder(random: Random) -> Sizes:
    """Training and prefill at any length."""
    H, Hkv, D = random.choice(DECODER_HEADS)
    N = between(random, 17, 8192)
    B = between(random, 1, max(1, 16384 // N))
    return {"B": B, "H": H, "Hkv": Hkv, "M": N, "N": N, "D": D, "mask": "causal", "layout": "bmhd"}


def sliding_window(random: Random) -> Sizes:
    return decoder(random) | {"mask": "window", "window": random.choice((128, 512, 1024, 4096))}


def documents(random: Random) -> Sizes:
    return decoder(random) | {"mask": "segments"}


def linear_bias(random: Random) -> Sizes:
    """ALiBi, as BLOOM and MPT have it."""
    return decoder(random) | {"mask": "alibi"}


def dropout(random: Random) -> Sizes:
    """Training as GPT-2 and BERT were trained."""
    H, D = random.choice(ENCODER_HEADS)
    N = between(random, 64, 2048)
    return {"B": between(random, 1, 32), "H": H, "M": N, "N": N, "D": D, "call": "dropout",
            "mask": random.choice(("none", "causal"))}  # fmt: skip


def latent(random: Random) -> Sizes:
    N = between(random, 64, 8192)
    H = random.choice(LATENT_HEADS)
    B = between(random, 1, max(1, 8192 // N))
    return {"B": B, "H": H, "M": N, "N": N, "D": 192, "Dv": 128, "mask": "causal", "layout": "bmhd"}


def chunk(random: Random) -> Sizes:
    """A part of a prompt beside what was read before it."""
    H, Hkv, D = random.choice(DECODER_HEADS)
    M = between(random, FEW_QUERIES + 1, 2048)
    N = M + between(random, 16, 16384)
    return {"B": between(random, 1, 4), "H": H, "Hkv": Hkv, "M": M, "N": N, "D": D, "mask": "lower_right"}


def speculation(random: Random) -> Sizes:
    """A few drafted tokens, which all see the cache."""
    return step(random) | {"M": random.randint(2, 8)}


def step(random: Random) -> Sizes:
    """One new token beside a cache of any length."""
    H, Hkv, D = random.choice(DECODER_HEADS)
    N = between(random, 33, 65536)
    return {"B": between(random, 1, 64), "H": H, "Hkv": Hkv, "M": 1, "N": N, "D": D}


def odd_head_size(random: Random) -> Sizes:
    N, D = between(random, 32, 4096), random.choice(ODD_HEAD_SIZES)
    return {"B": between(random, 1, 8), "H": between(random, 1, 16), "M": N, "N": N, "D": D,
            "mask": random.choice(("none", "causal"))}  # fmt: skip


class Family(NamedTuple):
    """A kind of model, how often it is drawn, and whether it is also trained."""

    draw: Callable[[Random], Sizes]
    weight: float
    trained: bool = True


FAMILIES = (
    Family(vision, 1.5),
    Family(windows, 1.0),
    Family(diffusion, 1.5),
    Family(speech, 1.0),
    Family(encoder, 2.0),
    Family(position_bias, 1.0),
    Family(pair_bias, 1.0),
    Family(decoder, 3.0),
    Family(sliding_window, 0.7),
    Family(documents, 0.7),
    Family(linear_bias, 0.4),
    Family(dropout, 1.0),
    Family(latent, 0.8),
    Family(chunk, 1.2, trained=False),
    Family(speculation, 0.8, trained=False),
    Family(step, 1.2, trained=False),
    Family(odd_head_size, 0.8),
)


def drawn(seed: int, count: int, device: str) -> tuple[Problem, ...]:
    """`count` problems with labels of their own, the same for the same seed and kind of device."""
    random, limits = Random(seed), CPU_LIMITS if device == "cpu" else GPU_LIMITS
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = one(random, limits, device)
        found.setdefault(problem.label, problem)
    return tuple(found.values())


def one(random: Random, limits: Limits, device: str) -> Problem:
    family = random.choices(FAMILIES, [family.weight for family in FAMILIES])[0]
    sizes = family.draw(random)
    names, shares = zip(*limits.dtypes, strict=True)
    sizes |= {"dtype": random.choices(names, shares)[0], "device": device}
    learns = sizes.get("mask") == "bias_grad"
    if learns or (family.trained and random.random() < 0.5):
        sizes["direction"] = "backward"
    return fitted(Problem(**sizes), limits)


def fitted(problem: Problem, limits: Limits) -> Problem:
    """The problem, smaller where it would take too long or too much: fewer batch entries, then shorter rows."""
    while takes_too_much(problem, limits) and (problem.B > 1 or max(problem.M, problem.N) > SHORT):
        sizes = dict(vars(problem))
        longest = max(problem.M, problem.N)
        if problem.B > 1:
            sizes["B"] = (problem.B + 1) // 2
        else:
            sizes |= {name: longest * 3 // 4 for name in ("M", "N") if sizes[name] == longest}
            sizes["M"] = min(sizes["M"], sizes["N"]) if problem.mask == "lower_right" else sizes["M"]
        problem = Problem(**sizes)
    return problem


def takes_too_much(p: Problem, limits: Limits) -> bool:
    scores = {"bias": p.H, "bias_grad": p.H, "allowed": p.B, "alibi": p.H, "segments": 1, "window": 1, "lower_right": 1}
    largest = max(p.B * p.H * max(p.M, p.N) * p.D, scores.get(p.mask, 0) * p.M * p.N)
    return p.H * p.visible_pairs() * 2 * (p.D + p.Dv) > limits.flops or largest > limits.elements
