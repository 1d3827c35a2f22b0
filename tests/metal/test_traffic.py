"""How often kernels read keys and values, counted in the emulator."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from metal import emulator

from sdpa import Mask
from sdpa.inputs import Options, build_inputs
from sdpa.kernels.metal import flash
from sdpa.kernels.metal.launch import OWN
from sdpa.problem import AttentionProblem, Results


def tensors_of(B, H, Hkv, M, N, D, dtype=torch.float16):
    return [torch.randn(B, heads, rows, D).to(dtype) for heads, rows in ((H, M), (Hkv, N), (Hkv, N))]


def counted(run):
    """Bytes read and written by (kernel, buffer's name), of the dispatches of `run`."""
    with emulator.configure(checked=True):
        emulator.traffic()
        run()
        records = emulator.traffic()
    read, written = Counter(), Counter()
    for record in records:
        own = OWN[record.kernel]
        names = [f"shared {number}" for number in range(len(record.buffers) - len(own))] + list(own)
        names[:3] = "q", "k", "v"
        for number, traffic in record.buffers.items():
            read[record.kernel, names[number]] += traffic.read
            written[record.kernel, names[number]] += traffic.written
    return read, written


def forward_of(tensors, mask=None):
    inputs = build_inputs(*tensors, Options(mask, enable_gqa=True))
    return lambda: flash.forward(inputs, AttentionProblem.of(inputs, "forward", frozenset({"lse"})))


@pytest.mark.parametrize("N", [512, 4096])
def test_decoding_reads_keys_and_values_once(N):
    """Eight query heads share them; torch's kernel reads them eight times."""
    q, k, v = tensors_of(1, 8, 1, 1, N, 64)
    read, _ = counted(forward_of((q, k, v)))
    assert (read["forward", "k"], read["forward", "v"]) == (k.nbytes, v.nbytes)


@pytest.mark.parametrize("M", [32, 100])
def test_a_forward_reads_keys_once_for_each_tile_of_queries(M):
    q, k, v = tensors_of(1, 2, 2, M, 96, 64)
    read, written = counted(forward_of((q, k, v)))
    tiles = -(-M // 32)
    assert (read["forward", "k"], read["forward", "v"]) == (tiles * k.nbytes, tiles * v.nbytes)
    assert (read["forward", "q"], written["forward", "out"]) == (q.nbytes, q.nbytes)


def test_a_window_reads_what_it_sees():
    """1024 of 8192 keys: at most a sixth of what is read without a window, in the rows of its last tiles."""
    q, k, v = tensors_of(1, 1, 1, 8192, 8192, 8)
    rows = q[:, :, -256:]
    window = Mask(window=(1023, 0), align="bottom_right")
    whole, _ = counted(forward_of((rows, k, v)))
    seen, _ = counted(forward_of((rows, k, v), window))
    for name in ("k", "v"):
        assert seen["forward", name] <= whole["forward", name] / 6


# Masks under which about half of all pairs of blocks, or less, are seen by nobody, of 256 queries and keys.
HALF = torch.arange(256) // 128
SKIPPED = {
    "causal": Mask(causal=True),
    "window": Mask(window=(31, 0)),
    "lengths": Mask(lengths=torch.tensor([100], dtype=torch.int32)),
    "segments": Mask(segments=HALF[None].int()),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_hidden_blocks_are_not_read(name):
    """In either kernel of the backward, as in the forward."""
    tensors = tensors_of(1, 1, 1, 256, 256, 32)
    grad_out = torch.randn(1, 1, 256, 32).to(torch.float16)

    def both(mask):
        inputs = build_inputs(*tensors, Options(mask))
        results = flash.forward(inputs, AttentionProblem.of(inputs, "forward", frozenset({"lse"})))
        flash.backward(inputs, results, Results(grad_out, None), AttentionProblem.of(inputs, "backward"))

    whole, seen = (counted(lambda mask=mask: both(mask))[0] for mask in (None, SKIPPED[name]))
    for key in (
        ("forward", "k"),
        ("forward", "v"),
        ("backward_q", "k"),
        ("backward_kv", "q"),
        ("backward_kv", "grad_out"),
    ):
        assert seen[key] <= 0.65 * whole[key], key


@pytest.mark.parametrize("Hkv", [1, 4])
def test_a_backward_writes_each_gradient_once(Hkv):
    """And nothing but them and one number for each row."""
    tensors = tensors_of(1, 4, Hkv, 50, 70, 32)
    inputs = build_inputs(*tensors, Options(enable_gqa=True))
    results = flash.forward(inputs, AttentionProblem.of(inputs, "forward", frozenset({"lse"})))
    grad_out = torch.randn(results.out.shape).to(results.out.dtype)
    problem = AttentionProblem.of(inputs, "backward")
    _, written = counted(lambda: flash.backward(inputs, results, Results(grad_out, None), problem))
    q, k, v = tensors
    assert written["backward_q", "dq"] == q.nbytes
    assert (written["backward_kv", "dk"], written["backward_kv", "dv"]) == (k.nbytes, v.nbytes)
    assert sum(written.values()) == q.nbytes + k.nbytes + v.nbytes + results.lse.nbytes
