"""examples/run_package.cpp: compiled once in a process, it runs packages of AOTInductor where there is no Python."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

SOURCE = Path(__file__).resolve().parent.parent / "examples" / "run_package.cpp"
# What the library of operators says of a call, behind the place in its source that torch's check tells.
SENTENCE = re.compile(r"standalone/operators\.cpp:\d+, (.*)")
SEED = 0  # the program's, of random numbers


class Refused(Exception):
    """A sentence of ours that ended the program."""


@cache
def folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


@cache
def program() -> Path:
    """The compiled program."""
    home, built = Path(torch.__file__).parent, Path(folder().name, "run_package")
    include = [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    libraries = [f"-L{home}/lib", f"-Wl,-rpath,{home}/lib,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    compiler = os.environ.get("CXX", "g++").split()
    subprocess.run([*compiler, "-std=c++20", "-w", abi, *include, SOURCE, "-o", built, *libraries], check=True)
    return built


def run_package(package: Path, tensors: Sequence[Tensor], library: str | None) -> list[Tensor]:
    """The results of a package, by a process that has the library of operators or none.

    Raises:
        Refused: our operators have said why they cannot answer.
        RuntimeError: the program ended otherwise, with what it said.
    """
    with TemporaryDirectory() as files:
        given, found = Path(files, "inputs.pt"), Path(files, "outputs.pt")
        torch.save(list(tensors), given)
        paths: list[str | Path] = [package, given, found, *([] if library is None else [library])]
        done = subprocess.run([program(), *paths], capture_output=True, text=True, check=False)
        if sentence := SENTENCE.search(done.stderr):
            raise Refused(sentence[1])
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if not line.startswith("frame #")]
            raise RuntimeError(f"the program ended with {done.returncode}: {' '.join(said)}")
        return list(torch.load(found))
