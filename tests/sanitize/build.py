"""The CPU library under AddressSanitizer and UBSan, and the process in which it can be loaded."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import setuptools

ROOT = Path(__file__).resolve().parent.parent.parent
TREE = ROOT / "build" / "sanitized"
LIBRARY = TREE / "kernels/cpu/libsdpa_cpu.so"

# The first error ends the process. Asserts of preconditions are compiled in this build alone. Warnings are the ordinary
# build's: instrumented code has many that are false.
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
INSTRUMENTED = f"-O1 -g -w -UNDEBUG {SANITIZERS}"
# An instrumented library without an instrumented program wants both loaded first: the second, because exceptions are
# intercepted, too.
PRELOADED = ("libasan.so", "libstdc++.so")
# New memory is NaN in every dtype. Leaks are looked for by the fuzzer: at the end of a process Python and torch keep so
# much that a report of it says nothing. An allocation that is too large is an exception here as without sanitizers.
ASAN = "detect_leaks=0:malloc_fill_byte=255:max_malloc_fill_size=1073741824:allocator_may_return_null=1"


def setup_names() -> dict[str, object]:
    """The names of setup.py, which builds nothing here."""
    before = setuptools.setup
    setuptools.setup = lambda **_: None
    try:
        return runpy.run_path(str(ROOT / "setup.py"))
    finally:
        setuptools.setup = before


def copy_sources() -> None:
    """With their times, so that objects stay that are up to date; AMX's tiles are those of its tests, in plain C++."""
    to = TREE / "kernels/cpu"
    to.mkdir(parents=True, exist_ok=True)
    replaced = [ROOT / "tests/sanitize/carver.h"]
    replaced += [ROOT / "tests/amx" / name for name in ("permission.cpp", "tiles.cpp", "tiles.h", "arithmetic.h")]
    taken = {path.name for path in replaced}
    sources = [path for path in (ROOT / "kernels/cpu").iterdir() if path.suffix in (".cpp", ".h")]
    wanted = [*replaced, *(path for path in sources if path.name not in taken)]
    for stale in {path.name for path in to.iterdir() if path.suffix in (".cpp", ".h")} - {path.name for path in wanted}:
        (to / stale).unlink()
    for path in wanted:
        shutil.copy2(path, to / path.name)
    # Built with the rest, and not called.
    shutil.copytree(ROOT / "kernels/cpu/standalone", to / "standalone", dirs_exist_ok=True)


def build() -> None:
    copy_sources()
    names = setup_names()
    make = names["ninja_text"].__globals__
    x86 = names["ISA_FLAGS"]["X86"]
    x86 |= {"tiles": names["AVX2"], "_amx": f"{names['AVX512BF16']} -include kernels/cpu/tiles.h"}
    make.update(
        ROOT=TREE,
        COMMON_FLAGS=f"{names['COMMON_FLAGS']} {INSTRUMENTED}",
        LINK_FLAGS=f"{SANITIZERS} {names['LINK_FLAGS']}",
        nvcc=lambda: None,
        python_text=lambda: [],  # what Python calls itself has its own tests
    )
    script = TREE / names["OBJECTS"] / "build.ninja"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(make["ninja_text"](make["torch_folder"]()))
    subprocess.run([make["ninja"](), "--quiet", "-C", TREE, "-f", script], check=True)


def environment() -> dict[str, str]:
    """What a process needs that loads the library."""
    compiler = setup_names()["cxx"]().split()
    asked = [[*compiler, f"-print-file-name={name}"] for name in PRELOADED]
    found = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() for command in asked]
    missing = [path for path in found if not Path(path).is_absolute()]
    if missing:
        raise SystemExit(
            f"fuzzing needs GCC and its sanitizers; {' '.join(compiler)} has no {' and no '.join(missing)}"
        )
    return os.environ | {"LD_PRELOAD": ":".join(found), "ASAN_OPTIONS": ASAN, "UBSAN_OPTIONS": "print_stacktrace=1"}
