"""The options of sdpa explain as a problem: what a call would ask, without a tensor."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import click
import torch

from sdpa.cli.common import require_name
from sdpa.dispatch import apple, cards
from sdpa.dispatch.catalog import SERVED
from sdpa.dispatch.rules import PAGED_ROWS
from sdpa.problem import LARGE_SOFTCAP, UNLIMITED, AttentionProblem

# What a mask of each name asks for, in the words of sdpa.problem.FEATURES.
MASK_FEATURES = {
    "none": (),
    "causal": ("band",),
    "padding": ("allowed",),
    "allowed": ("allowed",),
    "bias": ("bias",),
    "lengths": ("k_lengths",),
    "both-lengths": ("k_lengths", "q_lengths"),
    "segments": ("segments",),
    "prefix": ("prefix",),
    "alibi": ("alibi",),
}
LARGEST_SIZE = 2**40  # no memory holds a dimension of more
EXAMPLE = "For example: --shape 1,32,4096,4096,128, which is B,H,M,N,D"
# Features that a diagonal's alignment matters to even where M == N.
LENGTHS = frozenset({"k_lengths", "q_lengths"})
# Masks that calls of packed documents and of pages take.
PACKED_MASKS = ("none", "causal", "lengths", "both-lengths", "prefix", "alibi")
PAGED_MASKS = ("none", "causal", "prefix", "alibi")
# Masks that have a diagonal.
DIAGONAL_MASKS = ("causal", "prefix", "alibi")


class Sizes(click.ParamType):
    """Comma-separated integers, a fixed number of them."""

    name = "integers"

    def __init__(self, names: str, lowest: int, optional: bool = False) -> None:
        self.names, self.lowest, self.optional = names, lowest, optional

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in value.split(",")]
        wanted = len(self.names.split(","))
        try:
            sizes = tuple(None if self.optional and part in ("", "none") else int(part) for part in parts)
        except ValueError:
            sizes = ()
        given = [size for size in sizes if size is not None]
        if len(sizes) != wanted or any(size < self.lowest for size in given):
            every = f", each an integer >= {self.lowest} or 'none', as 128,0 or 3,none"
            form = every if self.optional else f" as {wanted} integers >= {self.lowest}"
            self.fail(f"expected {self.names}{form}, got {value!r}", param, ctx)
        if any(size > LARGEST_SIZE for size in given):
            self.fail(f"expected {self.names} as integers up to {LARGEST_SIZE}, got {value!r}", param, ctx)
        return sizes

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return EXAMPLE


class Number(click.ParamType):
    """A finite number of a range, both ends in it."""

    name = "number"

    def __init__(self, words: str, lowest: float = -math.inf, highest: float = math.inf) -> None:
        self.words, self.lowest, self.highest = words, lowest, highest

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and self.lowest <= number <= self.highest):
            self.fail(f"expected {self.words}, got {str(value).strip()!r}", param, ctx)
        return number


class Asked(NamedTuple):
    """The options by their names."""

    shape: tuple[int, int, int, int, int]
    dv: int | None
    kv_heads: int | None
    dtype: str
    causal: bool
    align: str
    window: tuple[int | None, int | None] | None
    masks: tuple[str, ...]
    learned_bias: bool
    scale: float | None
    softcap: float
    sinks: bool
    dropout: float
    return_lse: bool
    packed: bool
    paged: bool
    backward: bool
    weights: bool
    training: bool
    device: str

    @property
    def direction(self) -> str:
        return "backward" if self.backward else "weights" if self.weights else "forward"


def problem_of(asked: Asked) -> AttentionProblem:
    """What is asked, as AttentionProblem.of would say it of the tensors."""
    refuse(asked)
    dtype, (left, right) = getattr(torch, asked.dtype), band_of(asked)
    own = features_of(asked)
    features, (B, H, M, N, D) = served(own, asked)
    aligned = bool(features & {"band", "alibi"}) and (M != N or bool(features & LENGTHS))
    one_corner = asked.packed and M == N and not own & LENGTHS
    corner = aligned and not one_corner and (asked.paged or asked.align == "bottom_right")
    return AttentionProblem(
        asked.device, dtype, B, H, asked.kv_heads or H, M, N, D, asked.dv or D, left, right, corner,
        frozenset(features | {"bottom_right"} if corner else features),
        bias_dtype=dtype if "bias" in features else None,
        direction=asked.direction,
        row_mask="padding" in asked.masks and "bias" not in asked.masks,
        bias_matrices=B * H if "bias" in features else 0,
    )  # fmt: skip


def refuse(asked: Asked) -> None:
    """Options that are no call together. Raises UsageError in one sentence."""
    H = asked.shape[1]
    if asked.backward and asked.weights:
        raise click.UsageError("expected --backward or --weights, got both")
    for option, given in (("--training", asked.training), ("--return-lse", asked.return_lse)):
        if given and asked.direction != "forward":
            raise click.UsageError(f"expected --{asked.direction} or {option}, got both")
    if asked.packed and asked.paged:
        raise click.UsageError("expected --packed or --paged, got both")
    if H % (asked.kv_heads or H):
        raise click.UsageError(f"expected --kv-heads to divide the {H} heads, got {asked.kv_heads}")
    if asked.learned_bias and "bias" not in asked.masks:
        raise click.UsageError("--learned-bias needs --mask bias")
    if asked.paged and (asked.backward or asked.training or asked.weights):
        raise click.UsageError("--paged has a forward alone: attention to pages has no gradient and returns no weights")
    if asked.packed and asked.weights:
        raise click.UsageError("--packed has no --weights: attention to packed documents returns none")
    taken = PAGED_MASKS if asked.paged else PACKED_MASKS if asked.packed else tuple(MASK_FEATURES)
    for mask in asked.masks:
        if mask not in taken:
            option = "--paged" if asked.paged else "--packed"
            raise click.UsageError(f"{option} takes --mask {', '.join(taken)}, got {mask}")
    refuse_masks(asked)
    refuse_device(asked)


def refuse_masks(asked: Asked) -> None:
    names = dict.fromkeys((*asked.masks, "causal") if asked.causal else asked.masks)
    if "none" in names and len(names) > 1:
        others = ", ".join(name for name in names if name != "none")
        raise click.UsageError(f"--mask none stands alone, got {others} beside it")
    is_windowed = any(side is not None for side in asked.window or ())
    if asked.align == "bottom_right" and not is_windowed and not any(name in DIAGONAL_MASKS for name in names):
        raise click.UsageError(f"--align bottom_right needs a diagonal: --window or --mask {', '.join(DIAGONAL_MASKS)}")


def refuse_device(asked: Asked) -> None:
    kind, _, index = asked.device.partition(":")
    if kind == "mps" and asked.dtype == "float64":
        raise click.UsageError(apple.NO_FLOAT64)
    try:
        if cards.is_named(asked.device):
            cards.card_named(asked.device)
        elif kind == "mps" and index and not index.isdigit():
            apple.chip_of(index)
        else:
            require_name(asked.device)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def band_of(asked: Asked) -> tuple[int, int]:
    """(left, right) as a call has them: a side wider than the matrix hides nothing."""
    M, N = asked.shape[2:4]
    given = asked.window or (None, None)
    left, right = (UNLIMITED if side is None or side >= M + N else side for side in given)
    closed = asked.causal or "causal" in asked.masks or (right == UNLIMITED and "prefix" in asked.masks)
    return left, 0 if closed else right


def features_of(asked: Asked) -> frozenset[str]:
    """The names in FEATURES that the options ask for."""
    H, forward = asked.shape[1], asked.direction == "forward"
    present = {
        "band": band_of(asked) != (UNLIMITED, UNLIMITED),
        "softcap": asked.softcap != 0.0,
        "large_softcap": asked.softcap > LARGE_SOFTCAP,
        "sinks": asked.sinks,
        "dropout": 0.0 < asked.dropout < 1.0,  # where all is dropped, kernels drop nothing
        "nonpositive_scale": asked.scale is not None and asked.scale <= 0.0,
        "gqa": (asked.kv_heads or H) != H,
        "lse": forward and (asked.training or asked.return_lse),
        "bias_grad": asked.backward and asked.learned_bias,
        "averaged": asked.weights,
        "packed": asked.packed,
        "paged": asked.paged,
        "k_lengths": asked.paged,
    }
    named = (name for mask in asked.masks for name in MASK_FEATURES[mask])
    return frozenset(name for name, on in present.items() if on).union(named)


def served(features: frozenset[str], asked: Asked) -> tuple[frozenset[str], tuple[int, int, int, int, int]]:
    """The features and B, H, M, N, D in the form that kernels of the device take, as sdpa.sequences has it.

    Documents count as full. As many queries as keys are those of self-attention.
    """
    B, H, M, N, D = asked.shape
    device = asked.device.partition(":")[0]
    if asked.paged:
        few = device != "cpu" or M * (H // (asked.kv_heads or H)) <= PAGED_ROWS
        return features if device in SERVED["paged"] and few else features - {"paged"}, asked.shape
    if not asked.packed or device in SERVED["packed"]:
        return features, asked.shape
    features = features - {"packed"}
    if M == N and device in SERVED["segments"] and not features & {"k_lengths", "q_lengths", "prefix"}:
        return features | {"segments"}, (1, H, B * M, B * N, D)
    return features | LENGTHS, asked.shape
