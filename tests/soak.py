"""Random GPU calls again and again, from several threads with streams of their own, while masks change in place.

`make gpu-soak CALLS=100000` on a machine with a GPU. Each call of the pool is checked against float64 first, then every
repetition against that first result: of a forward bit by bit, of gradients, whose sums may have another order, by
distance. Some tensors begin at odd addresses, and some calls are replays of CUDA graphs. What they need is compiled
before, in several processes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor

import sdpa
from sdpa.bench import pool

THREADS = 3
KINDS = 40  # different calls of each thread
GRAPHS = 0.2  # share of them that are captured
MASKS = ("none", "causal", "window", "padding", "allowed", "bias", "lengths", "segments", "alibi")
# Distance to float64 of a result, as a share of its norm; and of gradients to the first ones.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
AGAIN = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
QUEUED = 200  # calls between two waits for the device
# Seconds after which a thread lets another one run. A backward has a thread of its own, which waits for its turn, too.
TURN = 2e-4


@dataclass
class Asked:
    """A call: its tensors, its options, and two contents for what changes in place, with the results of each."""

    leaves: tuple[Tensor, ...]
    grad_out: Tensor | None  # of calls that differentiate
    options: dict[str, Any]
    changes: Tensor | None  # the tensor in `options` that changes
    contents: tuple[Tensor | None, ...]
    label: str
    results: list[tuple[Tensor, ...]]
    graph: torch.cuda.CUDAGraph | None = None
    made: tuple[Tensor, ...] = ()  # by the graph

    def run(self) -> tuple[Tensor, ...]:
        out = sdpa.scaled_dot_product_attention(*self.leaves, **self.options)
        if self.grad_out is None:
            return (out,)
        return (out.detach(), *torch.autograd.grad(out, self.leaves, self.grad_out))


def drawn_mask(
    kind: str, sizes: tuple[int, int, int, int], random: Random
) -> tuple[dict[str, Any], Tensor | None, tuple]:
    """(the options of a call, the tensor among them that changes, its two contents)"""
    B, H, M, N = sizes
    if kind == "none":
        return {}, None, (None,)
    if kind == "causal":
        return {"is_causal": True}, None, (None,)
    if kind == "window":
        return {"attn_mask": sdpa.Mask(causal=True, window=(random.randint(1, N), 0))}, None, (None,)
    if kind == "alibi":
        slopes = torch.rand(2, H, device="cuda")
        return {"attn_mask": sdpa.Mask(causal=True, alibi=(held := slopes[0].clone()))}, held, tuple(slopes)
    if kind == "lengths":
        lengths = torch.randint(1, N + 1, (2, B), device="cuda", dtype=torch.int32)
        return {"attn_mask": sdpa.Mask(lengths=(held := lengths[0].clone()))}, held, tuple(lengths)
    if kind == "segments":
        ids = torch.randint(0, 3, (2, max(M, N)), device="cuda", dtype=torch.int32).sort(-1).values
        held = ids[0].clone()
        return {"attn_mask": sdpa.Mask(segments=(held[:M], held[:N]))}, held, tuple(ids)
    if kind == "bias":
        bias = torch.randn(2, 1 if B > 3 else random.choice((1, B)), 1 if B > 3 else H, M, N, device="cuda")
        return {"attn_mask": (held := bias[0].clone())}, held, tuple(bias)
    shape = (B, 1, 1, N) if kind == "padding" else (B, 1, M, N)
    allowed = torch.rand(2, *shape, device="cuda") < 0.7
    return {"attn_mask": (held := allowed[0].clone())}, held, tuple(allowed)


def tensor_of(random: Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Of (B, heads, length, D), in one of both memory orders, at times one element behind an aligned address."""
    B, heads, length, D = shape
    odd = random.random() < 0.15
    memory = torch.randn(B * heads * length * D + odd, device="cuda").to(dtype)[int(odd) :]
    if random.random() < 0.5:
        return memory.view(B, heads, length, D)
    return memory.view(B, length, heads, D).transpose(1, 2)


def drawn_call(random: Random) -> Asked:
    dtype = random.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    B, Hkv, group = random.randint(1, 3), random.randint(1, 3), random.choice((1, 1, 2, 4))
    N, D = random.choice((7, 49, 64, 100, 128, 197, 256, 400)), random.choice((16, 32, 40, 64, 72, 96, 128))
    M = random.choice((N, N, 1, 5, 130))
    kind = random.choice(MASKS)
    if kind == "bias" and random.random() < 0.5:  # one that so many share that it is copied
        B, Hkv, group, M, N = 8, 4, 1, 49, 49
    options, changes, contents = drawn_mask(kind, (B, Hkv * group, M, N), random)
    if changes is not None and changes.is_floating_point() and changes.dim() > 2:
        contents = tuple(t.to(dtype) for t in contents)
        options["attn_mask"] = changes = contents[0].clone()
    shapes = ((B, Hkv * group, M, D), (B, Hkv, N, D), (B, Hkv, N, D))
    leaves = tuple(tensor_of(random, shape, dtype) for shape in shapes)
    grad_out = None
    if random.random() < 0.5:
        leaves = tuple(leaf.requires_grad_() for leaf in leaves)
        grad_out = torch.randn(shapes[0], device="cuda").to(dtype)
    options["enable_gqa"] = group > 1
    direction = "forward" if grad_out is None else "backward"
    label = f"{dtype} {shapes[0]} {shapes[1]} {kind} {direction}, number {random.random():.6f}"
    return Asked(leaves, grad_out, options, changes, contents, label, [])


def in_float64(asked: Asked) -> tuple[Tensor, ...]:
    """The results that are right."""
    leaves = tuple(t.detach().double().requires_grad_(t.requires_grad) for t in asked.leaves)
    mask = asked.options.get("attn_mask")
    mask = mask.double() if isinstance(mask, Tensor) and mask.is_floating_point() else mask
    out = sdpa.scaled_dot_product_attention(*leaves, **asked.options | {"attn_mask": mask, "kernel": "math"})
    if asked.grad_out is None:
        return (out,)
    return (out.detach(), *torch.autograd.grad(out, leaves, asked.grad_out.double()))


def apart(got: Tensor, right: Tensor) -> Tensor:
    return (got.double() - right.double()).norm() / right.double().norm().clamp_min(1e-2 * right.numel() ** 0.5)


def prepare(asked: Asked, captured: bool) -> None:
    """The first results, held against float64; the graph."""
    for content in asked.contents:
        if asked.changes is not None:
            asked.changes.copy_(content)
        results = asked.run()
        for number, (got, right) in enumerate(zip(results, in_float64(asked), strict=True)):
            distance = float(apart(got, right))
            if not distance <= TOLERANCE[got.dtype]:
                raise SystemExit(f"result {number} is {distance:.2g} from float64: {asked.label}")
        asked.results.append(tuple(t.clone() for t in results))
    if captured:
        torch.cuda.synchronize()
        asked.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(asked.graph, capture_error_mode="thread_local"):
            asked.made = asked.run()


def repeat(kinds: list[Asked], calls: int, seed: int, wrong: Counter, errors: list[str]) -> None:
    """One thread: so many calls, of its kinds, on its stream. A result that is not the first one is counted."""
    random, stream = Random(seed), torch.cuda.Stream()
    differ: dict[int, Tensor] = {}
    with torch.cuda.stream(stream):
        for number in range(calls):
            place = random.randrange(len(kinds))
            asked, which = kinds[place], random.randrange(len(kinds[place].contents))
            try:
                if asked.changes is not None:
                    asked.changes.copy_(asked.contents[which])
                if asked.graph is None:
                    results = asked.run()
                else:
                    asked.graph.replay()
                    results = asked.made
            except Exception as error:
                errors.append(f"{type(error).__name__}: {str(error)[:200]}: {asked.label}")
                continue
            first = asked.results[which]
            bad = (results[0] != first[0]).any()
            for got, before in zip(results[1:], first[1:], strict=True):
                bad = bad | ~(apart(got, before) <= AGAIN[got.dtype])
            differ[place] = differ[place] + bad if place in differ else bad.to(torch.int64)
            if number % QUEUED == 0:
                stream.synchronize()
        stream.synchronize()
    for place, count in differ.items():
        wrong[kinds[place].label] += int(count)


@cache
def drawn_calls(seed: int, count: int) -> list[list[Asked]]:
    """The kinds of each thread. A process draws them once."""
    torch.manual_seed(seed)
    random = Random(seed)
    return [[drawn_call(random) for _ in range(count)] for _ in range(THREADS)]


def compile_call(place: tuple[int, int, int, int]) -> None:
    """In a process of its own: what a call compiles, others find in the caches."""
    seed, count, thread, number = place
    drawn_calls(seed, count)[thread][number].run()


def compile_all(seed: int, count: int, jobs: int) -> None:
    places = [(seed, count, thread, number) for thread in range(THREADS) for number in range(count)]
    for outcome in pool.run_tasks([[(compile_call, place)] for place in places], jobs):
        if outcome.error:
            print(f"not compiled: {outcome.error}: {outcome.task[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--kinds", type=int, default=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=pool.default_jobs(), help="processes that compile")
    given = parser.parse_args()
    begin, random = time.monotonic(), Random(given.seed)
    compile_all(given.seed, given.kinds, given.jobs)
    threads_kinds = drawn_calls(given.seed, given.kinds)
    for asked in itertools.chain.from_iterable(threads_kinds):
        prepare(asked, random.random() < GRAPHS)
    torch.cuda.synchronize()
    ready = time.monotonic()
    print(f"{THREADS * given.kinds} kinds of calls are right, after {ready - begin:.0f} s", flush=True)
    sys.setswitchinterval(TURN)
    wrong, errors = Counter(), []
    each = [given.calls // THREADS + (n < given.calls % THREADS) for n in range(THREADS)]
    threads = [
        threading.Thread(target=repeat, args=(kinds, calls, given.seed + n, wrong, errors))
        for n, (kinds, calls) in enumerate(zip(threads_kinds, each, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for label, count in wrong.items():
        if count:
            print(f"{count} wrong: {label}")
    for error in errors[:10]:
        print(error)
    seconds = time.monotonic() - ready
    told = f"{given.calls} calls of {THREADS * given.kinds} kinds from {THREADS} threads, seed {given.seed}"
    took = f"{seconds:.0f} s after {ready - begin:.0f} s"
    print(f"{torch.cuda.get_device_name()}: {told}: {sum(wrong.values())} wrong, {len(errors)} errors, {took}")
    sys.exit(bool(errors or sum(wrong.values())))


if __name__ == "__main__":
    main()
