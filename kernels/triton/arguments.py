"""From AttentionInputs to what kernels take. What calls of one problem share is made once (prepared.py)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from sdpa import packing, philox
from sdpa.alignment import BULK_BYTES, has_bulk_strides, stride_alignment
from sdpa.kernels.triton.block_ranges import BlockRanges, Ids, find_block_ranges
from sdpa.kernels.triton.float16_parts import P_EXPONENT
from sdpa.kernels.triton.kernel_arguments import (
    FLAG,
    AllStrides,
    DenseConfig,
    DenseStrides,
    Dropout,
    KernelArgs,
    KernelConfig,
    LoopOver,
    MaskArgs,
    Pages,
    PerBatch,
    PreparedArgs,
    Sizes,
    Strides,
)
from sdpa.kernels.triton.launch import OUTPUT_ALONE, WITH_LSE, Launch, Pass
from sdpa.kernels.triton.prepared import PREPARED
from sdpa.kernels.triton.target import target_of
from sdpa.layout import empty_as
from sdpa.problem import UNLIMITED, AttentionInputs, AttentionProblem, Results, Tile, read_of

# TMA wants addresses and strides in multiples of 16 bytes.
DESCRIPTOR_ALIGNMENT = BULK_BYTES
MIN_BLOCK = 16  # the smallest side of a tensor core's product
# Share of the L2 cache that the keys and values of one section of heads may fill.
L2_SHARE = 0.4
# Batch entries and heads that share a dense mask, from which on a copy took less than reading it number by number.
MIN_SHARED = 2
# Scores from which on it is made: at 87 thousand it doubled the time, from 20 million on it paid. Between: unmeasured.
MIN_SCORES = 1 << 20

# Keys that a band leaves to a query at most, and queries to a key, for which one loop over masked and full blocks pays
# (docs/log/overlapping-launches.md).
SHORT_BAND = 768
SMALL_TILE = 32 * 32  # scores of one by which it does not

# Loops over blocks, for which block ranges pay.
RANGED = (LoopOver.KEYS, LoopOver.QUERIES)

# The fields of AttentionInputs that are tensors of the mask.
FIRST_OPTION, END_OPTIONS = AttentionInputs._fields.index("bias"), AttentionInputs._fields.index("softcap")
FIRST_LATER = AttentionInputs._fields.index("rng")
# Those whose last stride kernels take to be 1; the others come dense from `inputs.py` and `sequences.py`.
DENSE_FIELDS = ("q_segments", "k_segments", "alibi", "sinks")
DENSE_MASKS = ("bias", "allowed")


def readable(
    inputs: AttentionInputs, problem: AttentionProblem | None = None, dense: tuple[str, ...] = DENSE_MASKS
) -> AttentionInputs:
    """`inputs` with copies of the small tensors that kernels cannot read as they lie in memory, or only slowly.

    With `problem` these are those of a kernel that reads the dense masks named by TMA, in loops. Two fields that hold
    the same tensor share a copy. What needs no copy is the same tensor as before.
    """
    copies: dict[str, Tensor] = {}
    for name in DENSE_FIELDS:
        tensor = getattr(inputs, name)
        if tensor is not None and tensor.stride(-1) != 1 and not tensor.is_contiguous():
            same = next((other for other in copies if getattr(inputs, other) is tensor), None)
            copies[name] = tensor.contiguous() if same is None else copies[same]
    for name in dense if problem is not None else ():
        mask = getattr(inputs, name)
        if mask is not None and is_worth_a_copy(mask, inputs, problem):
            copies[name] = in_whole_rows(mask)
    return inputs._replace(**copies) if copies else inputs


def is_worth_a_copy(dense: Tensor, inputs: AttentionInputs, problem: AttentionProblem) -> bool:
    """Whether TMA could follow a dense mask if its rows began at multiples of 16 bytes, and batch entries or heads
    share it. Without TMA each number is a load of its own, and threads shuffle them, which takes less time than a copy
    where scores are few. One row or column that is expanded is read where it lies: it is smaller than its copy."""
    shared = problem.B * problem.H // max(1, dense.shape[0] * dense.shape[1])
    whole = dense.shape[2:] == (inputs.q.shape[2], inputs.k.shape[2]) and 0 not in dense.stride()[2:]
    scores = problem.B * problem.H * problem.M * problem.N
    enough = shared >= MIN_SHARED and scores >= MIN_SCORES
    return enough and whole and target_of(problem.device).has_tma and not is_full(dense, inputs)


def in_whole_rows(dense: Tensor) -> Tensor:
    """A copy whose rows are apart by a multiple of 16 bytes."""
    *outer, N = dense.shape
    step = DESCRIPTOR_ALIGNMENT // dense.element_size()
    return dense.new_empty((*outer, -(-N // step) * step))[..., :N].copy_(dense)


def kernel_args(
    inputs: AttentionInputs, problem: AttentionProblem, tile: Tile, side: LoopOver, grad_out: Tensor | None = None
) -> tuple[KernelArgs, list[Launch]]:
    """The arguments of a kernel whose loop runs over `side`, and the launches that must come before it."""
    q, k, v = inputs[:3]
    options = [t for t in (*inputs[FIRST_OPTION:END_OPTIONS], *inputs[FIRST_LATER:]) if isinstance(t, Tensor)]
    target = target_of(problem.device)
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
    sizes = q.shape[2], k.shape[2], q.stride(), k.stride(), v.stride()
    key = ("loops", problem, tile, side, target, inputs.softcap, q.dtype, *sizes)
    if grad_out is not None:
        addresses |= grad_out.data_ptr()
        key = (*key, grad_out.stride())
    if options:
        key = (*key, inputs.dropout_p, *map(form, options))
    aligned = addresses % DESCRIPTOR_ALIGNMENT == 0
    key = (*key, aligned)
    prepared = PREPARED.get(key, prepare_args, inputs, problem, tile, side, grad_out, aligned)
    mask, launches = (prepared.mask, []) if not options else mask_of(inputs, problem, tile, side, prepared)
    if mask is None:
        mask = prepared.mask = mask_of(inputs, problem, tile, side, prepared)[0]
    tensors = (q, k, v, grad_out, inputs.bias, None if inputs.allowed is None else inputs.allowed.view(torch.uint8))
    given = map(describe, prepared.descriptors, tensors)
    args = KernelArgs(*given, prepared.strides, prepared.sizes, mask, inputs.sinks, dropout_of(inputs), prepared.config)
    return args, launches


def form(tensor: Tensor) -> tuple:
    """What a kernel is compiled for in a tensor of the mask: sizes, strides, dtype and alignment."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % DESCRIPTOR_ALIGNMENT == 0


def prepare_args(
    inputs: AttentionInputs,
    problem: AttentionProblem,
    tile: Tile,
    side: LoopOver,
    grad_out: Tensor | None,
    aligned: bool,
) -> PreparedArgs:
    copies = target_of(problem.device).has_tma and side is not LoopOver.SPLIT_KV
    allowed = None if inputs.allowed is None else inputs.allowed.view(torch.uint8)
    rows, dense = (*inputs[:3], grad_out), (inputs.bias, allowed)
    described = copies and aligned and all(t is None or fits_tma(t) for t in rows)
    full = [copies and is_full(t, inputs) for t in dense]
    config = config_of(inputs, problem, tile, side)._replace(
        TMA=described,
        BIAS=None if inputs.bias is None else dense_config(inputs.bias, full[0]),
        ALLOWED=None if allowed is None else dense_config(allowed, full[1]),
    )
    M, N, scores = tile.BLOCK_M, tile.BLOCK_N, (tile.BLOCK_M, tile.BLOCK_N)
    shapes = ((M, config.BLOCK_D), (N, config.BLOCK_D), (N, config.BLOCK_DV), (M, config.BLOCK_DV), scores, scores)
    chosen = [described and t is not None for t in rows] + full
    return PreparedArgs(
        config,
        sizes_of(inputs, problem, tile, side),
        AllStrides(*(None if t is None else strides_of(t) for t in rows)),
        *(None if t is None else dense_of(t, on) for t, on in zip(dense, full, strict=True)),
        tuple(descriptor_of(t, *s) if on else None for t, s, on in zip((*rows, *dense), shapes, chosen, strict=True)),
    )


def is_full(mask: Tensor | None, inputs: AttentionInputs) -> bool:
    """Whether a dense mask has all rows and columns, in strides that TMA can follow."""
    if mask is None or mask.shape[2:] != (inputs.q.shape[2], inputs.k.shape[2]):
        return False
    return mask.stride(3) == 1 and mask.data_ptr() % DESCRIPTOR_ALIGNMENT == 0 and fits_tma(mask)


def dense_config(mask: Tensor, described: bool) -> DenseConfig:
    return DenseConfig(mask.shape[2] > 1, mask.shape[3] > 1, described)


def empty_results(inputs: AttentionInputs, problem: AttentionProblem) -> Results:
    """Results to be filled, with a log-sum-exp where it is asked for.

    The forward kernel clears the rows behind the last packed sequence. The rows behind a sequence's own length hold
    already what a row gets that sees no key.
    """
    q = inputs.q
    out = empty_as(q, inputs.v.shape[3])
    wanted = "lse" in problem.features
    if has_rows_behind(inputs):
        return Results(out.zero_(), packing.unseen_lse(inputs) if wanted else None)
    return Results(out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if wanted else None)


def has_rows_behind(inputs: AttentionInputs) -> bool:
    """Whether no program of a forward writes some packed rows: those behind a sequence's own length, or all of them."""
    return inputs.cu_q is not None and (inputs.q_lengths is not None or inputs.cu_q.shape[0] == 1)


def fills_of(inputs: AttentionInputs) -> tuple[tuple[int, float], ...] | None:
    """(number of a result, what it holds before the launches). None where a sink makes that more than a number."""
    if not has_rows_behind(inputs):
        return ()
    return None if inputs.sinks is not None else ((0, 0.0), (1, -torch.inf))


def forward_pass_of(
    given: tuple[Tensor, ...], read: AttentionInputs, results: Results, launches: list[Launch], scratch: tuple
) -> Pass:
    """The pass of a forward's launches. They fill `results` and the tensors `scratch`."""
    fills = fills_of(read)
    if results.lse is None:
        fills = fills and fills[:1]
        return Pass(launches, given, read_of(read), (results.out, *scratch), OUTPUT_ALONE, fills)
    return Pass(launches, given, read_of(read), (*results, *scratch), WITH_LSE, fills)


def strides_of(tensor: Tensor) -> Strides:
    """They are whole where those of dimensions of one are no exception for rows: a block has more of them."""
    whole = stride_alignment(tensor) == BULK_BYTES and tensor.stride(2) * tensor.element_size() % BULK_BYTES == 0
    return Strides(*tensor.stride()[:3], FLAG if whole else None)


def sizes_of(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile, side: LoopOver) -> Sizes:
    p = problem
    if side is LoopOver.SPLIT_KV:
        blocks, entries = -(-p.M * p.G // tile.BLOCK_M), p.B * p.Hkv
    elif side is not LoopOver.QUERIES:
        blocks, entries = -(-p.M // tile.BLOCK_M), p.B * p.H
    else:
        blocks, entries = -(-p.N // tile.BLOCK_N), p.B * p.Hkv
    return Sizes(p.M, p.N, p.H, p.G, inputs.q.shape[2], inputs.k.shape[2], blocks, entries, section_of(p, entries))


def section_of(problem: AttentionProblem, entries: int) -> int:
    """How many heads lie side by side in the grid, so that their keys and values share the L2 cache.

    It is 1 where all blocks take equally long.
    """
    if "band" not in problem.features:
        return 1
    size = problem.N * (problem.D + problem.Dv) * problem.dtype.itemsize
    fitting = int(L2_SHARE * target_of(problem.device).l2) // max(1, size)
    return min(entries, max(1, fitting) * problem.G)


def config_of(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile, side: LoopOver) -> KernelConfig:
    D, Dv = problem.D, problem.Dv
    block_ranges = has_block_ranges(inputs, side)
    left, right = (None if reach == UNLIMITED else reach for reach in (inputs.left, inputs.right))
    near, far = (right, left) if side is LoopOver.QUERIES else (left, right)
    length, block = (problem.M, tile.BLOCK_M) if side is LoopOver.QUERIES else (problem.N, tile.BLOCK_N)
    lengths = any(t is not None for t in (inputs.k_lengths, inputs.q_lengths, inputs.cu_q))
    everywhere = asks_everywhere(inputs, side)
    structured = far is not None or lengths or block_ranges or inputs.prefix is not None or everywhere
    parts = 0 if side is LoopOver.SPLIT_KV else float16_parts_of(problem)
    grouped = side is LoopOver.QUERIES and problem.G > 1
    return KernelConfig(
        tile.BLOCK_M,
        tile.BLOCK_N,
        D,
        Dv,
        block_size(D),
        block_size(Dv),
        TMA=False,
        PRECISION=precision(problem),
        SCORE_MOD=inputs.scale <= 0 or inputs.softcap != 0.0 or inputs.bias is not None or inputs.alibi is not None,
        LENGTHS=lengths,
        PACKED=inputs.cu_q is not None,
        REVERSED=side is LoopOver.KEYS and right is not None,
        LEADING=near is not None or block_ranges,
        FULL=not everywhere,
        TRAILING=structured or length % block != 0,
        BIAS=None,
        ALLOWED=None,
        GROUPED=grouped,
        ONE_LOOP=parts > 0 or grouped or (side in RANGED and not lengths and visits_few(problem, tile)),
        FLOAT16_PARTS=parts,
        P_EXPONENT=P_EXPONENT if parts else 0,
    )


def visits_few(problem: AttentionProblem, tile: Tile) -> bool:
    """Whether a block visits so few others that those which a band or documents cut are many of them. One loop that
    asks of each block whether it is cut then takes less time than loops one after the other, each of which waits for
    its first loads. Not so by the smallest tiles."""
    return tile.BLOCK_M * tile.BLOCK_N > SMALL_TILE and ("segments" in problem.features or has_short_band(problem))


def has_short_band(problem: AttentionProblem) -> bool:
    return "band" in problem.features and problem.width(max(problem.M, problem.N)) <= SHORT_BAND


def block_size(size: int) -> int:
    return max(MIN_BLOCK, triton.next_power_of_2(size))


def precision(problem: AttentionProblem) -> str:
    """How float32 products are made where float16 parts are not used (see `float16_parts_of`).

    Six products of three bfloat16 parts keep float32's accuracy. On an H200 they took less time and erred less than
    three TF32 products. Three products of two parts stand for TF32, with a tenth of its error in as much time: tensor
    cores cut float32 off, and rounding it first is no faster. CDNA and the interpreter multiply float32 as it is.
    """
    if problem.dtype != torch.float32 or knobs.runtime.interpret or target_of(problem.device).backend == "hip":
        return "ieee"
    return "bf16x3" if problem.tf32 else "bf16x6"


def float16_parts_of(problem: AttentionProblem) -> int:
    """Into how many float16 parts float32 operands are cut: two hold float32, one holds TF32. 0 stands for no parts.

    A forward cuts them for each product (float16_parts.py), a backward once (row_parts.py).
    """
    if problem.direction == "weights" or problem.dtype != torch.float32 or target_of(problem.device).backend == "hip":
        return 0
    return 1 if problem.tf32 else 2


def fits_tma(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and has_bulk_strides(tensor)


def descriptor_of(tensor: Tensor, block: int, size: int) -> dict:
    """The fields of a tensor descriptor of (B, H, rows, size), read in blocks [1, 1, block, size], but for the address.

    A dimension of one needs no true stride.
    """
    unit = DESCRIPTOR_ALIGNMENT // tensor.element_size()
    strides = [unit if n == 1 else s for n, s in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    return vars(TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, block, size])) | {"base": None}


def describe(fields: dict | None, tensor: Tensor | None) -> TensorDescriptor | Tensor | None:
    """The descriptor of these fields at another address. The tensor itself where it has no descriptor."""
    if fields is None:
        return tensor
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    vars(descriptor).update(fields, base=tensor)
    return descriptor


def mask_of(
    inputs: AttentionInputs, problem: AttentionProblem, tile: Tile, side: LoopOver, prepared: PreparedArgs
) -> tuple[MaskArgs, list[Launch]]:
    """The mask as kernels take it, and the launches that find its block ranges."""
    block_ranges, launches = block_ranges_of(inputs, tile, side) if has_block_ranges(inputs, side) else (None, [])
    mask = MaskArgs(
        left=None if inputs.left == UNLIMITED else inputs.left,
        right=None if inputs.right == UNLIMITED else inputs.right,
        bottom_right=FLAG if problem.bottom_right else None,
        prefix=inputs.prefix,
        k_lengths=inputs.k_lengths,
        q_lengths=inputs.q_lengths,
        cu_q=inputs.cu_q,
        cu_k=inputs.cu_k,
        pages=pages_of(inputs),
        q_segments=per_batch(inputs.q_segments),
        k_segments=per_batch(inputs.k_segments),
        key_ranges=None if side is LoopOver.QUERIES else block_ranges,
        query_ranges=block_ranges if side is LoopOver.QUERIES else None,
        alibi=per_batch(inputs.alibi),
        bias=prepared.bias,
        allowed=prepared.allowed,
        dense=FLAG if asks_everywhere(inputs, side) else None,
        softcap=inputs.softcap or None,
    )
    return mask, launches


def asks_everywhere(inputs: AttentionInputs, side: LoopOver) -> bool:
    """Whether every block must read the dense mask or the ids, because no block ranges were found for them."""
    if side not in RANGED:
        return inputs.allowed is not None or inputs.q_segments is not None
    return inputs.allowed is not None and not masks_keys_only(inputs)


def pages_of(inputs: AttentionInputs) -> Pages | None:
    table = inputs.block_table
    return None if table is None else Pages(table, table.stride(0), inputs.k.shape[2])


def masks_keys_only(inputs: AttentionInputs) -> bool:
    """Whether the mask is (B|1, H|1, 1, N) with a last stride of 1, so that block ranges can be found for it."""
    allowed = inputs.allowed
    if allowed is None or inputs.q_segments is not None:
        return False
    return allowed.shape[2] == 1 and allowed.shape[3] == inputs.k.shape[2] and allowed.stride(3) == 1


def has_block_ranges(inputs: AttentionInputs, side: LoopOver) -> bool:
    return side in RANGED and (inputs.q_segments is not None or masks_keys_only(inputs))


def block_ranges_of(inputs: AttentionInputs, tile: Tile, side: LoopOver) -> tuple[BlockRanges, list[Launch]]:
    M, N = inputs.q.shape[2], inputs.k.shape[2]
    if inputs.q_segments is not None:
        q, k = per_batch(inputs.q_segments), per_batch(inputs.k_segments)
        entries = (max(len(inputs.q_segments), len(inputs.k_segments)), 1)
        queries, keys = Ids(q.pointer, q.batch, 0, M), Ids(k.pointer, k.batch, 0, N)
    else:
        mask = inputs.allowed.view(torch.uint8)
        dense, entries = dense_of(mask, False), mask.shape[:2]
        queries, keys = Ids(None, 0, 0, M), Ids(mask, dense.batch, dense.head, N)
    own, other, block = (keys, queries, tile.BLOCK_N) if side is LoopOver.QUERIES else (queries, keys, tile.BLOCK_M)
    block_ranges, launch = find_block_ranges(own, other, entries, block, inputs.q.device)
    return block_ranges, [launch]


def per_batch(values: Tensor | None) -> PerBatch | None:
    """A tensor (B|1, positions) with its batch stride, which is 0 where all entries share a row."""
    if values is None:
        return None
    return PerBatch(values, values.stride(0) if values.shape[0] > 1 else 0)


def dense_of(mask: Tensor, described: bool) -> DenseStrides:
    batch, head, row, column = (stride if n > 1 else 0 for n, stride in zip(mask.shape, mask.stride(), strict=True))
    if described:
        return DenseStrides(int(mask.shape[0] > 1), int(mask.shape[1] > 1), row, column)
    return DenseStrides(batch, head, row, column)


def dropout_of(inputs: AttentionInputs) -> Dropout | None:
    if inputs.rng is None:
        return None
    whole = 0 if philox.is_of_part(inputs.rng) else 1
    return Dropout(inputs.rng, whole, philox.threshold(inputs.dropout_p), philox.kept_factor(inputs.dropout_p))
