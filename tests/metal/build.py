"""Compiles the runtime and translated kernels with clang, once for each text, flags and shim."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHIM, RUNTIME = HERE / "shim", HERE / "runtime"
OLDEST = 17  # the first clang with arithmetic of __bf16 on x86-64
INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<metal_\w+>", re.M)
LANGUAGE = ("-std=c++20", "-fPIC", "-Wall")
# Metal rounds each operation of half and bfloat, and contracts a * b + c. Locals begin as NaN, which shows who reads
# them too early.
KERNEL_FLAGS = (
    *LANGUAGE,
    *("-Xclang", "-fbfloat16-excess-precision=none", "-Xclang", "-ffloat16-excess-precision=none"),
    *("-ffp-contract=on", "-ftrivial-auto-var-init=pattern", "-fvisibility=hidden", "-fno-math-errno"),
    *("-Wno-unknown-attributes", "-Wno-duplicate-decl-specifier", "-Wno-unused-function", "-Wno-unused-variable"),
    *("-fno-exceptions", "-fno-rtti", "-gline-tables-only", "-ferror-limit=8", "-fno-caret-diagnostics"),
)
FAST = ("-O1", "-fno-unroll-loops")
# Clang reports each access to memory as it would to its thread sanitizer, which is not there: the runtime listens.
CHECKED = (
    *(*FAST, "-fno-vectorize", "-fno-slp-vectorize", "-DEMULATOR_REPORTS_ACCESSES", "-fsanitize=thread"),
    *("-fsanitize=bounds,shift,signed-integer-overflow,integer-divide-by-zero,alignment", "-fsanitize-trap=all"),
    *("-mllvm", "-tsan-instrument-func-entry-exit=0", "-mllvm", "-tsan-instrument-read-before-write=1"),
)


class NoCompiler(RuntimeError):
    """There is no clang that is new enough."""


@functools.cache
def clang() -> str:
    if platform.machine() != "x86_64":
        raise NoCompiler(f"the Metal emulator switches threads on x86-64 only, and this is {platform.machine()}")
    for name in (*(f"clang++-{version}" for version in range(30, OLDEST - 1, -1)), "clang++"):
        path = shutil.which(name)
        if path is None:
            continue
        text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        version = re.search(r"version (\d+)", text)
        if version and int(version[1]) >= OLDEST:
            return path
    raise NoCompiler(f"the Metal emulator wants clang++ >= {OLDEST}: apt-get install clang-19")


@functools.cache
def processor() -> tuple[str, ...]:
    """Flags for the processor: without half in hardware each conversion is a call."""
    wanted = {"avx2", "fma", "f16c", "bmi2"}
    have = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    return ("-march=x86-64-v3",) if wanted <= have else ()


def cache() -> Path:
    folder = os.environ.get("SDPA_METAL_CACHE") or Path(tempfile.gettempdir()) / f"sdpa-metal-{os.getuid()}"
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)


@functools.cache
def tools() -> str:
    """What every compilation depends on besides its own text."""
    digest = hashlib.sha256(clang().encode())
    for path in sorted([*SHIM.iterdir(), *RUNTIME.iterdir(), *HERE.glob("*.py")]):
        if path.name in ("build.py", "source.py") or path.parent != HERE:
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def key(*parts: str) -> str:
    return hashlib.sha256("\0".join((tools(), *processor(), *parts)).encode()).hexdigest()[:32]


def run(arguments: list[str], text: str | None = None) -> str:
    """What clang writes; its complaints as a SyntaxError, which torch raises for Metal's too."""
    done = subprocess.run([clang(), *arguments], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SyntaxError(done.stderr.strip())
    return done.stdout


def cached(name: str, make: Callable[[Path], object]) -> Path:
    """The file `name` of the cache, by `make(path)` if it is not there."""
    path = cache() / name
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}.partial")
        make(partial)
        partial.rename(path)
    return path


def preprocessed(source: str) -> str:
    """The source with its macros expanded, without Metal's headers, and with markers of its lines."""
    text = f'# 1 "program_source"\n{INCLUDE.sub("", source)}\n'
    flags = ["-E", "-xc++", "-std=c++20", "-undef", "-D__METAL__", "-D__METAL_VERSION__=310"]
    return cached(f"text-{key(text, *flags)}.ii", lambda path: run([*flags, "-", "-o", str(path)], text)).read_text()


def lines_of(path: Path, places: list[int]) -> list[str]:
    """The lines of the source at such distances from the begin of a library, where a symbolizer is installed."""
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line-19")
    if tool is None or not places:
        return []
    asked = [tool, "-i", "-e", str(path), *map(hex, places)]
    text = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    return re.findall(r"(?:program_source|/-):(\d+)", text)


def includes() -> list[str]:
    return [f"-I{SHIM}", f"-I{RUNTIME}"]


@functools.cache
def runtime() -> Path:
    files = [str(path) for path in sorted(RUNTIME.glob("*.cpp"))]

    def make(path):
        run(
            [
                *LANGUAGE,
                *processor(),
                "-O2",
                "-shared",
                f"-I{RUNTIME}",
                *files,
                "-Wl,--no-as-needed",
                "-lm",
                "-o",
                str(path),
            ]
        )

    return cached(f"runtime-{key('runtime')}.so", make)


def link(objects: Path, path: Path) -> None:
    """Without clang, which takes longer for it than the linker."""
    linker = shutil.which("ld") or shutil.which("ld.lld-19")
    if linker is None:
        raise NoCompiler("the Metal emulator wants a linker: apt-get install binutils")
    subprocess.run([linker, "-shared", str(objects), "-o", str(path)], check=True)


def compiled(text: str, checked: bool) -> Path:
    """A library of translated kernels."""
    flags = [*KERNEL_FLAGS, *processor(), *includes()]

    def make(path):
        if checked:  # that build does not know address spaces
            run([*flags, "-fsyntax-only", "-xc++", "-"], text)
        objects = path.with_suffix(".o")
        run([*flags, *(CHECKED if checked else FAST), "-c", "-xc++", "-", "-o", str(objects)], text)
        link(objects, path)
        objects.unlink()

    return cached(f"kernels-{key(text, *KERNEL_FLAGS, *(CHECKED if checked else FAST))}.so", make)
