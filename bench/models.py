"""Whole models: as torch has them, some with attention written out, and with ours; tokens per second.

A variant builds its model from the same seed and returns a step: one inference or one training step (forward and
backward; no optimizer, which is the same for all), that returns what must agree between variants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sdpa
import sdpa.nn
from sdpa.bench.timing import Timing, interleave, sample_for, stopwatch_for

Step = Callable[[], Tensor]
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # distance over length, between two right answers
TORCHS = ("torch", "torch fast path")
VIT_TOKENS = 197  # 14 x 14 patches and the class
GROUP = 4  # query heads per key head of today's models
# Seconds of a sample on a GPU: several steps, because no loop waits for the device after each.
LOOP = 0.08
FILLED = {"cuda": 0.54, "cpu": 0.5, "mps": 0.5}  # of a padded batch


@dataclass(frozen=True)
class Sizes:
    """B sequences of L positions; `layers` of width E with `heads`."""

    B: int
    L: int
    layers: int
    E: int
    heads: int


@dataclass(frozen=True)
class Model:
    name: str
    device: str
    dtype: torch.dtype
    tokens: int  # per step; of padded batches the real ones
    variants: Mapping[str, Callable[[], Step]]

    @property
    def label(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Outcome:
    """A variant's figures; peak bytes beyond what the model itself holds, on a GPU."""

    model: Model
    variant: str
    timing: Timing
    peak: int | None

    @property
    def tokens_per_second(self) -> float:
        return self.model.tokens / self.timing.minimum


def models(device: str) -> tuple[Model, ...]:
    """The suite for a kind of device, in sizes that it runs in seconds."""
    gpts: tuple[Sizes, ...]
    if device.startswith("cuda"):
        encoder, mha, dtype = Sizes(64, 512, 12, 768, 12), Sizes(64, 512, 1, 768, 12), torch.bfloat16
        gpts = (Sizes(16, 1024, 12, 768, 12), Sizes(4, 4096, 12, 768, 12))  # GPT-2 of 124 million parameters
        vit, llama = Sizes(64, VIT_TOKENS, 12, 768, 12), Sizes(1, 8192, 16, 2048, 32)
    else:
        encoder, mha, dtype = Sizes(8, 128, 6, 384, 6), Sizes(8, 128, 1, 384, 6), torch.float32
        gpts = (Sizes(2, 512, 4, 256, 4),)
        vit, llama = Sizes(1, VIT_TOKENS, 4, 768, 12), Sizes(1, 4096, 2, 1024, 16)
    return (
        padded_encoder(encoder, device, dtype, training=False),
        padded_encoder(encoder, device, dtype, training=True),
        attention_with_weights(mha, device, dtype),
        *(gpt_training(gpt, device, dtype) for gpt in gpts),
        vit_inference(vit, device, dtype),
        llama_decode(llama, device, dtype),
    )


@contextmanager
def fast_path(enabled: bool) -> Iterator[None]:
    """torch's own inference fast path, on or off."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def evenly_filled(B: int, L: int, share: float, device: str) -> Tensor:
    """Padding (B, L), True behind lengths that grow evenly up to L: `share` of the positions, half at least, is real.

    torch's fast path takes three times its time where a sequence is a position or two long.
    """
    lengths = torch.linspace((2 * share - 1) * L, L, B, device=device).round().clamp_min(1)
    return torch.arange(L, device=device) >= lengths[:, None]


def padded_encoder(sizes: Sizes, device: str, dtype: torch.dtype, training: bool) -> Model:
    """nn.TransformerEncoder on a batch of which about half is padding."""
    padding = evenly_filled(sizes.B, sizes.L, FILLED[torch.device(device).type], device)

    def variant(layers: type, encoders: type, fast: bool) -> Callable[[], Step]:
        def build() -> Step:
            torch.manual_seed(0)
            layer = layers(
                sizes.E, sizes.heads, 4 * sizes.E, 0.0, batch_first=True, device=device, dtype=dtype, activation="gelu"
            )
            model = encoders(layer, sizes.layers).train(training)
            batch = torch.randn(sizes.B, sizes.L, sizes.E, device=device, dtype=dtype)

            def forward() -> Tensor:
                return model(batch, src_key_padding_mask=padding).masked_fill(padding.unsqueeze(-1), 0.0)

            return trained(model, forward) if training else untrained(forward, fast)

        return build

    torchs = torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder
    variants = {"torch": variant(*torchs, fast=False)}
    if not training:
        variants["torch fast path"] = variant(*torchs, fast=True)
    variants["ours"] = variant(sdpa.nn.TransformerEncoderLayer, sdpa.nn.TransformerEncoder, fast=False)
    what = "training" if training else "inference"
    shape = f"{sizes.B} x {sizes.L}, {sizes.layers} x {sizes.E}"
    return Model(f"padded encoder {what} {shape}", device, dtype, int((~padding).sum()), variants)


def attention_with_weights(sizes: Sizes, device: str, dtype: torch.dtype) -> Model:
    """Training of nn.MultiheadAttention as it is by default: with its weights returned."""

    def variant(kind: type) -> Callable[[], Step]:
        def build() -> Step:
            torch.manual_seed(0)
            model = kind(sizes.E, sizes.heads, batch_first=True, device=device, dtype=dtype)
            batch = torch.randn(sizes.B, sizes.L, sizes.E, device=device, dtype=dtype)
            return trained(model, lambda: model(batch, batch, batch)[0])

        return build

    variants = {"torch": variant(torch.nn.MultiheadAttention), "ours": variant(sdpa.nn.MultiheadAttention)}
    shape = f"{sizes.B} x {sizes.L}, {sizes.E}"
    return Model(f"attention with weights, training {shape}", device, dtype, sizes.B * sizes.L, variants)


class Block(torch.nn.Module):
    """A layer of GPT-2; what computes attention is an argument."""

    def __init__(self, sizes: Sizes, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        E = sizes.E
        self.heads, self.attend = sizes.heads, attend
        self.norm1, self.norm2 = torch.nn.LayerNorm(E), torch.nn.LayerNorm(E)
        self.qkv, self.proj = torch.nn.Linear(E, 3 * E), torch.nn.Linear(E, E)
        self.up, self.down = torch.nn.Linear(E, 4 * E), torch.nn.Linear(4 * E, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(self.attend(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with every score in memory, as nanoGPT has it without scaled_dot_product_attention."""
    L = q.shape[-2]
    future = torch.ones(L, L, dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf).softmax(-1) @ v


def written_out_open(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same without a mask."""
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


CAUSAL: dict[str, Callable[..., Any]] = {
    "written out": written_out,
    "torch": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "ours": lambda q, k, v: sdpa.scaled_dot_product_attention(q, k, v, is_causal=True),
}
OPEN: dict[str, Callable[..., Any]] = {
    "written out": written_out_open,
    "torch": F.scaled_dot_product_attention,
    "ours": sdpa.scaled_dot_product_attention,
}
GROUPED = {
    "torch": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    "ours": lambda q, k, v: sdpa.scaled_dot_product_attention(q, k, v, enable_gqa=True),
}


def in_every_way(
    ways: Mapping[str, Callable[..., Any]], device: str, build: Callable[[Callable[..., Any], bool], Step]
) -> dict[str, Any]:
    """Variants by how attention is computed: eager, and on a GPU compiled as well."""
    variants = {name: lambda way=way: build(way, False) for name, way in ways.items()}
    if device.startswith("cuda"):
        variants |= {f"{name} compiled": lambda way=way: build(way, True) for name, way in ways.items()}
    return variants


def gpt_training(sizes: Sizes, device: str, dtype: torch.dtype) -> Model:
    """The layers of GPT-2 without its vocabulary, forward and backward."""

    def build(attend: Callable[..., Any], compiled: bool) -> Step:
        model, batch = blocks(sizes, attend, device, dtype)
        run = torch.compile(model) if compiled else model
        return trained(model, lambda: run(batch))

    shape = f"{sizes.B} x {sizes.L}, {sizes.layers} x {sizes.E}"
    variants = in_every_way(CAUSAL, device, build)
    return Model(f"GPT training {shape}", device, dtype, sizes.B * sizes.L, variants)


def vit_inference(sizes: Sizes, device: str, dtype: torch.dtype) -> Model:
    """The layers of ViT-B/16, whose 197 positions are a multiple of nothing."""

    def build(attend: Callable[..., Any], compiled: bool) -> Step:
        model, batch = blocks(sizes, attend, device, dtype)
        run = torch.compile(model) if compiled else model
        return untrained(lambda: run(batch), fast=False)

    shape = f"{sizes.B} x {sizes.L}, {sizes.layers} x {sizes.E}"
    return Model(f"ViT inference {shape}", device, dtype, sizes.B * sizes.L, in_every_way(OPEN, device, build))


def blocks(sizes: Sizes, attend: Callable[..., Any], device: str, dtype: torch.dtype) -> tuple[torch.nn.Module, Tensor]:
    """A stack of layers and a batch for it, the same for every way to attend."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(sizes, attend) for _ in range(sizes.layers))).to(device, dtype)
    return model, torch.randn(sizes.B, sizes.L, sizes.E, device=device, dtype=dtype)


class DecodeBlock(torch.nn.Module):
    """A layer of a Llama while it generates: one position, and the cache of those before it."""

    keys: Tensor
    values: Tensor

    def __init__(self, sizes: Sizes, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        E, D = sizes.E, sizes.E // sizes.heads
        self.heads, self.attend = sizes.heads, attend
        self.norm1, self.norm2 = torch.nn.RMSNorm(E), torch.nn.RMSNorm(E)
        self.q, self.proj = torch.nn.Linear(E, E, bias=False), torch.nn.Linear(E, E, bias=False)
        self.gate, self.up, self.down = (torch.nn.Linear(*n, bias=False) for n in ((E, 4 * E), (E, 4 * E), (4 * E, E)))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(sizes.B, sizes.heads // GROUP, sizes.L, D))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(self.norm1(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        x = x + self.proj(self.attend(q, self.keys, self.values).transpose(1, 2).flatten(-2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def llama_decode(sizes: Sizes, device: str, dtype: torch.dtype) -> Model:
    """A step of generation with L positions in the cache; the layers of a Llama of a billion parameters on a GPU."""

    def build(attend: Callable[..., Any], compiled: bool) -> Step:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(DecodeBlock(sizes, attend) for _ in range(sizes.layers))).to(device, dtype)
        token = torch.randn(sizes.B, 1, sizes.E, device=device, dtype=dtype)
        run = torch.compile(model) if compiled else model
        return untrained(lambda: run(token), fast=False)

    shape = f"{sizes.B} x {sizes.L}, {sizes.layers} x {sizes.E}"
    return Model(f"Llama decode {shape}", device, dtype, sizes.B, in_every_way(GROUPED, device, build))


def trained(model: torch.nn.Module, forward: Step) -> Step:
    """A step that returns the gradient of the first parameter, of an upstream gradient drawn once."""
    learned = list(model.parameters())
    with torch.no_grad():
        out = forward()
        upstream = torch.randn(out.shape, device=out.device, dtype=out.dtype)  # filled in one order, whatever out's

    def step() -> Tensor:
        return torch.autograd.grad(forward(), learned, upstream)[0]

    return step


def untrained(forward: Step, fast: bool) -> Step:
    def step() -> Tensor:
        with torch.no_grad(), fast_path(fast):
            return forward()

    return step


class Disagreement(RuntimeError):
    """Two variants' results differ by more than rounding."""


def run_model(model: Model, rounds: int | None = None, time_limit: float = 5.0) -> list[Outcome]:
    """Every variant's figures, from rounds that alternate between them, after their results were compared."""
    torch._dynamo.reset()  # models share code, of which so many variants are compiled and no more
    steps = {name: build() for name, build in model.variants.items()}
    results = {name: step().cpu() for name, step in steps.items()}  # where float64 is
    wanted = results["torch"].double()
    for name, result in results.items():
        distance = float((result.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))
        if not distance <= TOLERANCE[model.dtype]:
            raise Disagreement(f"{model.label}: {name} is {distance:.2g} away from torch")
    least = LOOP if model.device.startswith("cuda") else sample_for(model.device)
    timings = interleave(list(steps.values()), stopwatch_for(model.device), rounds, time_limit, min_sample=least)
    found = zip(steps.items(), timings, strict=True)
    return [Outcome(model, name, timing, peak_of(step, model.device)) for (name, step), timing in found]


def peak_of(step: Step, device: str) -> int | None:
    """Bytes by which a step raises what is allocated on a GPU; None on a CPU, where nobody counts."""
    if not device.startswith("cuda"):
        return None
    with torch.cuda.device(device) if ":" in device else nullcontext():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def ratio(outcome: Outcome, outcomes: list[Outcome]) -> float:
    """How many times as fast as the faster of torch's ways, compiled beside compiled."""
    compiled = outcome.variant.endswith(" compiled")
    names = [f"{name} compiled" if compiled else name for name in TORCHS]
    best = min(other.timing.minimum for other in outcomes if other.variant in names)
    return best / outcome.timing.minimum
