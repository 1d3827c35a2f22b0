"""What sdpa.autotune does for a call: able kernels are timed on copies of its tensors, the user's table is written."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from sdpa import environment
from sdpa.bench import tuner
from sdpa.bench.book import Book, BookError, alone, require_writable
from sdpa.dispatch import select, tables, tuning
from sdpa.dispatch.candidates import ranking
from sdpa.dispatch.device import device_of
from sdpa.dispatch.refusal import describe
from sdpa.problem import AttentionInputs, AttentionProblem

COMMAND = "sdpa.autotune()"
# The share of the seconds in which kernels are begun; the rest is for samples in turns.
FIRST_SHARE = 0.5
# Seconds of samples of each kernel on a GPU at most.
MOST_SAMPLES = 0.05
# Seconds to wait for another process that writes the table.
PATIENCE = 1.0


def remember(problem: AttentionProblem, tensors: Sequence[Any], seconds: float) -> bool:
    """Measure a call and put it into the user's table; whether it is there. Where it cannot be, a warning says why."""
    try:
        path = table_of(problem)
        entry = measure(problem, tensors, seconds)
        if entry is None:
            return False
        with alone(path, PATIENCE):
            book = Book(path, problem.device, command=COMMAND)
            book.open()
            book.add(entry)
            book.publish()
    except (BookError, torch.OutOfMemoryError) as error:
        told = "its tensors do not fit twice" if isinstance(error, torch.OutOfMemoryError) else error
        warnings.warn(f"autotune remembers nothing of {describe(problem)}: {told}", stacklevel=2)
        return False
    return True


def table_of(problem: AttentionProblem) -> Any:
    folder = environment.tuning_dir()
    if folder is None:
        raise BookError("this user's home is not known, so there is no folder for tables; set SDPA_TUNING_DIR")
    require_writable(folder)
    return folder / f"{device_of(problem.device).names[0]}.yaml"


def measure(problem: AttentionProblem, tensors: Sequence[Any], seconds: float) -> dict[str, Any] | None:
    """An entry of a table; None where fewer than two kernels ran."""
    problem = problem._replace(features=problem.features - {"lse_grad"})  # its bucket is that of calls without
    end = time.monotonic() + FIRST_SHARE * seconds
    kernels = contestants(problem)
    if len(kernels) < 2:
        return None
    contest = tuner.Contest(report=lambda line: None, ready=lambda *what: time.monotonic() < end)
    on_gpu = problem.device_type == "cuda"
    with torch.no_grad(), torch.cuda.device(problem.device) if on_gpu else nullcontext():
        inputs = copied(tensors[0])
        grad_out = copy_of(tensors[2].out) if problem.direction == "backward" else None
        ready = tuner.Field(inputs, problem, grad_out, kernels, describe(problem))
        left = (1.0 - FIRST_SHARE) * seconds
        found = tuner.compete(ready, min(MOST_SAMPLES, left / len(kernels)) if on_gpu else left, contest)
    if found is None or len(found["ms"]) < 2:
        return None
    sizes = {name: getattr(problem, name) for name in tables.SIZES}
    mask, beside = tuning.mask_kind(problem), sorted(tuning.beside_of(problem))
    about = {"direction": problem.direction, "dtype": tuning.dtype_names(problem)[0], "mask": mask, **sizes}
    return about | ({"beside": beside} if beside else {}) | found


def contestants(problem: AttentionProblem) -> tuple[Any, ...]:
    """The able kernels in the order of the times that they should take, without those that are hopeless."""
    able = [candidate for candidate in select.consider(problem) if candidate.able]
    able.sort(key=ranking(able))
    scores = problem.B * problem.H * problem.M * problem.N * torch.float32.itemsize
    longest = tuner.ESTIMATED_HOPELESS * min((c.time for c in able), default=0.0)
    kept = [c for c in able if c.time <= longest and not (c.kernel.materialises and scores > tuner.MOST_SCORES)]
    return tuple(tuner.without_twins([candidate.kernel for candidate in kept], problem))


def copied(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs with copies of their tensors, a tensor that is given twice copied once. Pages of keys and values are
    taken as they are: they belong to many sequences, and no kernel writes them."""
    pages = () if inputs.block_table is None else (inputs.k, inputs.v)
    copies: dict[int, Tensor] = {id(page): page for page in pages}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = copy_of(value)
        return copies[id(value)]

    return AttentionInputs(*map(copy, inputs))


def copy_of(tensor: Tensor) -> Tensor:
    """The same numbers with the same strides, in memory of their own."""
    if not tensor.numel():
        return tensor.detach().clone()
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    source = tensor.detach().as_strided((extent,), (1,))
    return source.clone().as_strided(tensor.shape, tensor.stride())
