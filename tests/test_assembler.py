"""Which assembler Hopper's kernels get, and that what it makes does not lose the registers that ptxas 12.8 loses."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")

from ahead import H200, compiling_for, dump  # noqa: E402
from triton import knobs  # noqa: E402

from sdpa.kernels.triton import assembler, forward  # noqa: E402
from sdpa.kernels.triton.tiles import tiles  # noqa: E402
from sdpa.testing import Case, make_inputs, problem_of  # noqa: E402

pytestmark = pytest.mark.skipif(knobs.runtime.interpret, reason="the interpreter assembles nothing")

PLAIN, GLUON = (SimpleNamespace(is_gluon=lambda kind=kind: kind) for kind in (False, True))
# Where it was found: clipped keys and values, read by the bulk engine, share their shared memory.
CASE = Case(B=1, H=2, Hkv=1, M=67, N=131, D=40, Dv=24, mask="lengths", dtype=torch.bfloat16)
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\d+\s+)?([A-Za-z0-9_.]+)(.*?);")
CALCULATIONS = ("UIADD3", "UIADD3.X", "UIADD3.64", "UMOV")
ZERO = 63  # URZ


@pytest.fixture
def fresh():
    assembler.sound_assembler.cache_clear()
    yield
    assembler.sound_assembler.cache_clear()


def tool(version):
    return SimpleNamespace(path=f"ptxas-{version}", version=version)


@pytest.mark.parametrize("own,other,wanted", [
    ("12.8", "12.9", "ptxas-12.9"), ("12.8", "13.0", "ptxas-13.0"), ("12.9", "12.9", None), ("13.1", "12.8", None),
    ("12.8", "12.8", None), ("12.8", None, None),
])  # fmt: skip
def test_the_first_sound_one(own, other, wanted, fresh, monkeypatch):
    tools = SimpleNamespace(ptxas=tool(own), ptxas_blackwell=other and tool(other))
    monkeypatch.setattr(assembler.knobs, "nvidia", tools)
    assert assembler.assembler_for(PLAIN, "cuda", 90) == wanted


@pytest.mark.parametrize("kernel,backend,arch", [(GLUON, "cuda", 90), (PLAIN, "cuda", 80), (PLAIN, "cuda", 100),
                                                 (PLAIN, "hip", "gfx942"), (PLAIN, "interpreter", 0)])  # fmt: skip
def test_nobody_else_gets_another(kernel, backend, arch):
    assert assembler.assembler_for(kernel, backend, arch) is None


def test_the_choice_ends_with_the_launch(monkeypatch):
    before = knobs.nvidia.ptxas.path
    other = knobs.nvidia.ptxas_blackwell.path
    with pytest.raises(ValueError, match="inside"), assembler.assembling(other):
        assert knobs.nvidia.ptxas.path == other
        with assembler.assembling(other):
            pass
        assert knobs.nvidia.ptxas.path == other
        raise ValueError("inside")
    assert knobs.nvidia.ptxas.path == before


def instructions(compiled, folder):
    """[(is predicated, operation, operands)] in the order of addresses."""
    found = map(INSTRUCTION.search, dump(compiled, folder).splitlines())
    return [(bool(m[1]), m[2], m[3].strip()) for m in found if m]


def registers(text):
    return [int(n) for n in re.findall(r"\bUR(\d+)\b", text) if int(n) != ZERO]


def written(operation, operands):
    """The uniform registers that an instruction sets."""
    if not operation.startswith(("U", "R2UR", "S2UR")) or operation.startswith("UTMA"):
        return set()
    found = re.match(r"\s*UR(\d+)\b", operands)
    return set() if found is None else {int(found[1]), int(found[1]) + (".64" in operation)}


def lost(code, at, register):
    """Whether what `register` holds before instruction `at` was last set under a condition, itself or what it was
    calculated from: then it is the address of a copy, not a descriptor of shared memory."""
    for index in range(at - 1, -1, -1):
        predicated, operation, operands = code[index]
        if register not in written(operation, operands):
            continue
        if predicated or operation not in CALCULATIONS:
            return predicated
        high = ".64" in operation and register - 1 in written(operation, operands)
        return any(lost(code, index, source + high) for source in registers(operands.partition(",")[2]))
    return False


def lost_descriptors(code):
    """Products whose right-hand descriptor is lost."""
    found = []
    for at, (_, operation, operands) in enumerate(code):
        if operation.startswith("HGMMA"):
            first = int(re.search(r"gdesc\[UR(\d+)\]", operands)[1])
            found += [at] * any(lost(code, at, first + 2 + half) for half in (0, 1))
    return found


def code_for_hopper(folder):
    inputs = make_inputs(CASE)
    problem = problem_of(inputs, "forward")
    with compiling_for(H200, folder / "cache"):
        _, launches = forward.forward_launches(inputs, problem, tiles(problem)[0])
        return instructions(launches[-1].compile(), folder)


def test_no_descriptor_is_lost(tmp_path, monkeypatch):
    """And with Triton's own choice one is, as long as that is ptxas 12.8: else this module has served its time."""
    code = code_for_hopper(tmp_path)
    assert any(operation.startswith("HGMMA") for _, operation, _ in code)
    assert not lost_descriptors(code)
    if assembler.sound_assembler() is None:
        return
    monkeypatch.setattr(assembler, "sound_assembler", lambda: None)
    assert lost_descriptors(code_for_hopper(tmp_path))
