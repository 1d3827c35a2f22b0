"""Seeded fuzz: random problems through every able kernel against float64, and random calls of the public function.

    pytest tests/test_fuzz.py --fuzz-seed S --fuzz-cases N

A failure names the seed of its case; `--fuzz-seed S --fuzz-cases 1` repeats it alone.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sdpa.dispatch.catalog import ALL_DTYPES, KERNELS
from sdpa.testing import MASKS, Case, Draw, able, check_inputs, make_inputs, run_kernel

AVAILABLE = [kernel.name for kernel in KERNELS if kernel.unavailable() is None and kernel.serves("cpu")]
DTYPES = sorted(ALL_DTYPES, key=str)
CHUNK = 50  # cases per test: a line of progress now and then
# Of all cases this share goes through the public function, whose ranks and broadcasts kernels do not see.
PUBLIC_SHARE = 4
# Small, prime, and around the tiles of the kernels.
LENGTHS = (1, 2, 3, 5, 7, 13, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 67, 95, 97, 127, 128, 129, 131)
HEAD_SIZES = (1, 2, 3, 7, 8, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65, 80, 96, 127, 128, 129)
HUGE = 1e4  # finite in every dtype; loud wherever it leaks


def pytest_generate_tests(metafunc):
    if "seeds" in metafunc.fixturenames:
        first, cases = (metafunc.config.getoption(name) for name in ("fuzz_seed", "fuzz_cases"))
        starts = range(first, first + cases, CHUNK)
        chunks = [range(start, min(start + CHUNK, first + cases)) for start in starts]
        metafunc.parametrize("seeds", chunks, ids=[f"seed{c.start}" for c in chunks])


def random_case(rng: random.Random) -> Case:
    Hkv, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 1, 2, 3, 5))
    M, N, D = rng.choice(LENGTHS), rng.choice(LENGTHS), rng.choice(HEAD_SIZES)
    mask = rng.choice(list(MASKS))
    return Case(
        B=rng.choice((1, 2, 3)),
        H=Hkv * group,
        Hkv=Hkv,
        M=M,
        N=M if rng.random() < 0.3 else N,
        D=D,
        Dv=D if rng.random() < 0.6 else rng.choice(HEAD_SIZES),
        dtype=rng.choice(DTYPES),
        mask=mask,
        layout=rng.choice(("bhmd", "bmhd", "strided", "expanded")),
        dropout_p=rng.choice((0.0,) * 6 + (0.1, 0.5)),
        softcap=rng.choice((0.0,) * 5 + (1.5, 30.0)),
        sinks=rng.random() < 0.15,
        scale=rng.choice((None, None, None, 0.0, 0.1, 1.0, -0.5)),
        requires_bias_grad=mask.startswith("bias") and rng.random() < 0.5,
    )


def embed(tensor: Tensor, rng: random.Random) -> Tensor:
    """The same values inside of a larger tensor of HUGE ones, at an odd offset."""
    if rng.random() < 0.5 or 0 in tensor.stride():
        return tensor
    before, after = (rng.choice((0, 1, 3)) for _ in range(2))
    B, H, L, D = tensor.shape
    larger = tensor.new_full((B, H, L + before + after, D + before + after), HUGE)
    inside = larger[:, :, before : before + L, before : before + D]
    return inside.copy_(tensor)


def problems_of(seed: int):
    """(case, inputs, grad_out) of one seed."""
    rng = random.Random(seed)
    case = random_case(rng)
    inputs = make_inputs(case, seed)
    q, k, v = (embed(t, rng) for t in inputs[:3])
    return case, inputs._replace(q=q, k=k, v=v), Draw(case, seed + 1).normal(case.B, case.H, case.M, case.Dv)


def beyond_lengths(tensor: Tensor, inputs) -> Tensor:
    """HUGE values at keys that no query may see by its length."""
    hidden = torch.arange(tensor.shape[2]) >= inputs.k_lengths[:, None]
    return tensor.masked_fill(hidden[:, None, :, None], HUGE)


def hides_them(name, inputs, grad_out) -> bool:
    """Whether HUGE values beyond lengths change no bit of results and gradients."""
    loud = inputs._replace(k=beyond_lengths(inputs.k, inputs), v=beyond_lengths(inputs.v, inputs))
    quiet = inputs._replace(k=inputs.k.contiguous(), v=inputs.v.contiguous())
    runs = [run_kernel(name, given, grad_out) for given in (quiet, loud)]
    flat = [[t for part in run if part is not None for t in part if t is not None] for run in runs]
    return all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


def try_kernels(seed: int) -> list[str]:
    """What went wrong with the problem of `seed`."""
    case, inputs, grad_out = problems_of(seed)
    failures = []
    for name in AVAILABLE:
        if able(name, case):
            continue
        bad = [str(c) for c in check_inputs(name, inputs, grad_out, case.requires_bias_grad) if not c.ok]
        if inputs.k_lengths is not None and name != "vendor_math" and not hides_them(name, inputs, grad_out):
            bad.append("values beyond lengths change results")
        failures += [f"seed {seed}: {name} {case}: {text}" for text in bad]
    return failures


def test_kernels_against_float64(seeds, poisoned_memory):
    failures = [text for seed in seeds if seed % PUBLIC_SHARE for text in try_kernels(seed)]
    assert not failures, "\n".join(failures)


def batch_dims(rng: random.Random, full: list[int]) -> list[int]:
    """`full` with some dimensions 1 or left out in front, which broadcasts to it."""
    dims = [n if rng.random() < 0.7 else 1 for n in full]
    return dims[rng.choice((0, 0, 0, len(dims))) :]


def mask_shape(rng: random.Random, full: list[int]) -> list[int]:
    dims = [n if rng.random() < 0.6 else 1 for n in full]
    return dims[rng.randrange(len(dims) - 1) :]


def public_call(seed: int) -> tuple[list[Tensor], Tensor | None, dict]:
    """Tensors, mask and options of a random call of the public function."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = rng.choice(DTYPES)
    batch = [rng.choice((1, 2, 3)) for _ in range(rng.choice((0, 1, 1, 1, 2)))]
    Hkv, M, N, D = rng.choice((1, 2, 3)), rng.choice(LENGTHS), rng.choice(LENGTHS), rng.choice(HEAD_SIZES)
    gqa = rng.random() < 0.3
    H = Hkv * rng.choice((1, 2, 3)) if gqa else Hkv

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    kind, mask = rng.choice(("none", "causal", "bool", "float")), None
    leads = [batch, batch_dims(rng, batch), batch_dims(rng, batch)]
    if kind in ("none", "causal"):
        rng.shuffle(leads)  # under a mask torch wants the whole batch in the query
    Dv = D if rng.random() < 0.5 else rng.choice(HEAD_SIZES)
    shapes = zip(leads, (H, Hkv, Hkv), (M, N, N), (D, D, Dv), strict=True)
    tensors = [draw(*lead, heads, length, size) for lead, heads, length, size in shapes]
    options = {"scale": rng.choice((None, None, 0.2, 1.0, -0.3)), "enable_gqa": gqa}
    if kind == "causal":
        options["is_causal"] = True
    elif kind != "none":
        mask = draw(*mask_shape(rng, [*batch, H, M, N]))
        mask = mask > -0.5 if kind == "bool" else mask
    return tensors, mask, options


def test_calls_against_torch_in_float64(seeds, matches_torch):
    for seed in seeds:
        if seed % PUBLIC_SHARE == 0:
            tensors, mask, options = public_call(seed)
            try:
                matches_torch(*tensors, mask, **options)
            except Exception as error:
                shapes = [tuple(t.shape) for t in tensors]
                pytest.fail(f"seed {seed}: {shapes} {tensors[0].dtype} mask {None if mask is None else mask.shape} "
                            f"{options}: {error}")  # fmt: skip


def test_the_seed_is_told_where_cases_were_run_and_nowhere_else(request):
    """As at the end of `make docs`, which runs tests and none of these."""
    (hooks,) = [p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "FUZZ_SEED")]
    lines: list[str] = []
    for kind, file in (("passed", "test_site"), ("deselected", "test_fuzz"), ("passed", "test_fuzz")):
        report = SimpleNamespace(nodeid=f"tests/{file}.py::test_one[seed7]")
        reporter = SimpleNamespace(stats={kind: [report], "warnings": [object()]}, write_line=lines.append)
        hooks.pytest_terminal_summary(reporter, request.config)
        assert bool(lines) == (kind == "passed" and file == "test_fuzz")
    assert len(lines) == 1 and lines[0].startswith("fuzz: ")
