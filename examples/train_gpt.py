"""Trains one small GPT three times, attention written out, torch's and sdpa's, and compares speed and losses.

The text is the source of Python's standard library. The three models start equal, see the same batches and take turns
step by step, so that whatever else the machine does falls on all of them. At every few steps one without attention
takes a turn, too: what the others take longer is attention's share.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import sysconfig
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from gpt import GPT, Attend, Config, fused, written_out
from report import Report, show
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import sdpa
from sdpa.dispatch.device import device_of

SEED = 1337
LEARNING_RATE = 1e-3
RAMP = 20  # steps to the full rate; without it a difference in the last bit grows into another curve
CLIP = 1.0
TEXT_BYTES = 4_000_000
WARM_UP = 2  # steps left out of the speeds: they allocate, choose kernels and load libraries
REST_STEPS = 22  # turns of the model without attention at most, its warm-up among them

# The CPU's model is narrow, so that attention at this context is most of the work, and trains in float32, where three
# ways to round differ least; the GPU's is closer to what people train.
CONFIGS = {"cpu": Config(), "cuda": Config(layers=6, heads=6, head_size=64, batch=16)}
STEPS = {"cpu": 90, "cuda": 300}


@dataclass
class Run:
    """One way to compute attention, the model that trains with it, and what was seen."""

    name: str
    attend: Attend
    patched: bool = False
    model: GPT | None = None
    optimizer: torch.optim.Optimizer | None = None
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def context(self) -> AbstractContextManager:
        return sdpa.patch() if self.patched else nullcontext()

    def start(self, config: Config, device: torch.device) -> None:
        torch.manual_seed(SEED)
        self.model = GPT(config, self.attend).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, betas=(0.9, 0.95))

    def step(self, text: Tensor, targets: Tensor) -> None:
        start = now(text.device)
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (len(self.losses) + 1) / RAMP)
        with self.context(), autocast(text.device):
            loss = self.model(text, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.seconds.append(now(text.device) - start)
        self.losses.append(loss.item())


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def autocast(device: torch.device) -> AbstractContextManager:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def standard_library() -> Tensor:
    """The .py files of Python's standard library as one tensor of bytes, the same on every run."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            continue
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)


def batches(text: Tensor, config: Config, steps: int, device: torch.device):
    """Yields (text, targets), both (batch, context): random places, the targets one byte further on."""
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        starts = torch.randint(len(text) - config.context - 1, (config.batch,), generator=generator)
        rows = torch.stack([text[s : s + config.context + 1] for s in starts.tolist()]).long().to(device)
        yield rows[:, :-1], rows[:, 1:]


def turns_between(steps: int) -> int:
    """At which steps the model without attention takes a turn: multiples of this."""
    return max(1, steps // REST_STEPS)


def train(runs: list[Run], rest: Run, config: Config, steps: int, device: torch.device) -> None:
    """All steps, with a bar, or with a line for each step where standard output is no terminal."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    text, piped = standard_library(), not sys.stdout.isatty()
    with Progress(*columns, disable=piped) as progress:
        task = progress.add_task("training", total=steps * len(runs), loss="")
        for number, batch in enumerate(batches(text, config, steps, device), 1):
            for run in runs:
                run.step(*batch)
                progress.update(task, advance=1, loss=f"loss {run.losses[-1]:.3f}")
            if number % turns_between(steps) == 0:
                rest.step(*batch)
            if piped:
                times = ", ".join(f"{run.name} {run.seconds[-1]:.2f} s" for run in runs)
                print(f"step {number} of {steps}: {times}, loss {runs[-1].losses[-1]:.3f}")


def attention_inputs(config: Config, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the shape, dtype and layout that the model makes."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    packed = torch.randn(config.batch, config.context, 3, config.heads, config.head_size, device=device, dtype=dtype)
    q, k, v = (t.transpose(1, 2) for t in packed.unbind(2))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def attention_share(run: Run, rest: Run) -> float:
    """The median share of a step that attention took, of steps that the model without it took a turn beside."""
    every = turns_between(len(run.seconds))
    shares = [1 - without / whole for whole, without in zip(run.seconds[every - 1 :: every], rest.seconds, strict=True)]
    return max(0.0, statistics.median(shares[WARM_UP:] or shares))


def explain(config: Config, device: torch.device) -> str:
    inputs = attention_inputs(config, device)
    tables = [sdpa.explain(*inputs, is_causal=True, direction=direction) for direction in ("forward", "backward")]
    return "\n\n".join(map(str, tables))


def describe(config: Config, device: torch.device, model: GPT) -> str:
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    precision = "bfloat16 autocast" if device.type == "cuda" else "float32"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, sdpa {sdpa.__version__}"
    return (
        f"{device_of(str(device)).description}, {torch.get_num_threads()} threads; {versions}\n"
        f"GPT of {parameters:.2f} M parameters on bytes, context {config.context}, {config.layers} layers of "
        f"{config.heads} heads of {config.head_size}, batch {config.batch}, {precision}"
    )


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return int(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = " and ".join(f"{steps} on {device}" for device, steps in STEPS.items())
    parser.add_argument("--steps", type=positive, help=f"of each of the three runs; default {default}")
    parser.add_argument("--device", choices=sorted(CONFIGS), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="the picture; default demo.png")
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected a device that torch can use, got --device cuda, and torch sees no CUDA device")
    if chosen.out.is_dir() or not chosen.out.parent.is_dir():
        parser.error(f"expected a file in a folder that exists, got --out {chosen.out}")
    return chosen


def main() -> None:
    chosen = arguments()
    sys.stdout.reconfigure(line_buffering=True)  # a pipe or a file shows each line when it is printed
    device, config = torch.device(chosen.device), CONFIGS[chosen.device]
    steps = chosen.steps or STEPS[chosen.device]
    runs = [Run("written out", written_out), Run("torch", fused), Run("sdpa", fused, patched=True)]
    rest = Run("none", lambda q, k, v: v)
    for run in (*runs, rest):
        run.start(config, device)
    title = describe(config, device, runs[0].model)
    print(title)
    train(runs, rest, config, steps, device)
    tokens = config.batch * config.context
    reports = [
        Report(run.name, run.losses, run.seconds[WARM_UP:] or run.seconds, tokens, attention_share(run, rest))
        for run in runs
    ]
    show(reports, explain(config, device), title, chosen.out)


if __name__ == "__main__":
    sys.exit(main())
