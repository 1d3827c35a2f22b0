"""The one table of kernels. Tests, bench, tuner, `sdpa info` and explain all read it; rows end in math."""

from __future__ import annotations

import torch

from sdpa.alignment import PLACED
from sdpa.dispatch.kernel import ROWS, Kernel
from sdpa.dispatch.rules import (
    alibi_backward,
    apple_silicon,
    bias_forward,
    bias_in_query_dtype,
    causal_forward,
    causal_only,
    cuda_backward,
    cuda_dropout,
    cudnn_head_size,
    cudnn_low_scores,
    dense_mask_without_lse,
    efficient_alignment,
    eighths,
    flash_architecture,
    full_bias,
    hopper_only,
    mask_columns,
    metal_bfloat16,
    mps_elements,
    mps_fused,
    no_row_limit,
    one_mask,
    packed_or_segments,
    padded_weights,
    paged_forward,
    positive_strides,
    same_head_sizes,
    square_causal,
    triton_architecture,
)
from sdpa.problem import FEATURES

HALF = frozenset({torch.bfloat16, torch.float16})
FLOATS = HALF | {torch.float32}
ALL_DTYPES = FLOATS | {torch.float64}
EVERYTHING = frozenset(FEATURES)
UNPACKED = EVERYTHING - {"packed", "paged"}
# What triton_flash leaves to triton_efficient, whose tiles and estimate allow for more to be loaded.
DENSE = frozenset({"bias", "allowed", "bias_grad", "dropout"})
TRITON_HEAD_SIZE = 512  # the largest accumulator that fits the registers of a block

KERNELS: tuple[Kernel, ...] = (
    Kernel(
        name="cpu_flash",
        family="flash",
        module="sdpa.kernels.cpu.flash",
        devices=("cpu",),
        dtypes=ALL_DTYPES,
        features=UNPACKED,
        summary="ours: C++, AMX, AVX-512, AVX2, NEON or portable; skips key blocks outside the mask",
        efficiency=0.8,
        overhead=4e-6,
    ),
    Kernel(
        name="vendor_cpu_flash",
        family="flash",
        module="sdpa.kernels.vendor.flash_cpu",
        devices=("cpu",),
        dtypes=ALL_DTYPES,
        features=frozenset(
            {"band", "bias", "allowed", "gqa", "lse"}
        ),  # it hides before it scales: NaN where the scale is not positive
        summary="torch's CPU flash",
        efficiency=0.6,
        overhead=6e-6,
        alignment=1,
        rules=(
            causal_only,
            one_mask,
            same_head_sizes,
            bias_in_query_dtype,
            dense_mask_without_lse,
        ),
    ),
    Kernel(
        name="cuda_flash",
        family="flash",
        module="sdpa.kernels.cuda.flash",
        devices=("cuda",),
        dtypes=HALF,
        features=frozenset(
            {"band", "bottom_right", "k_lengths", "q_lengths", "segments", "sinks", "softcap", "packed", "gqa", "lse"}
            | {"alibi", "backward", "dropout", "lse_grad"}
        ),
        summary="ours: CUDA for Hopper; a loader warp, groups whose products and softmax overlap; ALiBi backward",
        varies_in=("backward",),
        sums_queries=True,
        max_head_size=256,
        efficiency=0.78,  # ahead of cuDNN in the mean (docs/log/hopper-cuda.md, hopper-backward.md)
        overhead=22e-6,
        backward_overhead=40e-6,
        sums_groups=3000,  # kRowsToSum in bindings.cpp
        order_cost=1.15,  # docs/log/hopper-backward.md
        alignment=16,
        aligned=ROWS | {"out", "grad_out"},
        rules=(
            cuda_backward,
            cuda_dropout,
            alibi_backward,
            packed_or_segments,
            eighths,
            positive_strides,
            hopper_only,
        ),
    ),
    Kernel(
        name="triton_hopper",
        family="flash",
        module="sdpa.kernels.triton.hopper",
        devices=("cuda",),
        dtypes=HALF,
        features=frozenset({"band", "bottom_right", "bias", "gqa", "lse", "backward", "lse_grad"}),
        compiles=True,
        summary="ours: Gluon for Hopper; loads, groups of products and softmax overlapped; full biases forward",
        max_head_size=256,
        efficiency=0.7,
        overhead=11e-6,
        backward_overhead=30e-6,
        alignment=16,
        aligned=ROWS | {"bias", "bias_rows", "grad_out"},
        rules=(
            causal_forward,
            bias_forward,
            same_head_sizes,
            eighths,
            bias_in_query_dtype,
            full_bias,
            hopper_only,
        ),
    ),
    Kernel(
        name="triton_flash",
        family="flash",
        module="sdpa.kernels.triton.flash",
        devices=("cuda",),
        dtypes=FLOATS,
        features=EVERYTHING - DENSE - {"paged"},
        compiles=True,
        summary="ours: Triton; structured masks, skips key blocks outside them",
        directions=("forward", "backward", "weights"),
        max_head_size=TRITON_HEAD_SIZE,
        efficiency=0.6,
        overhead=11e-6,
        backward_overhead=30e-6,
        alignment=1,
        aligned=ROWS | {"grad_out"},
        rules=(triton_architecture, padded_weights),
    ),
    Kernel(
        name="triton_efficient",
        family="efficient",
        module="sdpa.kernels.triton.efficient",
        devices=("cuda",),
        dtypes=FLOATS,
        features=EVERYTHING - {"paged"},
        compiles=True,
        summary="ours: Triton; dense masks and bias through their strides, the bias' gradient, dropout",
        directions=("forward", "backward", "weights"),
        max_head_size=TRITON_HEAD_SIZE,
        efficiency=0.5,
        overhead=12e-6,
        backward_overhead=30e-6,
        alignment=1,
        aligned=ROWS | {"grad_out"},
        rules=(triton_architecture, padded_weights),
    ),
    Kernel(
        name="triton_decode",
        family="flash",
        module="sdpa.kernels.triton.decode",
        devices=("cuda",),
        dtypes=FLOATS,
        features=EVERYTHING - {"packed", "backward", "bias_grad", "lse_grad"},
        compiles=True,
        summary="ours: Triton; few queries, split over keys, heads of a group together, pages",
        directions=("forward",),
        max_head_size=TRITON_HEAD_SIZE,
        splits_keys=True,
        efficiency=0.1,
        overhead=10e-6,
        alignment=1,
        rules=(triton_architecture,),
    ),
    Kernel(
        name="metal_flash",
        family="flash",
        module="sdpa.kernels.metal.flash",
        devices=("mps",),
        dtypes=FLOATS,
        features=EVERYTHING,
        compiles=True,
        summary="ours: Metal for Apple's GPUs; every mask, forward and backward; verified in an emulator alone",
        directions=("forward", "backward", "weights"),
        max_head_size=256,
        splits_keys=True,
        efficiency=0.5,
        overhead=30e-6,
        alignment=1,
        aligned=ROWS | {"grad_out"},
        rules=(padded_weights, paged_forward, apple_silicon, metal_bfloat16),
    ),
    Kernel(
        name="vendor_cudnn",
        family="cudnn",
        module="sdpa.kernels.vendor.cudnn",
        devices=("cuda",),
        dtypes=HALF,
        features=frozenset({"band", "bias", "allowed", "gqa", "lse"}),
        summary="cuDNN's fused attention through torch",
        varies_in=("backward",),
        sums_queries=True,
        deterministic=False,
        efficiency=0.75,
        overhead=26e-6,
        backward_overhead=45e-6,
        mask_launches=5,
        alignment=16,
        aligned=frozenset(PLACED) - {"bias_rows"},
        rules=(
            causal_only,
            square_causal,
            one_mask,
            same_head_sizes,
            bias_in_query_dtype,
            cudnn_head_size,
            cudnn_low_scores,
            mask_columns,
            no_row_limit,
        ),
    ),
    Kernel(
        name="vendor_flash",
        family="flash",
        module="sdpa.kernels.vendor.flash_cuda",
        devices=("cuda",),
        dtypes=HALF,
        features=frozenset({"band", "gqa", "lse"}),
        summary="FlashAttention-2 as torch ships it",
        varies_in=("backward",),
        sums_queries=True,
        deterministic=True,
        max_head_size=256,
        efficiency=0.42,
        overhead=20e-6,
        backward_overhead=65e-6,
        alignment=16,
        pads_heads=8,
        aligned=ROWS | {"out", "grad_out"},
        rules=(causal_only, square_causal, same_head_sizes, flash_architecture, no_row_limit),
    ),
    Kernel(
        name="vendor_efficient",
        family="efficient",
        module="sdpa.kernels.vendor.efficient",
        devices=("cuda",),
        dtypes=FLOATS,
        features=frozenset({"band", "bias", "allowed", "bias_grad", "lse", "nonpositive_scale"}),
        summary="CUTLASS memory-efficient attention as torch ships it",
        varies_in=("backward",),
        sums_queries=True,
        deterministic=False,
        efficiency=0.2,
        overhead=15e-6,
        backward_overhead=68e-6,
        mask_launches=5,
        alignment=16,
        aligned=frozenset(PLACED),
        rules=(causal_only, one_mask, bias_in_query_dtype, efficient_alignment, mask_columns, no_row_limit),
    ),
    Kernel(
        name="vendor_mps",
        family="flash",
        module="sdpa.kernels.vendor.mps",
        devices=("mps",),
        dtypes=FLOATS,
        features=frozenset({"band", "bias", "allowed", "gqa"}),
        summary="torch's fused MPS kernels, which are MLX's; no log-sum-exp",
        directions=("forward",),
        efficiency=0.6,
        overhead=15e-6,
        mask_launches=5,
        alignment=1,
        rules=(causal_only, one_mask, same_head_sizes, bias_in_query_dtype, mps_fused, mps_elements),
    ),
    Kernel(
        name="vendor_math",
        family="math",
        module="sdpa.kernels.vendor.math",
        devices=(),
        dtypes=ALL_DTYPES,
        features=frozenset({"band", "bias", "allowed", "nonpositive_scale"}),
        summary="torch's math: the score matrix in memory, no log-sum-exp",
        directions=("forward",),
        materialises=True,
        efficiency=0.08,
        overhead=50e-6,
        rules=(causal_only, one_mask, bias_in_query_dtype),
    ),
    Kernel(
        name="math",
        family="math",
        module="sdpa.kernels.math.composite",
        devices=(),
        dtypes=ALL_DTYPES,
        features=EVERYTHING,
        summary="composite of torch operations: any device, any feature, any order of derivative",
        directions=("forward", "backward", "weights"),
        materialises=True,
        efficiency=0.05,
        overhead=60e-6,
        rules=(padded_weights,),
    ),
)


# Types of devices with a fused kernel that takes the feature; math, which takes all, names no device.
SERVED = {
    feature: frozenset(device for kernel in KERNELS if feature in kernel.features for device in kernel.devices)
    for feature in ("packed", "paged", "segments")
}
BY_NAME = {kernel.name: kernel for kernel in KERNELS}


def by_name() -> dict[str, Kernel]:
    return BY_NAME


def kernels_for(device_type: str) -> tuple[Kernel, ...]:
    """Rows that serve a type of device, in the catalog's order."""
    return tuple(kernel for kernel in KERNELS if kernel.serves(device_type))
