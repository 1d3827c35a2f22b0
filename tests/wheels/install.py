"""A wheel as a user meets it: installed into fresh venvs without a compiler, asked what is here, and checked."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from check import Failed
from packaging.requirements import Requirement

from build import WORK

MINORS = range(10, 15)  # of Python 3
OURS = "sdpa"
# What a Python without torch can tell: that every file is of its language, and that it loads what calls its C API.
WITHOUT_TORCH = """
import compileall, importlib.machinery, importlib.util, sys
from pathlib import Path
folder = Path(sys.argv[1])
assert compileall.compile_dir(folder, quiet=1), "not of this Python's language"
path = str(folder / "repeated" / "_native.abi3.so")
loader = importlib.machinery.ExtensionFileLoader("_native", path)
loader.exec_module(importlib.util.module_from_spec(importlib.util.spec_from_loader("_native", loader)))
"""


class Python(NamedTuple):
    version: str  # "3.12"
    path: Path


def candidates(version: str) -> list[Path]:
    """Where a Python may be: the path, whose shims of pyenv may refuse, and pyenv's own folders."""
    found = [path for path in (shutil.which(f"python{version}"),) if path is not None]
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    kept = sorted(root.glob(f"versions/{version}.*/bin/python{version}"))
    ours = [Path(sys.executable).resolve()] if version == own() else []
    return [*ours, *map(Path, found), *kept]


def own() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def pythons() -> tuple[list[Python], list[str]]:
    """Those that this machine has and can make venvs with, and the versions that it has not."""
    there = {}
    for version in (f"3.{minor}" for minor in MINORS):
        for path in candidates(version):
            done = subprocess.run([path, "-c", "import ensurepip, venv"], capture_output=True, check=False)
            if done.returncode == 0:
                there[version] = Python(version, path)
                break
    return list(there.values()), [f"3.{minor}" for minor in MINORS if f"3.{minor}" not in there]


def names_required(distribution: importlib.metadata.Distribution) -> list[str]:
    wanted = map(Requirement, distribution.requires or [])
    plain = [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    return [name.lower().replace("_", "-") for name in plain]


def required(by: importlib.metadata.Distribution) -> list[importlib.metadata.Distribution]:
    """The distributions that are installed here and that another one requires, down to the last."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = names_required(by)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            waiting += names_required(found[name])
    return list(found.values())


def link_torch(wheel: Path, to: Path) -> Path:
    """A folder with links to the torch that is here and to all else that a wheel requires, and to nothing more."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    (ours,) = importlib.metadata.distributions(path=[str(wheel)])
    for distribution in required(ours):
        for top in {path.parts[0] for path in distribution.files or []} - {"..", "__pycache__"}:
            if not (to / top).exists():
                (to / top).symlink_to(Path(distribution.locate_file(top)).resolve())
    return to


def run(*command: object, **environment: str) -> str:
    """What a command prints, without a compiler on the path. Raises Failed with the last line of its errors."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_", "SDPA_"))}
    done = subprocess.run(
        [str(part) for part in command], env=kept | environment, cwd=WORK, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()
        raise Failed(f"{Path(str(command[0])).name} {command[1]} ended with {done.returncode}: {said[-1]}")
    return done.stdout


def fresh(python: Python, torch: str) -> Path:
    venv = WORK / f"venv-{python.version}-{torch}"
    run(python.path, "-m", "venv", "--clear", venv)
    return venv


def site(venv: Path) -> Path:
    (found,) = venv.glob("lib/python3*/site-packages")
    return found


def pip(venv: Path, *arguments: object) -> None:
    run(venv / "bin" / "python", "-m", "pip", "-qq", "--disable-pip-version-check", "install", *arguments)


def asked(venv: Path, wheel: Path, *options: str) -> str:
    """Install, `sdpa info`, `sdpa check --quick`, with their seconds."""
    alone = {"PATH": str(venv / "bin")}
    begin = time.monotonic()
    pip(venv, *options, wheel)
    installed = time.monotonic()
    found = json.loads(run(venv / "bin" / "sdpa", "info", "--json", **alone))
    told = time.monotonic()
    libraries, versions = found["libraries"], found["versions"]
    place = str(libraries["CPU library"])
    if not place.startswith(f"loaded: {site(venv)}") or libraries["repeated calls"] != "in C++":
        raise Failed(f"sdpa info: {place}; repeated calls {libraries['repeated calls']}")
    said = run(venv / "bin" / "sdpa", "check", "--quick", **alone).splitlines()
    if not re.fullmatch(r"check: [1-9]\d* cases, 0 failed", said[-1]):
        raise Failed(said[-1])
    seconds = (installed - begin, told - installed, time.monotonic() - told)
    times = "installed in {:.1f} s, sdpa info in {:.1f} s, checked in {:.0f} s".format(*seconds)
    return f"torch {versions['torch']}: {times}: {said[-1].removeprefix('check: ')}"


def with_torch_here(python: Python, wheel: Path) -> str:
    """Offline, by the torch of .venv."""
    venv = fresh(python, "here")
    # In front, because Pythons before 3.12 give a venv a setuptools that is too old for torch.
    line = f"import sys; sys.path.insert(1, {str(link_torch(wheel, WORK / 'torch'))!r})\n"
    (site(venv) / "torch.pth").write_text(line)
    said = asked(venv, wheel, "--no-index")
    shutil.rmtree(venv)
    return said


def with_torch(python: Python, wheel: Path, torch: str) -> str:
    """With a torch of the index, 5 to 6 GB on x86-64, which go when it was tried."""
    venv = fresh(python, torch)
    try:
        try:
            pip(venv, "--no-cache-dir", f"torch=={torch}")
        except Failed as failed:
            return f"torch {torch} cannot be had: {failed}"
        return asked(venv, wheel)
    finally:
        shutil.rmtree(venv)


def without_torch(python: Python, wheel: Path) -> str:
    venv = fresh(python, "none")
    pip(venv, "--no-index", "--no-deps", wheel)
    run(venv / "bin" / "python", "-c", WITHOUT_TORCH, site(venv) / OURS)
    shutil.rmtree(venv)
    return "no torch for it here (TORCHES=2.13.0 gets one): it compiles every file and loads _native"
