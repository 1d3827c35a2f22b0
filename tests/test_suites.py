"""The suites for GPUs: their shapes, and figures by the conventions of the papers they come from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sdpa.bench.problems import DIRECTIONS, Problem
from sdpa.bench.suites import GPU_SUITES, SUITES


@pytest.mark.parametrize("name", ["gpu-forward", "gpu-backward"])
def test_the_papers_grid(name):
    cells = GPU_SUITES[name]
    assert {(p.D, p.N, p.mask) for p in cells} == {
        (D, N, mask)
        for D in (64, 128, 256)
        for N in (512, 1024, 2048, 4096, 8192, 16384)
        for mask in ("none", "causal")
    }
    for p in cells:
        assert (p.B * p.N, p.H * p.D, p.M, p.dtype) == (16384, 2048, p.N, "bfloat16")
        assert p.direction == name.removeprefix("gpu-")


def test_gpu_suites_hold_what_they_promise():
    assert all(p.device == "cuda" for cells in GPU_SUITES.values() for p in cells)
    assert {(p.H, p.Hkv, p.N) for p in GPU_SUITES["gpu-gqa"]} == {(h, 8, n) for h in (32, 64) for n in (2048, 8192)}
    assert {(p.B, p.M, p.N) for p in GPU_SUITES["gpu-decode"] if p.Hkv == 8} == {
        (1, 1, 8192), (1, 1, 131072), (16, 1, 8192), (64, 1, 4096), (1, 4, 8192), (16, 4, 8192),
    }  # fmt: skip
    masks = {(p.mask, p.direction) for p in GPU_SUITES["gpu-mask"]}
    for mask in ("bias", "lengths", "padding", "window", "alibi", "segments", "allowed"):
        assert (mask, "forward") in masks
    assert {("bias_grad", "backward"), ("window", "backward")} <= masks
    assert {p.window for p in GPU_SUITES["gpu-mask"] if p.mask == "window"} == {1024}
    assert {(p.precision, p.direction) for p in GPU_SUITES["gpu-fp32"]} == {
        (precision, d) for precision in ("highest", "high") for d in DIRECTIONS
    }
    assert all(p.host and p.unit == "us" for p in GPU_SUITES["gpu-overhead"])
    assert {replace(p, device="cuda", host=True) for p in SUITES["overhead"]} <= set(GPU_SUITES["gpu-overhead"])


def test_figures_by_the_papers_convention():
    plain = Problem(2, 16, 8192, 8192, 128)
    whole = 4 * 2 * 16 * 8192**2 * 128
    assert plain.operations() == whole and plain.unit == "TFLOP/s"
    for mask in ("causal", "alibi"):
        assert replace(plain, mask=mask).operations() == whole / 2
    assert replace(plain, mask="causal", direction="backward").operations() == whole / 2 * 2.5
    assert plain.figure(1e-3) == pytest.approx(whole * 1e-9)
    assert replace(plain, host=True).figure(2e-6) == pytest.approx(2.0)


def test_decode_is_told_in_bytes_of_keys_and_values():
    decode = Problem(1, 32, 1, 8192, 128, Hkv=8, dtype="bfloat16")
    assert decode.unit == "GB/s" and decode.figure(1e-3) == pytest.approx(2 * 8 * 8192 * 128 * 2 * 1e3 * 1e-9)
    assert replace(decode, M=4).unit == "GB/s" and replace(decode, M=8192).unit == "TFLOP/s"


def test_documents_fill_a_row():
    for N in (300, 8192):
        lengths = Problem(1, 1, N, N, 8).document_lengths()
        assert sum(lengths) == N and min(lengths) > 0 and len(set(lengths)) > 1
    assert len(Problem(2, 16, 8192, 8192, 128).document_lengths()) == 8
