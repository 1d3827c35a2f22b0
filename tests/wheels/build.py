"""Makes the distributions in copies of the tree, with the objects that its ordinary builds have compiled."""

from __future__ import annotations

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import fatbin
import glibc
import setuptools

ROOT = Path(__file__).resolve().parent.parent.parent
WORK, OUT = ROOT / "build" / "wheelhouse", ROOT / "dist"
OBJECTS = "build/native"
sys.path.insert(0, str(ROOT / "tests" / "arm"))

import prepare  # noqa: E402

PLATFORM = "manylinux_2_28"
ARM = "aarch64"
NOT_COPIED = ("build", "dist", "__pycache__")
SHOWN = 40  # of pip's last lines, where a build failed
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def setup_names() -> dict:
    """The names of setup.py, which builds nothing here."""
    before = setuptools.setup
    setuptools.setup = lambda **_: None
    try:
        return runpy.run_path(str(ROOT / "setup.py"))
    finally:
        setuptools.setup = before


def ignored(folder: str, names: list[str]) -> set[str]:
    """Nothing that was built, no links to what is mapped, and no hidden files but the one that formats C++."""
    paths = {name: Path(folder, name) for name in names}
    built = {name for name in names if name.endswith((".so", ".egg-info")) or name in NOT_COPIED}
    links = {name for name, path in paths.items() if path.is_symlink()}
    return built | links | {name for name in names if name.startswith(".") and name != ".clang-format"}


def copy_tree(to: Path, built: Path | None) -> Path:
    """The tree with the times of its files, and objects of a build, so that what is up to date stays."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(ROOT, to, ignore=ignored)
    if built is not None:
        shutil.copytree(built, to / OBJECTS)
    return to


def pip_wheel(tree: Path, to: Path, *options: str, **environment: str) -> Path:
    """The wheel of a tree, built without an index."""
    shutil.rmtree(to, ignore_errors=True)
    command = (*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(to), *options)
    done = subprocess.run(
        [*command, str(tree)], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-SHOWN:])
        raise SystemExit(f"wheels: failed: no wheel of {tree}: {said}")
    (made,) = to.glob("*.whl")
    return made


def deliver(made: Path) -> Path:
    OUT.mkdir(exist_ok=True)
    return Path(shutil.copy2(made, OUT / made.name))


def compress_cuda(tree: Path, names: dict) -> None:
    compiler = names["nvcc"]()
    objects = sorted((tree / OBJECTS / "cuda").glob("flash_*.o"))
    if compiler is None or not objects:
        return
    architecture = re.search(r"code=sm_(\w+)", names["CUDA_FLAGS"])[1]
    tool = names["cuda_home"](compiler) / "bin" / "fatbinary"
    for path in objects:
        fatbin.compress(path, tool, architecture)


def linux_wheel(machine: str, compiler: str, built: Path, **environment: str) -> Path:
    """One for manylinux: the objects are those of the ordinary build, the libraries are linked with stubs."""
    folder = WORK / machine
    tree = copy_tree(folder / "tree", built)
    compress_cuda(tree, setup_names())
    flags = f"{os.environ.get('LDFLAGS', '')} {glibc.make(compiler, folder / 'stubs')} -s".strip()
    tag = f"--config-settings=--build-option=--plat-name={PLATFORM}_{machine}"
    return deliver(pip_wheel(tree, folder / "made", tag, LDFLAGS=flags, **environment))


def native_wheel() -> Path:
    return linux_wheel(platform.machine(), setup_names()["cxx"](), ROOT / OBJECTS)


def arm_wheel() -> Path:
    """By the cross compiler, as `make test-arm` builds."""
    prepare.build()
    environment = {"CXX": prepare.COMPILER, "PYTHONPATH": str(prepare.SITE)}
    return linux_wheel(ARM, prepare.COMPILER, prepare.TREE / OBJECTS, **environment)


def mac_wheel() -> Path:
    return deliver(pip_wheel(copy_tree(WORK / "mac" / "tree", ROOT / OBJECTS), WORK / "mac" / "made"))


def sdist() -> Path:
    """The source distribution; what it lacks would show in the wheel that is built from it alone."""
    folder = WORK / "sdist"
    tree, made, unpacked = copy_tree(folder / "tree", None), folder / "made", folder / "unpacked"
    for stale in (made, unpacked):
        shutil.rmtree(stale, ignore_errors=True)
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, made], cwd=tree, check=True, capture_output=True)
    (archive,) = made.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(unpacked, filter="data")
    return deliver(archive)


def wheel_of_sdist() -> Path:
    """With the objects of this checkout: ninja compiles again where a file differs, and fails where one is missing."""
    (tree,) = (WORK / "sdist" / "unpacked").iterdir()
    shutil.copytree(ROOT / OBJECTS, tree / OBJECTS)
    return pip_wheel(tree, WORK / "sdist" / "wheel")
