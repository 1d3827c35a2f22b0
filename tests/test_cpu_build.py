"""The build of the CPU library: which sources are for which family of machines, a cross compiler's included."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def setup(monkeypatch):
    """The names of setup.py, which builds nothing."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    return runpy.run_path(str(ROOT / "setup.py"))


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Makes a compiler that knows nothing but what it builds for."""

    def make(target: str) -> None:
        path = tmp_path / "c++"
        path.write_text(f"#!/bin/sh\necho {target}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))

    return make


@pytest.mark.parametrize(
    ("target", "family", "sets"),
    [
        ("x86_64-linux-gnu", "X86", {"avx2", "avx512", "avx512bf16", "amx"}),
        ("aarch64-linux-gnu", "ARM", {"neon", "neonbf16"}),
        ("arm64-apple-darwin23.6.0", "ARM", {"neon", "neonbf16"}),
        ("riscv64-linux-gnu", None, set()),
    ],
)
def test_the_compiler_decides_what_is_built(setup, compiler, target, family, sets):
    compiler(target)
    assert setup["family"]() == family
    sources = sorted((ROOT / "kernels/cpu").glob("*.cpp"))
    built = {path.stem for path in sources if setup["isa_flags"](path) is not None}
    assert {name.removeprefix("primitives_") for name in built if name.startswith("primitives_")} == {"scalar", *sets}
    assert {"forward", "backward", "isa", "operators"} <= built
    macros = [flag for flag in setup["common_flags"]().split() if flag.startswith("-DSDPA_")]
    assert macros == ([f"-DSDPA_{family}"] if family else [])


def test_a_cross_build_leaves_cuda_out(setup, compiler, capsys):
    compiler("riscv64-linux-gnu")
    text = setup["ninja_text"](Path("torch"))
    assert "libsdpa_cpu.so" in text and "libsdpa_cuda.so" not in text
    assert "builds for other machines" in capsys.readouterr().out
