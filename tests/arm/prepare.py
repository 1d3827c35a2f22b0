"""What Arm is tested with: a cross compiler, an emulator, a model of the processors; an arm64 Debian with torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
WORK = ROOT / "build" / "aarch64"
SYSTEM, SITE, TREE = WORK / "system", WORK / "site", WORK / "tree"

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
MODEL, DISASSEMBLER = "llvm-mca-19", "llvm-objdump-19"
# Commands, and Debian's packages that have them.
TOOLS = {
    COMPILER: "g++-aarch64-linux-gnu",
    EMULATOR: "qemu-user-static",
    "mmdebstrap": "mmdebstrap",
    MODEL: "llvm-19",
    DISASSEMBLER: "llvm-19",
}
SUITE, PYTHON = "bookworm", "3.11"
SYSTEM_PACKAGES = (f"python{PYTHON}-minimal", f"libpython{PYTHON}-stdlib", "libgomp1", "libstdc++6")
# The oldest torch that is promised, whose wheel for AArch64 is also the only small one; what torch, the command `sdpa`
# and the tests import.
TORCH = "torch==2.10.0"
OF_TORCH = (
    "filelock",
    "typing-extensions",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "fsspec",
    "setuptools",
)
OF_SDPA = ("numpy", "pyyaml", "click", "rich", "markdown-it-py", "mdurl", "pygments")
OF_TESTS = ("pytest", "iniconfig", "pluggy", "packaging")
PYTHON_PACKAGES = (TORCH, *OF_TORCH, *OF_SDPA, *OF_TESTS)
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")

# What the tree consists of, as far as building and testing for a CPU needs it.
FOLDERS = ("sdpa", "dispatch", "kernels", "tuning_tables", "bench", "tests")
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")


class Missing(Exception):
    """Something without which Arm cannot be tested here."""


def run(*command: object, **options) -> None:
    subprocess.run([str(part) for part in command], check=True, **options)


def install_tools() -> None:
    missing = {tool: package for tool, package in TOOLS.items() if shutil.which(tool) is None}
    if not missing:
        return
    packages = sorted(set(missing.values()))
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise Missing(f"no {', '.join(missing)} (Debian's packages {' '.join(packages)})")
    quiet = {"stdout": subprocess.DEVNULL, "env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"}}
    try:
        run("apt-get", "update", "-qq", **quiet)
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages, **quiet)
    except subprocess.CalledProcessError as error:
        raise Missing(f"no {', '.join(missing)}: apt-get ended with {error.returncode}") from error


def kept(folder: Path, contents: tuple[str, ...]) -> bool:
    """Whether an earlier run has filled the folder with the same."""
    stamp = folder.with_suffix(".stamp")
    return stamp.exists() and stamp.read_text().split("\n") == list(contents)


def fill(folder: Path, contents: tuple[str, ...], *command: object) -> None:
    """Fills the folder anew by a command that downloads, unless it is there."""
    if kept(folder, contents):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        run(*command)
    except subprocess.CalledProcessError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise Missing(f"no {' '.join(contents)}: {command[0]} ended with {error.returncode}") from error
    folder.with_suffix(".stamp").write_text("\n".join(contents))


def download() -> None:
    names = ",".join(SYSTEM_PACKAGES)
    debian = ("mmdebstrap", "--quiet", "--variant=extract", "--arch=arm64", "--skip=check/qemu", f"--include={names}")
    fill(SYSTEM, (SUITE, *SYSTEM_PACKAGES), *debian, SUITE, SYSTEM)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps")
    platforms = [f"--platform={name}" for name in PLATFORMS]
    wheels = ("--only-binary=:all:", f"--python-version={PYTHON}", *platforms, "--target", SITE)
    fill(SITE, PYTHON_PACKAGES, *pip, *wheels, *PYTHON_PACKAGES)


def copy_tree() -> None:
    """The files with their times, so that objects that are up to date stay; the build links the mapped folders."""
    TREE.mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        shutil.rmtree(TREE / name, ignore_errors=True)
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, TREE / name, symlinks=True, ignore=ignored)
    for name in FILES:
        shutil.copy2(ROOT / name, TREE / name)


def build() -> None:
    """The CPU library, by the ordinary build with another compiler, against the headers of torch for AArch64."""
    copy_tree()
    environment = os.environ | {"CXX": COMPILER, "PYTHONPATH": str(SITE)}
    run(sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", cwd=TREE, env=environment)
