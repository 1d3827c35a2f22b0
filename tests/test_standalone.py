"""The operators of programs without Python: beside Python's own, and in a C++ program that runs a package."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

import sdpa
from helpers import CLOSE, draw
from sdpa import Mask, standalone
from sdpa.bench.cpp_program import Refused, run_package

B, H, M, N, D = 2, 4, 5, 7, 8
NAMES = ("attention_forward", "attention_backward", "attention_weights")
SETTING = "cpu_flash"
# A process without sdpa: calls what it reads, and writes results or what was raised.
CALLER = """
import sys, torch
library, given, found = sys.argv[1:]
torch.ops.load_library(library)
results = []
for name, args, options in torch.load(given):
    if name.startswith("schema of "):
        results.append(str(getattr(torch.ops.sdpa, name[len("schema of "):]).default._schema))
        continue
    try:
        results.append(getattr(torch.ops.sdpa, name)(*args, **options))
    except RuntimeError as error:
        results.append(str(error))
assert not any(module == "sdpa" or module.startswith("sdpa.") for module in sys.modules)
torch.save(results, found)
"""


@pytest.fixture
def without_sdpa(tmp_path):
    """Operators by name in a process that has the library and not our Python."""

    def run(*calls):
        given, found = tmp_path / "given.pt", tmp_path / "found.pt"
        torch.save(calls, given)
        command = [sys.executable, "-c", CALLER, sdpa.operators_library(), given, found]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return torch.load(found)

    return run


def qkv(**options):
    return tuple(
        draw(B, heads, rows, D, seed=seed, **options) for seed, heads, rows in ((0, H, M), (1, 2, N), (2, 2, N))
    )


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def heads_inside(tensor):
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


FEATURES = {
    "plain": {},
    "band": {"left": 2, "right": 1, "bottom_right": True},
    "lse": {"needs_lse": True},
    "bias": {"bias": draw(B, H, M, N, seed=5), "needs_lse": True},
    "allowed": {"allowed": draw(B, 1, M, N) > -0.5},
    "lengths": {"q_lengths": int32(3, 5), "k_lengths": int32(0, 6), "needs_lse": True},
    "segments": {"q_segments": int32(*range(B * M)).view(B, M) % 3, "k_segments": int32(*range(B * N)).view(B, N) % 3},
    "prefix": {"right": 0, "prefix": int32(2, 4)},
    "alibi": {"alibi": torch.rand(1, H)},
    "sinks and softcap": {"sinks": draw(H), "softcap": 2.0, "needs_lse": True},
    "dropout": {"dropout_p": 0.4, "rng": torch.tensor([5, 6])},
    "families": {"setting": "math,flash;p"},
    "flash switched on": {"setting": "flash;t1"},
}
TENSORS = {
    "float64": qkv(),
    "bfloat16": qkv(dtype=torch.bfloat16),
    "heads inside": tuple(map(heads_inside, qkv())),
    "no queries": (draw(B, H, 0, D), *qkv()[1:]),
    "no keys": (qkv()[0], draw(B, 2, 0, D), draw(B, 2, 0, 3)),
}


def same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        torch.testing.assert_close(a, b, **CLOSE)


def test_schemas_are_those_of_python(without_sdpa):
    found = without_sdpa(*((f"schema of {name}", (), {}) for name in NAMES))
    assert found == [str(getattr(torch.ops.sdpa, name).default._schema) for name in NAMES]


def test_forward_and_backward_are_those_of_python(without_sdpa):
    """The same kernel with the same arguments, so the same bits, in the same memory order."""
    calls = [("attention_forward", (*tensors, 0.3), {"needs_lse": True}) for tensors in TENSORS.values()]
    calls += [("attention_forward", (*TENSORS["float64"], 0.3), options) for options in FEATURES.values()]
    calls.append(("attention_forward", (*TENSORS["no keys"], 0.3), {"sinks": draw(H), "needs_lse": True}))
    with sdpa.sdpa_kernel(SETTING):
        expected = [getattr(torch.ops.sdpa, name)(*args, **options) for name, args, options in calls]
        gradients = []
        for (_, args, options), (out, lse) in zip(calls, expected, strict=True):
            if lse.numel():
                mask = {name: value for name, value in options.items() if name != "needs_lse"}
                mask |= {"bias_grad": "bias" in mask, "grad_lse": draw(*lse.shape).to(lse.dtype)}
                gradients.append(("attention_backward", (draw(*out.shape).to(out.dtype), out, lse, *args), mask))
        assert len(gradients) >= 7
        expected += [getattr(torch.ops.sdpa, name)(*args, **options) for name, args, options in gradients]
    for found, wanted in zip(without_sdpa(*calls, *gradients), expected, strict=True):
        same(found, wanted)


@pytest.mark.parametrize("setting", ["math;f", "efficient,cudnn", "vendor_cpu_flash;f", ";t4", "flash;t14"])
def test_another_kernel_is_refused(without_sdpa, setting):
    (said,) = without_sdpa(("attention_forward", (*qkv(), 0.3), {"setting": setting}))
    assert f'exported for "{setting}", and a program without Python has cpu_flash alone; export the program' in said


def test_what_no_cpu_can_is_refused(without_sdpa):
    tensors, out = qkv(), draw(B, H, M, D)
    lse, meta = draw(B, H, M), [t.to("meta") for t in tensors]
    weights, packed, forward, backward, made = without_sdpa(
        ("attention_weights", (lse, *tensors, 0.3), {}),
        ("attention_forward", (*tensors, 0.3), {"cu_q": int32(0, M), "cu_k": int32(0, N), "max_q": M, "max_k": N}),
        ("attention_forward", (*meta, 0.3), {}),
        ("attention_backward", (out.to("meta"), out.to("meta"), lse.to("meta"), *meta, 0.3), {}),
        ("attention_weights", (lse.to("meta"), *meta, 0.3), {}),
    )
    assert "attention_weights (need_weights=True) has no kernel in a program without Python; export" in weights
    assert "was exported for a GPU, and a program without Python runs on a CPU; export" in packed
    for said in (forward, backward, made):
        assert "attention of sdpa runs on a CPU alone in a program without Python; export" in said


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_python_answers_where_it_comes_first():
    code = f"""import torch, sdpa
torch.ops.load_library({sdpa.operators_library()!r})
q = torch.randn(1, 2, 8, 4)
torch.ops.sdpa.attention_forward(q, q, q, 0.5, setting="math;f")
print(sdpa.last_choice().kernel.name)"""
    done = python(code)
    assert done.stdout.split() == ["math"], done.stderr


def test_python_says_so_where_it_comes_second():
    done = python(f"import torch\ntorch.ops.load_library({sdpa.operators_library()!r})\nimport sdpa")
    assert done.returncode == 1
    assert "ImportError: operators of sdpa are registered already: import sdpa before this process" in done.stderr


def test_library_that_was_not_built(monkeypatch, tmp_path):
    monkeypatch.setattr(standalone, "OPERATORS", tmp_path / "libsdpa_operators.so")
    with pytest.raises(RuntimeError, match=r"was not built: .*libsdpa_operators\.so does not exist"):
        sdpa.operators_library()


class Model(torch.nn.Module):
    """Attention with a mask that lasts, packed documents, and a call that may ask for a kernel."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, q, k, v, lengths, rows, cu):
        out = sdpa.scaled_dot_product_attention(q, k, v, Mask(causal=True, lengths=lengths), softcap=3.0)
        packed = sdpa.varlen_attention(rows, rows, rows, cu, cu, 5, 5, is_causal=True)
        return out.exp(), packed, sdpa.scaled_dot_product_attention(out, k, v, kernel=self.kernel)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    def make(kernel):
        given = draw(B, H, M, D), draw(B, H, M, D, seed=1), draw(B, H, M, D, seed=2), torch.tensor([2, M])
        given = *given, draw(8, H, D), int32(0, 3, 8)
        with torch.no_grad():
            program = torch.export.export(Model(kernel), given)
            path = tmp_path_factory.mktemp("package") / "package.pt2"
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
            return path, given, Model(kernel)(*given)

    return make


def test_a_cpp_program_runs_packages(package):
    path, given, expected = package(None)
    assert b"sdpa::attention_forward" in path.read_bytes()
    found = run_package(path, given, sdpa.operators_library())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    assert not math.isnan(found[0].sum())
    with pytest.raises(RuntimeError, match="Could not find schema for sdpa::attention_forward"):
        run_package(path, given, None)


def test_a_cpp_program_is_told_what_to_do(package):
    path, given, _ = package("math")
    with pytest.raises(Refused, match=r'"math;f", and .* export the program under sdpa\.decomposed\(\)'):
        run_package(path, given, sdpa.operators_library())
