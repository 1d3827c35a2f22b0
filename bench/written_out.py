"""What `install(patterns=True)` gains: `python -m sdpa.bench.written_out [N ...]`, on one thread of a CPU.

Attention as models write it out, compiled by Inductor as it is and with the operator in its place, timed by turns. What
Inductor makes of it alone has torch's attention where Inductor's own patterns know the form (the first here, not those
with a mask).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import product
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa.bench import record
from sdpa.bench.timing import Timing, interleave
from sdpa.patch import install, uninstall

B, H, D = 1, 8, 64
LENGTHS = (64, 1024)
DTYPES = (torch.float32, torch.bfloat16)
SECONDS = 3.0  # for a pair


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-2, -1) * D**-0.5, dim=-1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As in nanoGPT, with a tensor of ones below the diagonal."""
    return F.softmax((q @ k.transpose(-2, -1) * D**-0.5).masked_fill(mask == 0, -torch.inf), dim=-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As in transformers, with the lowest number above the diagonal."""
    scores = q @ k.transpose(2, 3) * D**-0.5 + (1 - mask).to(q.dtype) * torch.finfo(q.dtype).min
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


FORMS = (plain, masked, added)


def compiled(form: Callable[..., Tensor], args: list[Tensor], trains: bool) -> Callable[[], Any]:
    """A call of the form by what Inductor makes of a copy of it now: what was compiled before is found by its code."""
    code: Any = form
    run = torch.compile(FunctionType(code.__code__.replace(), code.__globals__))
    upstream = torch.randn_like(args[0])

    def step() -> Any:
        if trains:
            return torch.autograd.grad(run(*args), args[:3], upstream)
        with torch.no_grad():
            return run(*args)

    step()
    return step


def measure(N: int, dtype: torch.dtype, trains: bool, seconds: float = SECONDS) -> Iterator[tuple[str, list[Timing]]]:
    """(the form, [as Inductor has it, with ours])."""
    torch.compiler.reset()
    for form in FORMS:
        args = [torch.randn(B, H, N, D, dtype=dtype, requires_grad=trains) for _ in range(3)]
        args.append(torch.ones(N, N).tril())
        calls = [compiled(form, args, trains)]
        install(patterns=True)
        try:
            calls.append(compiled(form, args, trains))
        finally:
            uninstall()
        yield form.__name__, interleave(calls, time_limit=seconds)


def main(lengths: tuple[int, ...] = LENGTHS) -> None:
    torch.set_num_threads(1)
    print(*record.header_lines(record.header("cpu")), sep="\n")
    print(f"# B={B}, H={H}, D={D}; least milliseconds as Inductor has it, with sdpa, ratio; spreads")
    for N, dtype, trains in product(lengths, DTYPES, (False, True)):
        for form, (theirs, ours) in measure(N, dtype, trains):
            what = f"N={N} {str(dtype)[6:]} {'forward and backward' if trains else 'forward'}, {form}"
            figures = f"{theirs.minimum * 1e3:.3f} {ours.minimum * 1e3:.3f} {theirs.minimum / ours.minimum:.2f}"
            print(f"{what}: {figures}; {theirs.spread:.2f} {ours.spread:.2f}", flush=True)


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or LENGTHS)
