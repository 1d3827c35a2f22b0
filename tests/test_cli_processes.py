"""The command `sdpa` in processes of its own: what importing costs, what is missing, what its surroundings do to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from sdpa.dispatch.device import device_of

pytestmark = pytest.mark.usefixtures("own_surroundings")
SHAPE = ("explain", "--shape", "1,8,64,64,32")


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_import_sdpa_imports_no_cli():
    names = ("click", "rich", "matplotlib", "sdpa.cli", "sdpa.bench")
    code = f"import sys, sdpa; print([name for name in {names} if name in sys.modules])"
    assert python(code).stdout.strip() == "[]"


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_its_packages_one_sentence(missing):
    done = python(f"import sys; sys.modules[{missing!r}] = None\nfrom sdpa.cli import main\nmain()")
    assert done.returncode == 1 and done.stderr.strip().count("\n") == 0
    assert "pip install click rich" in done.stderr


def command(*arguments: str, **options) -> subprocess.CompletedProcess:
    """In a process of its own, with its own standard output."""
    words = [sys.executable, "-m", "sdpa.cli", *arguments]
    return subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False, timeout=120, **options)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux'")
def test_standard_output_that_is_full():
    with Path("/dev/full").open("w") as full:
        done = command("info", stdout=full)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["sdpa: cannot write to standard output: No space left on device"]


@pytest.mark.parametrize("text", ["schema: 7\n", "entries: [\n", "- 1\n"])
def test_a_broken_table_is_one_sentence(tmp_path, text):
    path = tmp_path / f"{device_of('cpu').names[0]}.yaml"
    path.write_text(text)
    surroundings = os.environ | {"SDPA_TUNING_DIR": str(tmp_path)}
    done = command(*SHAPE, stdout=subprocess.DEVNULL, env=surroundings)
    assert done.returncode == 0 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"sdpa: tuning table {path} is ignored: ")


@pytest.mark.parametrize("variable", ["SDPA_KERNEL", "SDPA_CPU_ISA"])
@pytest.mark.parametrize("command", [("explain", "--shape", "1,2,8,8,16"), ("info",), ("info", "--json")], ids=str)
def test_a_variable_that_means_nothing_is_one_sentence(variable, command):
    words = [sys.executable, "-m", "sdpa.cli", *command]
    said = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | {variable: "abacus"})
    assert said.returncode == 2, said.stderr
    assert len(said.stderr.splitlines()) == 1 and variable in said.stderr and "abacus" in said.stderr
    assert ("known kernels: cpu_flash" if variable == "SDPA_KERNEL" else "choose from scalar") in said.stderr
    assert bool(said.stdout) == (command[0] == "info")
