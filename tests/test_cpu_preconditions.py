"""Preconditions of the CPU's primitives: asserts that end a process, and that the ordinary library does without."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "kernels/cpu"
SIGABRT = 6
FINE = "all hold"
LIBRARY = SOURCES / "libsdpa_cpu.so"
FAILS = b"__assert_fail"  # what glibc's assert calls


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    made = tmp_path_factory.mktemp("preconditions") / "program"
    sources = (ROOT / "tests/preconditions_host.cpp", SOURCES / "primitives_scalar.cpp")
    subprocess.run(["g++", "-std=c++17", "-O1", "-w", f"-I{SOURCES}", *sources, "-o", made], check=True)
    return made


def outcome(program: Path, case: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, case], capture_output=True, text=True, check=False)


def test_each_precondition_is_asserted(program):
    cases = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert FINE in cases and len(cases) > 10
    assert outcome(program, FINE).returncode == 0, outcome(program, FINE).stderr
    for case in set(cases) - {FINE}:
        said = outcome(program, case)
        assert said.returncode == -SIGABRT and "Assertion" in said.stderr, (case, said)


def test_the_ordinary_library_has_no_asserts(monkeypatch):
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    assert "-DNDEBUG" in runpy.run_path(str(ROOT / "setup.py"))["common_flags"]().split()
    if not LIBRARY.exists():
        pytest.skip("the library was not built")
    assert FAILS not in LIBRARY.read_bytes()
