"""What sdpa.autotune does for one call: able kernels are timed on copies of its tensors, the user's table written."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdpa import environment
from sdpa.bench import tuner
from sdpa.bench.book import BookError, alone, entry_key_of, header, opened, require_writable
from sdpa.bench.timing import HOPELESS, sample_for
from sdpa.dispatch import failure, select, tables, tuning
from sdpa.dispatch.candidates import Candidate, ranking
from sdpa.dispatch.device import device_of
from sdpa.dispatch.refusal import describe
from sdpa.problem import AttentionInputs, AttentionProblem, Tile

COMMAND = "sdpa.autotune()"
# The share of the seconds in which kernels are begun; the rest is for samples in turns.
FIRST_SHARE = 0.5
# Calls that a kernel's first sample is made of.
FIRST_CALLS = 2
# Rounds of samples in turns: where fewer do not fit into the seconds, the first samples decide.
FEWEST_ROUNDS, MOST_ROUNDS = 5, 40
# Seconds of samples of each kernel on a GPU at most.
MOST_SAMPLES = 0.05
# Seconds that a sample takes on a GPU at least: the caches are emptied before.
COLD = 0.003
# Copies of so many times what a call reads are not made: of views with gaps, as of a cache of all layers.
MOST_COPIED = 4
# Seconds to wait for another process that writes the table.
PATIENCE = 1.0

REFUSED: set[str] = set()  # devices whose table cannot be written, which was said


def remember(problem: AttentionProblem, tensors: Sequence[Any], seconds: float) -> None:
    """Measure a call and put it into the user's table. Where that cannot be, a warning says why, once for a device."""
    if problem.device in REFUSED:
        return
    try:
        path = table_of(problem.device)
        require_same_torch(path)
    except (BookError, OSError) as error:
        REFUSED.add(problem.device)
        told = error if isinstance(error, BookError) else f"cannot write its table: {error.strerror}"
        warnings.warn(f"autotune measures nothing on {problem.device} in this process: {told}", stacklevel=2)
        return
    try:
        entry = measure(problem, tensors, seconds)
        if entry is not None:
            with alone(path, PATIENCE):
                put(path, problem.device, entry)
    except Exception as error:  # a call that works without it goes on
        memory = failure.kind_of(error) == failure.MEMORY
        told = "its tensors do not fit twice" if memory else failure.message(error)
        warnings.warn(f"autotune leaves out {describe(problem)}: {told}", stacklevel=2)


def table_of(device: str) -> Path:
    folder = environment.tuning_dir()
    if folder is None:
        raise BookError("this user's home is not known, so there is no folder for tables; set SDPA_TUNING_DIR")
    require_writable(folder)
    return folder / f"{device_of(device).names[0]}.yaml"


def require_same_torch(path: Path) -> None:
    try:
        opened(path, path)
    except BookError as error:
        raise BookError(f"{error}; move that file away, or measure it again by `sdpa tune`") from None


def put(path: Path, device: str, entry: dict[str, Any]) -> None:
    """Add an entry to a table; one of the same problem makes way for it. What the table says of itself stays."""
    data = opened(path, path) or header(path, device) | {"command": COMMAND, "entries": []}
    others = [one for one in data["entries"] if entry_key_of(one) != entry_key_of(entry)]
    tables.write(path, data | {"entries": [*others, entry]})


def measure(problem: AttentionProblem, tensors: Sequence[Any], seconds: float) -> dict[str, Any] | None:
    """An entry of a table. None where fewer than two kernels ran, the two fastest should take too long, or copies would
    be of far more memory than the call reads."""
    problem = problem._replace(features=problem.features - {"lse_grad"})  # its entry is that of calls without
    found = contestants(problem)
    if len(found) < 2 or FIRST_CALLS * (found[0].time + found[1].time) > FIRST_SHARE * seconds:
        return None
    given = (tensors[0], *tensors[2:3])  # a backward's results are made again
    if not are_compact(given):
        return None
    on_gpu = problem.device_type == "cuda"
    with torch.no_grad(), torch.cuda.device(problem.device) if on_gpu else nullcontext():
        results = contest(problem, found, copied(given), seconds)
    if len({name for name, _ in results}) < 2:
        return None
    sizes = {name: getattr(problem, name) for name in tables.SIZES}
    mask, beside = tuning.mask_kind(problem), sorted(tuning.beside_of(problem))
    about = {"direction": problem.direction, "dtype": tuning.dtype_names(problem)[0], "mask": mask, **sizes}
    kernels = {candidate.kernel.name: candidate.kernel for candidate in found}
    about |= {"window": window} if (window := tuning.window_of(problem)) else {}
    return about | ({"beside": beside} if beside else {}) | tuner.figures(results, problem, kernels)


def contestants(problem: AttentionProblem) -> list[Candidate]:
    """The able kernels in the order of the times that they should take, without those that are hopeless."""
    able = [candidate for candidate in select.consider(problem) if candidate.able]
    able.sort(key=ranking(able))
    kept = tuner.without_twins(tuner.worth_timing({c.kernel: c.time for c in able}, problem), problem)
    return [candidate for candidate in able if candidate.kernel in kept]


def contest(
    problem: AttentionProblem, found: Sequence[Candidate], tensors: Sequence[Any], seconds: float
) -> dict[tuple[str, Tile | None], float]:
    """Seconds by kernel and tile: a sample of each kernel while there is time, then samples in turns if they fit."""
    device, end = problem.device, time.monotonic() + FIRST_SHARE * seconds
    grad_out: Any = tensors[1].out if problem.direction == "backward" else None
    call = tuner.caller(tensors[0], problem, grad_out)
    calls, first = {}, {}
    for candidate in found:
        if time.monotonic() + FIRST_CALLS * candidate.time > end:
            continue
        key = (candidate.kernel.name, candidate.tile)
        try:
            made = call(candidate.kernel, candidate.tile)
            first[key], calls[key] = tuner.first_sample(made, device), made
        except Exception:  # the choice meets it as well, and tells of it
            tuner.recover_device(device)
    close = {key: calls[key] for key in first if first[key] <= HOPELESS * min(first.values())}
    left, shortest = (1.0 - FIRST_SHARE) * seconds, sample_for(device) if problem.device_type == "cpu" else COLD
    rounds = int(left / sum(max(first[key], shortest) for key in close)) if len(close) > 1 else 0
    if rounds < FEWEST_ROUNDS:
        return first
    return tuner.race(close, device, min(MOST_SAMPLES, left / len(close)), first, min(rounds, MOST_ROUNDS))


# -- copies -----------------------------------------------------------------------------------------------------------


def copied(tensors: Sequence[Any]) -> list[Any]:
    """AttentionInputs, and what follows them, with copies of their tensors that lie as these do. Pages of keys and
    values are taken as they are: they belong to many sequences, and no kernel writes them."""
    kept = pages_of(tensors[0])
    copies = {id(one): one for one in kept} | dict(copies_of(tensors_of(tensors)))

    def copy(value: Any) -> Any:
        return copies[id(value)] if isinstance(value, Tensor) else value

    return [type(values)(*map(copy, values)) for values in tensors]


def pages_of(inputs: AttentionInputs) -> tuple[Tensor, ...]:
    return () if inputs.block_table is None else (inputs.k, inputs.v)


def tensors_of(tensors: Sequence[Any]) -> list[Tensor]:
    """Those that are copied."""
    kept = [id(page) for page in pages_of(tensors[0])]
    return [value for values in tensors for value in values if isinstance(value, Tensor) and id(value) not in kept]


def are_compact(tensors: Sequence[Any]) -> bool:
    """Whether their copies are of little more memory than what they hold."""
    given = tensors_of(tensors)
    held = sum(min(one.numel(), extent(one)) for one in {id(one): one for one in given}.values())
    return sum(end - begin for _, begin, end in stretches_of(given)) <= MOST_COPIED * held


def stretches_of(tensors: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], int, int]]:
    """The tensors by their memory, and the first and the end of the elements that these take of it."""
    by_memory: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        by_memory.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), []).append(tensor)
    for views in by_memory.values():
        begins = [int(view.storage_offset()) for view in views]
        yield views, min(begins), max(begin + extent(view) for begin, view in zip(begins, views, strict=True))


def copies_of(tensors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The copy of each tensor by its id. Of what several views share, all that lies between them is copied once."""
    for views, begin, end in stretches_of(tensors):
        memory = views[0].detach().as_strided((end - begin,), (1,), begin).clone()
        for view in views:
            yield id(view), memory.as_strided(view.shape, view.stride(), view.storage_offset() - begin)


def extent(tensor: Tensor) -> int:
    """Elements from the first to the last of a tensor, in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
