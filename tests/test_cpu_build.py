"""The build of the CPU library: which sources are for which family of machines, a cross compiler's included."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
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


def commands(text: str) -> dict[str, str]:
    """The command of each rule of ninja."""
    lines = text.splitlines()
    return {
        line.removeprefix("rule "): lines[number + 1].strip() for number, line in enumerate(lines) if "rule " in line
    }


def test_a_build_for_a_mac(setup, compiler):
    """Written here and run nowhere: no option of GNU's linker or of GCC, and no set of x86."""
    compiler("arm64-apple-darwin23.6.0")
    text = setup["ninja_text"](Path("torch"))
    rules = commands(text)
    for name in ("link", "link_python"):
        assert "-undefined dynamic_lookup" in rules[name]
        assert not [flag for flag in ("--", "-z,", "-ldl", "-soname", "-static") if flag in rules[name]], rules[name]
    assert "-Ltorch/lib -ltorch_cpu -Wl,-rpath,@loader_path/../../../torch/lib" in rules["link"]
    assert "-DSDPA_ARM" in rules["compile"] and "-march" not in rules["compile"]
    assert "schedule-insns" not in text and "avx" not in text and "amx" not in text and "cuda" not in text
    flags = [line.strip() for line in text.splitlines() if line.startswith("  isa =")]
    assert set(flags) == {"isa =", "isa = -march=armv8.2-a+bf16"}, "what is older than every Mac would be slower"
    assert "build kernels/cpu/libsdpa_cpu.so: link" in text, "as the loader has it"


def test_gcc_and_clang_build_for_arm(setup, compiler):
    compiler("aarch64-linux-gnu")
    neon = ROOT / "kernels/cpu/primitives_neon.cpp"
    assert setup["isa_flags"](neon) == "-fno-schedule-insns -march=armv8-a"
    setup["isa_flags"].__globals__["is_clang"] = lambda: True
    assert setup["isa_flags"](neon) == "-march=armv8-a"


@pytest.mark.parametrize(
    ("system", "target", "told"),
    [
        (
            "darwin",
            "x86_64-apple-darwin23.6.0",
            "Macs with Apple silicon, as torch is; got a compiler for x86_64-apple",
        ),
        ("win32", "x86_64-w64-mingw32", "sdpa is built on Linux and on macOS; got win32"),
    ],
)
def test_where_nothing_is_built(setup, compiler, monkeypatch, system, target, told):
    compiler(target)
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(SystemExit, match=told):
        setup["ninja_text"](Path("torch"))


def test_flags_of_the_user_stand_behind_ours(setup, compiler, monkeypatch):
    """And without them nothing changes, so that nothing is compiled again."""
    compiler("aarch64-linux-gnu")
    for variable in ("CXXFLAGS", "LDFLAGS"):
        monkeypatch.delenv(variable, raising=False)
    plain = commands(setup["ninja_text"](Path("torch")))
    monkeypatch.setenv("CXXFLAGS", "-g  -O1")
    monkeypatch.setenv("LDFLAGS", "-Lstubs")
    rules = commands(setup["ninja_text"](Path("torch")))
    assert (
        " -DSDPA_ARM -g -O1 $isa " in rules["compile"] and rules["compile"].replace(" -g -O1", "") == plain["compile"]
    )
    assert rules["link"] == f"{plain['link']} -Lstubs"
    for name in set(rules) & {"compile_python", "link_python"}:  # not there without Python's headers
        assert "-g -O1" in rules[name] or rules[name].endswith(" -Lstubs"), rules[name]


def test_messages_name_no_folder_of_the_builders(setup, compiler):
    """torch's checks name their headers, as `__FILE__`, in what users see."""
    compiler("aarch64-linux-gnu")
    assert (
        "-fmacro-prefix-map=/there/torch/include/= " in commands(setup["ninja_text"](Path("/there/torch")))["compile"]
    )


CLANG = next(filter(None, map(shutil.which, ("clang++-19", "clang++"))), "")
ARM_HEADERS = Path("/usr/aarch64-linux-gnu/include")


@pytest.mark.skipif(not CLANG, reason="no clang++ here (Debian's package clang-19)")
@pytest.mark.parametrize("name", ["primitives_scalar", "primitives_neon", "primitives_neonbf16"])
def test_the_primitives_compile_for_a_mac(setup, compiler, name, tmp_path):
    """To an object of Apple's format, by the flags of the build, without Apple's headers: of the system's, these units
    include stdint.h, which is the compiler's own, and assert.h."""
    compiler("arm64-apple-darwin23.6.0")
    source = ROOT / f"kernels/cpu/{name}.cpp"
    (tmp_path / "assert.h").write_text("#define assert(x) ((void)0)\n")
    flags = [*setup["common_flags"]().split(), *setup["isa_flags"](source).split()]
    command = [CLANG, "--target=arm64-apple-macos14", "-ffreestanding", "-isystem", tmp_path, *flags, "-O0", "-Werror"]
    done = subprocess.run(
        [*command, "-c", source, "-o", tmp_path / "object.o"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "object.o").read_bytes()[:4] == b"\xcf\xfa\xed\xfe", "64-bit Mach-O"


@pytest.mark.skipif(not (CLANG and ARM_HEADERS.exists()), reason="no clang++, or no headers of AArch64, here")
@pytest.mark.parametrize("name", ["isa", "mask", "terms", "forward", "backward"])
def test_the_rest_parses_with_clang(setup, compiler, name):
    """For Linux on AArch64, whose headers there are. Units that include torch's take long: `make test-arm` builds all,
    by GCC."""
    compiler("aarch64-linux-gnu")
    command = [CLANG, "--target=aarch64-linux-gnu", "-fsyntax-only", *setup["common_flags"]().split(), "-Werror"]
    done = subprocess.run([*command, ROOT / f"kernels/cpu/{name}.cpp"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_constants_of_operands_may_be_in_every_object():
    """GCC keeps specialisations of constants to their object, and Clang does not: without `inline` its link fails."""
    text = (ROOT / "kernels/cpu/primitives.h").read_text()
    assert re.findall(r"^(?!inline)\w* ?constexpr \w+ k\w+<", text, re.M) == []
    assert len(re.findall(r"^inline constexpr \w+ k\w+<", text, re.M)) == 5


def test_a_cross_build_leaves_cuda_out(setup, compiler, capsys, monkeypatch):
    monkeypatch.delenv("SDPA_BUILD_CUDA", raising=False)  # which says it first
    compiler("riscv64-linux-gnu")
    text = setup["ninja_text"](Path("torch"))
    assert "libsdpa_cpu.so" in text and "libsdpa_cuda.so" not in text
    assert "builds for other machines" in capsys.readouterr().out
