"""Suite distributed: what each mode of context parallelism computes, copies and sends.

With `--simulate` one device computes the ranks one after the other. What others would send is memory of the right size,
so that a figure has a rank's calls of attention, its copies and its merging, and no link. Without it processes on this
machine exchange by gloo what one process then computes too: their largest distance, and the bytes that they sent.
"""

from __future__ import annotations

import datetime
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from sdpa import Mask, scaled_dot_product_attention
from sdpa.distributed import Parts, context_parallel, shard, unshard
from sdpa.distributed.links import Link
from sdpa.distributed.modes import Heads, Keys, Mode, Part, Results, Whole
from sdpa.distributed.ring import Ring, Steps

PATIENCE = datetime.timedelta(seconds=120)  # of a collective
ROUNDS = 3
CALLS = 3  # calls on a GPU, as in training: what the host does for one hides behind the one before
DIRECTIONS = ("forward", "backward")
DOCUMENTS = (7, 1, 3, 2, 9, 4, 1, 5)  # lengths in proportion, again and again
WINDOW = 1024
Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One problem, the same for every mode. Lengths are of a rank."""

    name: str
    each: int
    mask: str  # "causal", "window", "documents"
    H: int = 16
    Hkv: int = 4
    D: int = 128
    dtype: torch.dtype = torch.bfloat16

    def documents(self, ranks: int) -> list[int]:
        """Lengths of documents that fill the sequence, of 2048 positions for each unit of DOCUMENTS at most."""
        unit, whole, found = max(1, min(2048, self.each // 16)), self.each * ranks, list[int]()
        while (left := whole - sum(found)) > 0:
            found.append(min(left, unit * DOCUMENTS[len(found) % len(DOCUMENTS)]))
        return found

    def mask_of(self, ranks: int, device: str) -> Mask:
        if self.mask == "window":
            return Mask(causal=True, window=(min(WINDOW, self.each // 16), 0))
        if self.mask == "documents":
            ends = torch.tensor([0, *self.documents(ranks)]).cumsum(0).to(device)
            return Mask(causal=True, cu_seqlens=ends)
        return Mask(causal=True)

    def orders(self, ranks: int) -> dict[str, Parts]:
        """How ranks may share the sequence."""
        whole = self.each * ranks
        balanced = self.documents(ranks) if self.mask == "documents" else [whole]
        zigzag = {"zigzag": Parts.zigzag(whole, ranks)} if self.mask == "causal" else {}
        documents = {"documents": Parts.documents(balanced, ranks)} if self.mask == "documents" else {}
        return {"even": Parts.even(whole, ranks)} | zigzag | documents


def cases(device: str) -> list[Case]:
    """32,768 positions a rank on a GPU, on a CPU 512."""
    sizes: dict[str, Any] = {"each": 32768} if device.startswith("cuda") else {"each": 512, "dtype": torch.float32}
    return [Case(mask, mask=mask, **sizes) for mask in ("causal", "window", "documents")]


# -- ranks one after the other ----------------------------------------------------------------------------------------


class Alone(Link):
    """One rank of several that are not there."""

    def __init__(self, ranks: int, rank: int, device: str) -> None:
        self.ranks, self.rank, self.device, self.sent = ranks, rank, device, 0
        self.numbers: dict[torch.dtype, Tensor] = {}

    def buffer(self, sent: Tensor, size: int) -> Tensor:
        """Random numbers, always the same: a GPU is faster where all are 0."""
        held = self.numbers.get(sent.dtype)
        if held is None or held.numel() < size:
            held = self.numbers[sent.dtype] = torch.randn(size, device=sent.device, dtype=sent.dtype)
        return held[:size]

    def exchange(self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]) -> Any:
        return None

    def post(self, sent: Tensor, to: int, received: Tensor, source: int) -> list[Any]:
        return []


class Kept:
    """Calls of attention as a mode makes them, and these alone."""

    def __init__(self) -> None:
        self.forward: list[Run] = []
        self.backward: list[Run] = []


class KeptWhole(Whole):
    """Keeps each call and its backward."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept

    def __call__(self, part: Part) -> Results:
        q, k, v = (t.detach().clone().requires_grad_() for t in part[:3])
        own, attend = part._replace(query=q, key=k, value=v), super().__call__
        with torch.enable_grad():
            out = attend(own)[0]
        upstream = torch.randn_like(out)
        self.kept.forward.append(lambda: attend(own))
        self.kept.backward.append(lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True))
        return attend(part)


def kept_steps(kept: Kept) -> type[Steps]:
    """The same of the steps of a ring."""

    class KeptSteps(Steps):
        def forward(self, inputs: Any) -> tuple[Tensor, Tensor]:
            inputs = inputs._replace(**{n: getattr(inputs, n).clone() for n in ("q", "k", "v")})
            kept.forward.append(lambda: Steps.forward(self, inputs))
            return super().forward(inputs)

        def backward(self, inputs: Any, results: Any, upstream: Any, bias_grad: bool) -> tuple[Tensor, ...]:
            inputs = inputs._replace(**{n: getattr(inputs, n).clone() for n in ("q", "k", "v")})
            kept.backward.append(lambda: Steps.backward(self, inputs, results, upstream, bias_grad))
            return super().backward(inputs, results, upstream, bias_grad)

    return KeptSteps


def mode_of(name: str, link: Link, kept: Kept | None = None) -> Mode:
    """A mode; with `kept`, one that keeps its calls of attention."""
    attend = Whole() if kept is None else KeptWhole(kept)
    if name == "ring":
        return Ring(link, None if kept is None else kept_steps(kept))
    everyone = list(range(link.ranks))
    return Heads(link, attend, everyone, [everyone]) if name == "ulysses" else Keys(link, attend)


class Share(NamedTuple):
    """What one rank takes in one direction."""

    seconds: float
    attention: float  # seconds of its calls of attention alone
    sent: int  # bytes


class Simulated(NamedTuple):
    """A mode of one case: by direction the shares of all ranks."""

    case: Case
    mode: str
    order: str
    ranks: int
    shares: dict[str, list[Share]]

    def slowest(self, direction: str) -> float:
        """Attention of the slowest rank beside the mean."""
        found = [share.attention for share in self.shares[direction]]
        return max(found) / statistics.mean(found)

    def beside(self, direction: str) -> float:
        """Copies and merging as a share of attention, over all ranks."""
        shares = self.shares[direction]
        return sum(share.seconds for share in shares) / sum(share.attention for share in shares) - 1.0

    def sent(self, direction: str) -> int:
        """The bytes of the rank that sends most."""
        return max(share.sent for share in self.shares[direction])


def simulate(case: Case, ranks: int, device: str) -> Iterator[Simulated]:
    """Every mode and order of a case."""
    for order, parts in case.orders(ranks).items():
        for mode in ("ulysses", "gather", "ring"):
            if mode == "ulysses" and (case.H % ranks or case.Hkv % ranks):
                continue
            found: dict[str, list[Share]] = {direction: [] for direction in DIRECTIONS}
            for rank in range(ranks):
                for direction, share in shares(case, mode, parts, Alone(ranks, rank, device)).items():
                    found[direction].append(share)
            yield Simulated(case, mode, order, ranks, found)


def shares(case: Case, mode: str, parts: Parts, link: Alone) -> dict[str, Share]:
    """One rank, forward and backward."""
    length, device = parts.lengths[link.rank], link.device

    def made(heads: int) -> Tensor:
        return torch.randn(1, heads, length, case.D, device=device, dtype=case.dtype).requires_grad_()

    q, k, v = made(case.H), made(case.Hkv), made(case.Hkv)
    part = Part(q, k, v, case.mask_of(link.ranks, device), None, {"enable_gqa": True}, False, parts, parts)
    attend, kept = mode_of(mode, link), Kept()
    out = attend(part)[0]
    forward_bytes, upstream = link.sent, torch.randn_like(out)
    torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True)
    backward_bytes = link.sent - forward_bytes
    keeping = mode_of(mode, link, kept)(part)[0]
    torch.autograd.grad(keeping, (q, k, v), upstream)
    runs: dict[str, tuple[Run, list[Run]]] = {
        "forward": (lambda: attend(part), kept.forward),
        "backward": (lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True), kept.backward),
    }
    sent = {"forward": forward_bytes, "backward": backward_bytes}
    return {
        direction: Share(*in_turns([run], alone, device), sent[direction]) for direction, (run, alone) in runs.items()
    }


def in_turns(runs: list[Run], others: list[Run], device: str) -> tuple[float, float]:
    """The median times of two lists of calls, which take turns: a device that slows down does so for both."""
    found = [(seconds(runs, device), seconds(others, device)) for _ in range(1 + ROUNDS)][1:]
    first, second = (statistics.median(times) for times in zip(*found, strict=True))
    return first, second


def seconds(runs: list[Run], device: str) -> float:
    """The time of calls one after the other."""
    times = CALLS if device.startswith("cuda") else 1
    synchronize(device)
    begin = time.perf_counter()
    for run in runs * times:
        run()
    synchronize(device)
    return (time.perf_counter() - begin) / times


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


# -- processes of this machine ----------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """A mode of one case on processes: what they sent, and how far they are from one process."""

    case: str
    mode: str
    order: str
    ranks: int
    distance: float  # of the output, the largest
    sent: dict[str, int]  # by direction, the bytes of the rank that sends most
    seconds: float  # of a forward and its backward on all ranks


def measure(case: Case, ranks: int) -> list[Measured]:
    """Every mode and order of a case on processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(in_process, (ranks, folder, case), nprocs=ranks)
        return list(torch.load(Path(folder) / "found", weights_only=False))


def in_process(rank: int, ranks: int, folder: str, case: Case) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, timeout=PATIENCE, world_size=ranks, rank=rank)
    try:
        found = [
            beside_one(case, ranks, mode, order)
            for order in case.orders(ranks)
            for mode in ("ulysses", "gather", "ring")
        ]
        if rank == 0:
            torch.save(found, Path(folder) / "found")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def beside_one(case: Case, ranks: int, mode: str, order: str) -> Measured:
    """One mode on all ranks, and the output of one process."""
    parts, mask, mesh = case.orders(ranks)[order], case.mask_of(ranks, "cpu"), init_device_mesh("cpu", (ranks,))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, heads, parts.length, case.D, generator=generator) for heads in (case.H, *[case.Hkv] * 2)]
    q, k, v = (shard(t, mesh, 2, parts).clone().requires_grad_() for t in whole)
    with context_parallel(mesh, mode, parts) as block:
        begin = time.perf_counter()
        out: Any = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        forward = block.sent
        out.sum().backward()
        took = time.perf_counter() - begin
    expected: Any = scaled_dot_product_attention(whole[0], whole[1], whole[2], mask, enable_gqa=True)
    distance = (unshard(out, mesh, 2, parts) - expected).abs().max().item()
    sent = torch.tensor([forward, block.sent - forward])
    dist.all_reduce(sent, dist.ReduceOp.MAX)
    return Measured(case.name, mode, order, ranks, distance, dict(zip(DIRECTIONS, sent.tolist(), strict=True)), took)
