"""What holds for every wheel: an honest tag, its size, what is in it, and nothing of the machine that built it."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LARGEST = 4_000_000  # bytes
CUDA_LIBRARY = "sdpa/kernels/cuda/libsdpa_cuda.so"
CPU_LIBRARIES = ("sdpa/kernels/cpu/libsdpa_cpu.so", "sdpa/kernels/cpu/libsdpa_operators.so")
LIBRARIES = {*CPU_LIBRARIES, "sdpa/repeated/_native.abi3.so", CUDA_LIBRARY}
ENDS = (".py", ".yaml", ".metal", "/py.typed", "/ceilings.c")  # `sdpa.bench.ceilings` compiles the last one
# Folders that every machine has are no path of a builder's.
PATHS = re.compile(rb"/(?:home|root|Users|builds?|work|opt|mnt|srv)/[^\0\s\"']{3,}")


class Failed(Exception):
    """A sentence about a wheel that may not be given away."""


def contents(wheel: Path) -> str:
    """The package and its metadata, whole; no tests, no sources but Metal's."""
    with zipfile.ZipFile(wheel) as archive:
        if (broken := archive.testzip()) is not None:
            raise Failed(f"{broken} is broken")
        names = archive.namelist()
    inside = [name for name in names if ".dist-info/" not in name]
    if missing := set(CPU_LIBRARIES) - set(inside):
        raise Failed(f"{', '.join(sorted(missing))} is missing")
    strange = [n for n in inside if not n.startswith("sdpa/") or (n not in LIBRARIES and not n.endswith(ENDS))]
    strange += [name for name in inside if re.search(r"(^|/)(tests?|conftest|test_\w+)(/|\.py$)", name)]
    if strange:
        raise Failed(f"it holds {', '.join(sorted(set(strange)))}")
    there = ", ".join(Path(name).name for name in sorted(LIBRARIES & set(inside)))
    return f"{len(names)} files; {there}"


def with_cuda(wheel: Path) -> str:
    """What is published for x86-64 has the CUDA library, which a build without nvcc leaves out."""
    with zipfile.ZipFile(wheel) as archive:
        if CUDA_LIBRARY not in archive.namelist():
            raise Failed(f"{wheel.name} has no CUDA library: it was built without nvcc, or without CUTLASS")
    return "the CUDA library is there"


def size(wheel: Path) -> str:
    found = wheel.stat().st_size
    if found > LARGEST:
        raise Failed(f"{found / 1e6:.2f} MB, limit {LARGEST / 1e6:.0f} MB")
    return f"{found / 1e6:.2f} MB"


def no_paths(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        found = {path for name in libraries for path in PATHS.findall(archive.read(name))}
        found |= {ours for ours in map(bytes, (ROOT, Path(sys.prefix))) for n in libraries if ours in archive.read(n)}
    if found:
        raise Failed(f"libraries name {', '.join(sorted(path.decode(errors='replace') for path in found)[:3])}")
    return f"none in {len(libraries)} libraries"


def tag(wheel: Path) -> str:
    """The tag in the wheel's name and that in its metadata."""
    named = "-".join(wheel.stem.split("-")[2:])
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        written = re.findall(r"^Tag: (\S+)$", archive.read(metadata).decode(), re.M)
    if written != [named]:
        raise Failed(f"it is named {named}, and its metadata say {', '.join(written) or 'nothing'}")
    return named


def version_of(policy: str) -> tuple[int, ...] | None:
    """(2, 28) of manylinux_2_28_x86_64; None of a policy that promises nothing."""
    match = re.match(r"manylinux_(\d+)_(\d+)_", policy)
    return tuple(map(int, match.groups())) if match else None


def honest(promised: str, found: str) -> str:
    """The tag against what auditwheel found: a system that is no newer than was promised."""
    limit, needed = version_of(promised), version_of(found)
    if limit is None or needed is None or needed > limit or promised.split("_", 3)[3] != found.split("_", 3)[3]:
        raise Failed(f"the tag is {promised}, and by its symbols it is {found}")
    return f"auditwheel finds {found}"


def audited(wheel: Path, tools: Path) -> str:
    promised = wheel.stem.split("-")[-1]
    command = [tools / "bin" / "python", Path(__file__).with_name("audit.py"), wheel]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"auditwheel: {done.stderr.strip().splitlines()[-1]}")
    return honest(promised, done.stdout.strip())


def described(distribution: Path, tools: Path) -> str:
    command = [tools / "bin" / "python", "-m", "twine", "--no-color", "check", "--strict", distribution]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or "PASSED" not in done.stdout:
        raise Failed(f"twine: {' '.join((done.stdout + done.stderr).split())}")
    return "twine: passed"


if __name__ == "__main__":  # `make check-cuda-wheel`
    try:
        for given in sys.argv[1:]:
            print(f"wheels: {with_cuda(Path(given))}")
    except Failed as failed:
        raise SystemExit(f"wheels: {failed}") from None
