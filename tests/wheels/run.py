"""`make wheels`: wheels and the sdist into dist/, a line for each check; its arguments are other torches to try."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import check
import install
from check import Failed

import build
from build import ARM, WORK, prepare

# auditwheel is called by functions that it does not promise to keep.
TOOLS = ("auditwheel==6.8.2", "twine==7.0.0")
PROCESSOR = "max,sve=off"  # QEMU's, with NEON and BFMMLA; torch's vectors of SVE are emulated several times slower
# In one process, because importing torch takes 15 s there.
EMULATED = """
import sys, sdpa
from sdpa import repeated
from sdpa.kernels.cpu import library
from sdpa.cli.check import check
assert library.load_error() is None, library.load_error()
assert repeated.BUILT and library.isas() == ["scalar", "neon", "neonbf16"], library.isas()
sys.exit(check.main(["--quick", "--kernel", "cpu_flash"], standalone_mode=False))
"""
failures: list[str] = []


def tell(what: str, job: Callable[..., str], *arguments: object) -> None:
    """A line with what a check found, or why it failed."""
    try:
        said = job(*arguments)
    except Failed as failed:
        failures.append(what)
        said = f"FAILED: {failed}"
    print(f"wheels: {what}: {said}", flush=True)


def made(what: str, job: Callable[[], Path]) -> Path:
    start = time.monotonic()
    path = job()
    print(f"wheels: {what}: {path.name}, {path.stat().st_size / 1e6:.2f} MB, in {time.monotonic() - start:.0f} s")
    return path


def tools() -> Path:
    """A venv with what checks wheels; it is kept, so that a later run needs no network."""
    venv, stamp = WORK / "tools", WORK / "tools.stamp"
    if stamp.exists() and stamp.read_text() == " ".join(TOOLS):
        return venv
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
    pip = [venv / "bin" / "python", "-m", "pip", "-qq", "--disable-pip-version-check", "install", *TOOLS]
    if subprocess.run(pip, check=False).returncode:
        raise SystemExit(f"wheels: cannot check wheels without {' and '.join(TOOLS)}, which pip did not get")
    stamp.write_text(" ".join(TOOLS))
    return venv


def check_file(wheel: Path) -> None:
    name = wheel.stem.split("-")[-1]
    tell(f"{name}: tag", check.tag, wheel)
    if sys.platform == "linux":
        tell(f"{name}: its symbols", check.audited, wheel, tools())
    for what, job in (("size", check.size), ("contents", check.contents), ("paths of this machine", check.no_paths)):
        tell(f"{name}: {what}", job, wheel)
    tell(f"{name}: metadata", check.described, wheel, tools())


def check_installed(wheel: Path, torches: list[str]) -> None:
    there, missing = install.pythons()
    if missing:
        print(f"wheels: Python {', '.join(missing)}: not on this machine, not checked")
    for python in there:
        what = f"Python {python.version}"
        if python.version == install.own():
            tell(what, install.with_torch_here, python, wheel)
        elif not torches:
            tell(what, install.without_torch, python, wheel)
        for torch in torches:
            tell(what, install.with_torch, python, wheel, torch)


def emulated(wheel: Path) -> str:
    """Import and `sdpa check --quick` in QEMU, with torch for AArch64, as `make test-arm` runs it."""
    unpacked = WORK / ARM / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    given = {"PYTHONPATH": f"{unpacked}:{prepare.SITE}", "PYTHONHOME": f"{prepare.SYSTEM}/usr"}
    inside = [part for name, value in given.items() for part in ("-E", f"{name}={value}")]
    python = prepare.SYSTEM / f"usr/bin/python{prepare.PYTHON}"
    start = time.monotonic()
    emulator = (prepare.EMULATOR, "-cpu", PROCESSOR, "-L", prepare.SYSTEM, *inside, python)
    said = install.run(*emulator, "-c", EMULATED).splitlines()
    seconds = time.monotonic() - start
    return f"{prepare.TORCH} in QEMU, NEON and BFMMLA, in {seconds:.0f} s: {said[-1].removeprefix('check: ')}"


def arm() -> None:
    try:
        prepare.install_tools()
        prepare.download()
    except prepare.Missing as missing:
        print(f"wheels: {ARM}: not built: {missing}")
        return
    wheel = made(ARM, build.arm_wheel)
    check_file(wheel)
    tell(f"{ARM}: Python {prepare.PYTHON}", emulated, wheel)


def whole(archive: Path, like: Path) -> str:
    """The sdist has what a wheel is built from: the files of its wheel are those of the other."""
    begin, wheel = time.monotonic(), build.wheel_of_sdist()
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(like) as other:
        files, different = len(ours.namelist()), set(ours.namelist()) ^ set(other.namelist())
    if different:
        raise Failed(f"{archive.name} gives a wheel that differs in {', '.join(sorted(different)[:3])}")
    return f"pip wheel --no-index builds the same {files} files in {time.monotonic() - begin:.0f} s"


def main(torches: list[str]) -> None:
    os.chdir(build.ROOT)
    WORK.mkdir(parents=True, exist_ok=True)
    if sys.platform == "darwin":
        print("wheels: macOS: those for Linux are built on Linux, by the same command")
        native = made("macOS", build.mac_wheel)
    else:
        print("wheels: macOS: not built here: `make wheels` on a Mac with Apple silicon makes its wheel")
        native = made(platform.machine(), build.native_wheel)
    check_file(native)
    archive = made("sdist", build.sdist)
    tell("sdist: metadata", check.described, archive, tools())
    tell("sdist: whole", whole, archive, native)
    check_installed(native, torches)
    if sys.platform == "linux" and platform.machine() != ARM:
        arm()
    if failures:
        raise SystemExit(f"wheels: failed: {'; '.join(failures)}")


if __name__ == "__main__":
    main(sys.argv[1:])
