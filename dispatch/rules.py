"""Limits that are no single number: predicates of single rows, each of which returns a sentence or None."""

from __future__ import annotations

import torch

from sdpa.dispatch import apple
from sdpa.dispatch import device as devices
from sdpa.problem import UNLIMITED, AttentionProblem

# CUDA grids are limited to 65535 in their second and third dimension, where these kernels put batch or heads.
MAX_GRID_YZ = 65535
CUDNN_MAX_HEAD_SIZE = 128
CUDNN_TILE = 128  # keys of a tile of its backward on Hopper
CUDNN_MAX_HEAD_SIZE_HOPPER = 256
HOPPER = (9, 0)
AMPERE = (8, 0)
NO_DEVICE = (0, 0)
# torch's fused MPS kernels, which are MLX's: for at most so many queries, and for more. For other head sizes torch's
# operator writes the scores out.
MPS_FEW_QUERIES = 8
MPS_FEW_HEAD_SIZES = (64, 96, 128, 256)
MPS_HEAD_SIZES = (32, 64, 72, 80, 96, 128, 256)
MPS_MAX_ELEMENTS = 2**31  # it counts in int32
HALF_ALIGNMENT = 8
PAGED_ROWS = 8  # the CPU library's (kDirectRows)
FLOAT_ALIGNMENT = 4


def causal_only(problem: AttentionProblem) -> str | None:
    """A band must be torch's is_causal: everything to the left, nothing to the right."""
    if "band" not in problem.features or (problem.left == UNLIMITED and problem.right == 0):
        return None
    return f"knows no window but causal, got left = {problem.left}, right = {problem.right}"


def causal_forward(problem: AttentionProblem) -> str | None:
    """Any band backward, torch's is_causal forward."""
    return None if problem.direction == "backward" else causal_only(problem)


def bias_forward(problem: AttentionProblem) -> str | None:
    if problem.direction == "backward" and "bias" in problem.features:
        return "knows a bias in the forward only"
    return None


def one_mask(problem: AttentionProblem) -> str | None:
    """torch's operators disagree about a causal mask beside a dense one."""
    dense = sorted(problem.features & {"bias", "allowed"})
    if "band" in problem.features and dense:
        return f"takes a causal mask or a dense one, got both (causal and {' and '.join(dense)})"
    return None


def dense_mask_without_lse(problem: AttentionProblem) -> str | None:
    """torch's CPU flash reports 0 as the log-sum-exp of a row whose mask hides every key."""
    asked = "lse" in problem.features or problem.direction == "backward"
    if asked and problem.features & {"bias", "allowed"}:
        return "takes a dense mask only where neither a gradient nor the log-sum-exp is asked for"
    return None


def padded_weights(problem: AttentionProblem) -> str | None:
    """The weights are a tensor with a row for each query of each batch entry."""
    apart = sorted(problem.features & {"packed", "paged"})
    if problem.direction != "weights" or not apart:
        return None
    return f"makes weights of batch entries side by side only, got {' and '.join(apart)} sequences"


def packed_or_segments(problem: AttentionProblem) -> str | None:
    if {"packed", "segments"} <= problem.features:
        return "takes packed sequences or segments, got both"
    return None


def square_causal(problem: AttentionProblem) -> str | None:
    """Kernels that align causal masks to the bottom right agree with torch only when M == N."""
    if "band" not in problem.features or problem.M == problem.N:
        return None
    return f"aligns causal masks to the bottom right, so M must equal N, got M = {problem.M}, N = {problem.N}"


def same_head_sizes(problem: AttentionProblem) -> str | None:
    if problem.D == problem.Dv:
        return None
    return f"needs D == Dv, got D = {problem.D}, Dv = {problem.Dv}"


def positive_strides(problem: AttentionProblem) -> str | None:
    if not problem.zero_strides:
        return None
    return "needs strides of q, k and v that are positive multiples of 16 bytes, got one of 0"


def bias_in_query_dtype(problem: AttentionProblem) -> str | None:
    if problem.bias_dtype in (None, problem.dtype):
        return None
    return f"needs the bias in the query's dtype {problem.dtype}, got {problem.bias_dtype}"


def full_bias(problem: AttentionProblem) -> str | None:
    if problem.bias_dtype is None or problem.bias_matrices:
        return None
    return "needs a bias with a row for each query and a column for each key, got one that repeats along them"


def mask_columns(problem: AttentionProblem) -> str | None:
    """cuDNN 9.19 reads misaligned addresses where the last stride of a mask is 0, and torch's efficient operator raises
    for a bias."""
    if not problem.narrow_mask:
        return None
    return f"needs a mask with a column for each of the {problem.N} keys, got one that repeats along them"


def no_row_limit(problem: AttentionProblem) -> str | None:
    if max(problem.B, problem.H) <= MAX_GRID_YZ:
        return None
    return f"takes at most {MAX_GRID_YZ} batch entries and heads, got B = {problem.B}, H = {problem.H}"


def cudnn_head_sizes(problem: AttentionProblem) -> str | None:
    """cuDNN has kernels for D and Dv that differ from Hopper on: (192, 128) of multi-head latent attention first."""
    hopper = capability(problem.device) >= HOPPER
    if problem.D != problem.Dv and not hopper:
        return same_head_sizes(problem)
    if problem.D % HALF_ALIGNMENT or problem.Dv % HALF_ALIGNMENT:
        return f"needs head sizes that are multiples of {HALF_ALIGNMENT}, got D = {problem.D}, Dv = {problem.Dv}"
    limit = CUDNN_MAX_HEAD_SIZE_HOPPER if hopper else CUDNN_MAX_HEAD_SIZE
    if max(problem.D, problem.Dv) > limit:
        return f"takes head sizes up to {limit} on this device, got D = {problem.D}, Dv = {problem.Dv}"
    return None if problem.N > 1 else "needs more than one key, got N = 1"


def cudnn_low_scores(problem: AttentionProblem) -> str | None:
    """cuDNN's gradients are NaN where all scores of a row are so far below zero that exp(0 - lse) overflows: it pads
    tiles with zeros and does not hide them, unless a causal mask does. Nobody knows the scores before they are
    computed, so these problems are refused. Measured on an H200 with cuDNN 9.19 (decision 0005); pytorch#196678 and
    cudnn-frontend#1072 report it of later ones."""
    if problem.direction != "backward":
        return None
    if problem.M == 1:
        return "may give NaN gradients of keys and values for one query with low scores, got M = 1"
    if problem.N % CUDNN_TILE == CUDNN_TILE // 2 and "band" not in problem.features:
        return f"may give NaN gradients of queries with low scores where N % 128 is 64, got N = {problem.N}"
    return None


def efficient_alignment(problem: AttentionProblem) -> str | None:
    multiple = FLOAT_ALIGNMENT if problem.dtype == torch.float32 else HALF_ALIGNMENT
    if problem.D % multiple or problem.Dv % multiple:
        return f"needs head sizes that are multiples of {multiple}, got D = {problem.D}, Dv = {problem.Dv}"
    masked = problem.features & {"bias", "allowed"}
    if masked and problem.N % multiple:
        return f"needs a mask of a width that is a multiple of {multiple}, got N = {problem.N}"
    return None


def flash_architecture(problem: AttentionProblem) -> str | None:
    """FlashAttention-2 needs Ampere or newer."""
    got = capability(problem.device)
    return (
        None if got >= AMPERE or got == NO_DEVICE else f"needs compute capability 8.0 or newer, got {got[0]}.{got[1]}"
    )


def triton_architecture(problem: AttentionProblem) -> str | None:
    """Triton's matrix products want Ampere or newer on NVIDIA, CDNA2 or newer on AMD."""
    if not problem.device.startswith("cuda") or not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    got = capability(problem.device)
    return None if got >= AMPERE else f"needs compute capability 8.0 or newer, got {got[0]}.{got[1]}"


def hopper_only(problem: AttentionProblem) -> str | None:
    """Warpgroup products and the bulk copy engine as this kernel drives them are those of compute capability 9.0."""
    got = capability(problem.device)
    if got == NO_DEVICE or (got == HOPPER and torch.version.hip is None):
        return None
    return f"is made for compute capability 9.0, got {got[0]}.{got[1]}"


LARGEST_IN_ORDER = 128  # flash_backward.cuh; above it flash_backward_pair.cuh adds in any order
# The CUDA kernel's instances with dropout and those with a bias: their largest head size, and what neither knows.
LARGEST_PLAIN = 128
PLAIN_TERMS = ("dropout", "bias")
BESIDE_NO_TERM = frozenset({"k_lengths", "q_lengths", "segments", "packed", "sinks", "softcap", "alibi"})


def cuda_backward(problem: AttentionProblem) -> str | None:
    """What the CUDA kernel's backward lacks, beside its forward."""
    if problem.direction != "backward":
        return None
    largest = max(problem.D, problem.Dv)
    if not problem.deterministic or (largest <= LARGEST_IN_ORDER and "segments" not in problem.features):
        return None
    where = "with segments" if largest <= LARGEST_IN_ORDER else f"above head size {LARGEST_IN_ORDER}, got {largest}"
    return f"adds gradients in an order that varies {where}, and torch.use_deterministic_algorithms(True) is set"


def cuda_terms(problem: AttentionProblem) -> str | None:
    """The CUDA kernel's instances with dropout or a bias know no mask but a causal one, and the bias in the backward
    alone."""
    asked = [name for name in PLAIN_TERMS if name in problem.features]
    if not asked:
        return None
    if "bias" in asked and problem.direction != "backward":
        return "knows a bias in the backward only"
    if len(asked) > 1:
        return f"takes {' or '.join(asked)}, got both"
    term = "a bias" if "bias" in asked else "dropout"
    if (largest := max(problem.D, problem.Dv)) > LARGEST_PLAIN:
        return f"takes {term} up to head size {LARGEST_PLAIN}, got {largest}"
    beside = sorted(problem.features & BESIDE_NO_TERM)
    band = problem.left != UNLIMITED or problem.right not in (UNLIMITED, 0)
    if beside or band:
        return f"takes {term} without a mask or under a causal one, got {beside[0] if beside else 'a window'}"
    return None


def alibi_backward(problem: AttentionProblem) -> str | None:
    """The derivative of a softcap is found again from the weight, which has ALiBi's penalty in it."""
    if "alibi" not in problem.features:
        return None
    if problem.direction != "backward":
        return "knows ALiBi slopes in the backward only"
    return "takes ALiBi slopes or a softcap, got both" if "softcap" in problem.features else None


def eighths(problem: AttentionProblem) -> str | None:
    sizes = (problem.D, problem.Dv)
    if all(size > 0 and size % HALF_ALIGNMENT == 0 for size in sizes):
        return None
    return f"needs head sizes that are positive multiples of {HALF_ALIGNMENT}, got D = {problem.D}, Dv = {problem.Dv}"


def paged_forward(problem: AttentionProblem) -> str | None:
    """Pages have no gradient."""
    if problem.direction == "backward" and "paged" in problem.features:
        return "reads a paged cache in the forward only"
    return None


def few_paged_queries(problem: AttentionProblem) -> str | None:
    """More queries are worth packed keys, and then a copy of the pages costs little."""
    rows = problem.M * problem.G
    if "paged" in problem.features and rows > PAGED_ROWS:
        return f"reads pages for at most {PAGED_ROWS} queries of heads that share keys, got {rows}"
    return None


def apple_silicon(problem: AttentionProblem) -> str | None:
    """Matrices of simdgroups are of Apple's GPUs from family 7 (M1) on; Intel Macs have GPUs of AMD and Intel."""
    if problem.device_type != "mps" or apple.macos() is None or apple.is_apple_silicon():
        return None
    return f"needs a GPU of Apple's (M1 or newer), got a Mac with an {apple.machine()} processor"


def metal_bfloat16(problem: AttentionProblem) -> str | None:
    """bfloat16 is a type of Metal 3.1."""
    found = apple.macos()
    if problem.device_type != "mps" or problem.dtype != torch.bfloat16 or found is None:
        return None
    if found >= apple.BFLOAT16_MACOS:
        return None
    return f"needs macOS {apple.BFLOAT16_MACOS[0]} or newer for bfloat16, got macOS {found[0]}.{found[1]}"


def mps_fused(problem: AttentionProblem) -> str | None:
    few = problem.M <= MPS_FEW_QUERIES
    if few and problem.M > problem.N:
        return f"takes no more queries than keys where they are few, got M = {problem.M}, N = {problem.N}"
    sizes = MPS_FEW_HEAD_SIZES if few else MPS_HEAD_SIZES
    if problem.D in sizes:
        return None
    return f"takes the head sizes {', '.join(map(str, sizes))} for M = {problem.M}, got D = {problem.D}"


def mps_elements(problem: AttentionProblem) -> str | None:
    heads = problem.B * max(problem.H * problem.M, problem.Hkv * problem.N) * problem.D
    masked = problem.B * problem.H * problem.M * problem.N if problem.features & {"bias", "allowed"} else 0
    if max(heads, masked) < MPS_MAX_ELEMENTS:
        return None
    return f"takes tensors of fewer than 2^31 elements, got {max(heads, masked)}"


def capability(device: str) -> tuple[int, int]:
    """Compute capability of a CUDA device; NO_DEVICE where torch sees none, which is a reason of its own."""
    if (card := devices.ASSUMED.get()) is not None:
        return devices.compute_capability(card.architecture)
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return NO_DEVICE
    return torch.cuda.get_device_capability(int(device.partition(":")[2] or 0))
