"""What is called with a random problem: the operators themselves, with wrong arguments, and the public functions."""

from __future__ import annotations

import random

import torch
from problems import INT32, Draw, Problem, random_problem
from torch import Tensor

import sdpa
from sdpa.kernels.cpu import flash
from sdpa.kernels.cpu.flash import DENSE, FIRST_OPTION, OPTIONS
from sdpa.problem import AttentionInputs, AttentionProblem, Results, Tile, read_of
from sdpa.testing import check_inputs

OPERATORS = torch.ops.sdpa_cpu
CHEAP = 2e6  # pairs times head sizes up to which a problem is also compared with float64
COMPARED = 0.3
WRONG = 16.0  # times the budget: other tests judge roundings, from fixed seeds; a wrong element is off by more
BROADCAST = ("bias", "allowed", "q_lengths", "k_lengths", "q_segments", "k_segments", "prefix", "alibi")
REFUSED = (RuntimeError, TypeError, ValueError)


def options_of(inputs: AttentionInputs, tile: Tile | None) -> dict[str, object]:
    given = {name: getattr(inputs, name) for name in OPTIONS}
    return given | ({} if tile is None else {"block_m": tile.BLOCK_M, "block_n": tile.BLOCK_N})


def forward(inputs: AttentionInputs, tile: Tile | None) -> tuple[Tensor, Tensor]:
    return OPERATORS.flash_forward(*inputs[:FIRST_OPTION], **options_of(inputs, tile))


def backward(problem: Problem, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    inputs, upstream = problem.inputs, problem.upstream
    given = (upstream.out, *inputs[:3], out, lse, *inputs[3:FIRST_OPTION])
    return OPERATORS.flash_backward(
        *given, grad_lse=upstream.lse, bias_grad=problem.bias_grad, **options_of(inputs, problem.tile)
    )


def is_dense(problem: Problem) -> bool:
    i = problem.inputs
    masks = (i.q_lengths, i.k_lengths, i.q_segments, i.prefix, i.alibi, i.sinks, problem.upstream.lse, problem.tile)
    return all(mask is None for mask in masks) and not i.softcap and not i.dropout_p and not problem.bias_grad


def run(problem: Problem) -> list[Tensor]:
    out, lse = forward(problem.inputs, problem.tile)
    gradients = backward(problem, out, lse)
    run_again(problem, Results(out, lse), gradients)
    found = [out, *gradients]
    if is_dense(problem):
        inputs, given = problem.inputs, problem.inputs[:DENSE]
        dense = OPERATORS.flash_forward_dense(*given)
        grads = OPERATORS.flash_backward_dense(problem.upstream.out, *inputs[:3], *dense, *inputs[3:DENSE])
        found += [dense[0], *grads]
    return found


def run_again(problem: Problem, results: Results, gradients: tuple[Tensor, ...]) -> None:
    """The forward, and a backward without gradients of a bias or sinks, by the addresses of their tensors alone."""
    inputs, upstream = problem.inputs, problem.upstream
    _, again = flash.record((inputs,), AttentionProblem.of(inputs), problem.tile)
    found = again(*read_of(inputs))
    if found is not None and not same(found[0], results.out):
        raise AssertionError("a forward that is made again differs")
    if problem.bias_grad or inputs.sinks is not None:
        return
    asked = AttentionProblem.of(inputs, "backward")
    _, again = flash.record((inputs, results, upstream), asked, problem.tile)
    found = again(*read_of(inputs), *results, *(t for t in upstream if t is not None))
    if found is not None and not all(same(f, g) for f, g in zip(found[:3], gradients, strict=False)):
        raise AssertionError("a backward that is made again differs")


def same(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(found.nan_to_num(), wanted.nan_to_num())


def operators(seed: int) -> None:
    problem = random_problem(seed)
    for number, tensor in enumerate(run(problem)):
        if problem.finite and not tensor.isfinite().all():
            raise AssertionError(f"result {number} of finite tensors is not finite")
    plain = problem.meant and problem.finite and is_cheap(problem.inputs)
    if plain and random.Random(f"compare {seed}").random() < COMPARED:
        compare(problem)


def is_cheap(inputs: AttentionInputs) -> bool:
    """Whether there is a reference at all, and it takes little time."""
    sizes = (*inputs.q.shape, *inputs.v.shape[1:])
    pairs = inputs.q.shape[:3].numel() * inputs.k.shape[2]
    return 0 not in sizes and pairs * (inputs.q.shape[3] + inputs.v.shape[3]) <= CHEAP


def compare(problem: Problem) -> None:
    found = check_inputs("cpu_flash", problem.inputs, problem.upstream.out, problem.bias_grad)
    bad = [str(c) for c in found if not c.error <= WRONG * c.budget]
    if bad:
        raise AssertionError("; ".join(bad))


def wrongs(rng: random.Random, tensor: Tensor, broadcasts: bool) -> list[Tensor]:
    """Tensors that cannot stand in the place of one."""
    found = [
        tensor.to(torch.complex64),
        tensor.to(torch.int8),
        tensor.to("meta"),
        tensor.unsqueeze(0),
        tensor.contiguous().to_sparse(),
    ]
    for dim in {rng.randrange(tensor.dim()), tensor.dim() - 1}:
        size, least = tensor.shape[dim], 2 if broadcasts else 1  # one stands for any number where it broadcasts
        if size != 1 or not broadcasts:
            # By three: the seed of dropout may have two words, or four.
            found.append(torch.zeros([n + 3 * (d == dim) for d, n in enumerate(tensor.shape)], dtype=tensor.dtype))
        if size > least:
            found.append(tensor.narrow(dim, 0, size - 1))
    return found


def refusals(seed: int) -> None:
    """One argument of a call is wrong, and has to be refused."""
    problem, rng = random_problem(seed), random.Random(f"refuse {seed}")
    out, lse = forward(problem.inputs, problem.tile)
    tensors = {name: value for name, value in problem.inputs._asdict().items() if isinstance(value, Tensor)}
    tensors |= {"out": out, "lse": lse, "grad_out": problem.upstream.out}
    if problem.upstream.lse is not None:
        tensors["grad_lse"] = problem.upstream.lse
    name = rng.choice(list(tensors))
    for wrong in wrongs(rng, tensors[name], name in BROADCAST):
        refuse(problem, out, lse, name, wrong)
    for numbers in ({"left": -2}, {"right": -(2**63)}):
        refuse_forward(problem.inputs._replace(**numbers), None)
    for tile in (Tile(-1, 0), Tile(0, 2**62), Tile(2**31, 2**31)):
        refuse_forward(problem.inputs, tile)


def refuse(problem: Problem, out: Tensor, lse: Tensor, name: str, wrong: Tensor) -> None:
    inputs, upstream = problem.inputs, problem.upstream
    if name in AttentionInputs._fields:
        inputs = inputs._replace(**{name: wrong})
    elif name.startswith("grad_"):
        upstream = upstream._replace(**{name.removeprefix("grad_"): wrong})
    changed = Problem(inputs, upstream, problem.bias_grad, problem.tile)
    given = (wrong if name == "out" else out, wrong if name == "lse" else lse)
    try:
        backward(changed, *given)
    except REFUSED:
        return
    raise AssertionError(f"{name} was taken: {wrong.dtype} {tuple(wrong.shape)} {wrong.device} {wrong.layout}")


def refuse_forward(inputs: AttentionInputs, tile: Tile | None) -> None:
    try:
        forward(inputs, tile)
    except REFUSED:
        return
    raise AssertionError(f"left {inputs.left}, right {inputs.right} and tile {tile} were taken")


def public(seed: int) -> None:
    """Numbers that mean nothing: results may be anything, if they are there or refused in a sentence."""
    draw = Draw(seed)
    call = draw.rng.choice((padded, packed, paged))
    try:
        call(draw)
    except REFUSED:
        return


def any_integers(draw: Draw, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Small ones, and the outermost; in both widths."""
    dtype = dtype or draw.rng.choice((torch.int32, torch.int64))
    numbers = (*INT32, *range(2, 40)) + ((-(2**63), 2**32, 2**63 - 1) if dtype == torch.int64 else ())
    return draw.laid_out(shape, dtype, lambda n: torch.tensor(draw.rng.choices(numbers, k=n), dtype=torch.int64))


def random_window(draw: Draw) -> sdpa.Mask:
    side = lambda: draw.rng.choice((None, 0, 3, 2**31, 2**63 - 1))  # noqa: E731
    return sdpa.Mask(window=(side(), side()), align=draw.rng.choice(("top_left", "bottom_right")))


def padded(draw: Draw) -> None:
    rng, dtype = draw.rng, torch.float32
    B, H, M, N, D = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((1, 5, 40)), rng.choice((1, 7, 90)), 24
    tensors = [draw.normal(B, H, length, D, dtype=dtype).requires_grad_() for length in (M, N, N)]
    fields = {
        "lengths": any_integers(draw, B),
        "query_lengths": any_integers(draw, B),
        "prefix": any_integers(draw, B),
        rng.choice(("segments", "cu_seqlens")): (any_integers(draw, M), any_integers(draw, N)),
    }
    mask = random_window(draw).replace(**{name: value for name, value in fields.items() if draw.chance(0.5)})
    out = sdpa.scaled_dot_product_attention(*tensors, mask, kernel="cpu_flash")
    out.sum().backward()


def packed(draw: Draw) -> None:
    rng, documents = draw.rng, draw.rng.choice((1, 2, 5))
    T_q, T_k, H, D = rng.choice((0, 1, 33)), rng.choice((0, 1, 70)), rng.choice((1, 2)), 24
    tensors = [draw.normal(length, H, D, dtype=torch.float32).requires_grad_() for length in (T_q, T_k, T_k)]
    cu_q = any_integers(draw, documents + 1, dtype=torch.int32)
    cu_k = cu_q if draw.chance(0.5) else any_integers(draw, documents + 1, dtype=torch.int32)
    most = [rng.choice((0, 1, 20, 2**31)) for _ in range(2)]
    out = sdpa.varlen_attention(*tensors, cu_q, cu_k, *most, random_window(draw), kernel="cpu_flash")
    out.sum().backward()


def paged(draw: Draw) -> None:
    rng, B, H, D = draw.rng, draw.rng.choice((1, 3)), draw.rng.choice((1, 2)), 24
    pages, page_size, M = rng.choice((0, 1, 6)), rng.choice((1, 4, 16)), rng.choice((1, 1, 9))
    query = draw.normal(B, M, H, D, dtype=torch.float32)
    caches = [draw.normal(pages, page_size, H, D, dtype=torch.float32) for _ in range(2)]
    table, lengths = any_integers(draw, B, rng.choice((1, 3)), dtype=torch.int32), any_integers(draw, B)
    mask = sdpa.Mask(causal=True, align="bottom_right") if draw.chance(0.5) else None
    sdpa.paged_attention(query, *caches, table, lengths, mask, kernel="cpu_flash")
