"""The examples beside the demo, made short: both ways agree, and their figures are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# What each is given to be short, and what its last line has to say.
RUNS = {
    "fine_tune_encoder.py": (("--steps", "2"), r"largest distance of the losses: (\S+)$"),
    "pack_documents.py": (("--steps", "2"), r"largest distance of the losses: (\S+)$"),
    "serve_pages.py": (("--tokens", "70"), r"same tokens: True; largest distance .* share of the largest: (\S+)$"),
    "image_blocks.py": (("--size", "16", "--rounds", "1"), "same image: True$"),
}
NEEDS = {"image_blocks.py": "diffusers"}
# Three steps move no loss further than this when only the rounding of attention differs.
CLOSE = 1e-4


@pytest.mark.parametrize("name", RUNS)
def test_both_ways_agree(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"pip install {NEEDS[name]}")
    arguments, wanted = RUNS[name]
    command = [sys.executable, EXAMPLES / name, *arguments]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # other tests run beside it
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=alone)
    assert done.returncode == 0, done.stderr
    found = re.search(wanted, done.stdout.strip())
    assert found, done.stdout
    assert not found.groups() or float(found[1]) < CLOSE
    assert "swapped" in done.stdout or "accelerate" not in (EXAMPLES / name).read_text()
    assert len(re.findall(r"/s +\d+\.\d\d x$", done.stdout, re.M)) == 2  # a line for each way


def test_a_row_in_parts_learns_as_a_whole_one():
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [EXAMPLES / "long_context.py", "--steps", "2", "--documents", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=alone, timeout=240)
    assert done.returncode == 0, done.stderr
    found = re.search(r"largest distance of the losses from one process: (\S+)$", done.stdout.strip())
    assert found and float(found[1]) < 1e-5, done.stdout


# Examples that need a package beside torch.
PACKAGES = {
    "image_blocks.py": "diffusers",
    "diffusers_unet.py": "diffusers",
    "transformers_generate.py": "transformers",
    "timm_vit.py": "timm",
}


@pytest.mark.parametrize("name", PACKAGES)
def test_without_its_package_one_sentence(name):
    package, path = PACKAGES[name], EXAMPLES / name
    done = without(package, f"sys.path[0] = {str(EXAMPLES)!r}; runpy.run_path({str(path)!r}, run_name='__main__')")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith(f"this example needs {package}") and f"pip install {package}" in done.stderr


@pytest.mark.parametrize("package", ["diffusers", "transformers"])
def test_an_integration_without_its_package(package):
    done = without(package, f"import sdpa.integrations.{package}")
    assert done.stderr.count("Traceback") == 1
    told = f"ModuleNotFoundError: sdpa.integrations.{package} needs {package}: pip install {package}"
    assert done.stderr.splitlines()[-1] == told


def without(package, code):
    """`code` in a process where `package` cannot be imported."""
    blocked = f"import runpy, sys; sys.modules[{package!r}] = None; {code}"
    return subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("name", "option", "value", "told"),
    [
        ("serve_pages.py", "--tokens", "-4", "expected a whole number of at least 1, got -4"),
        ("fine_tune_encoder.py", "--device", "nowhere", "expected a device that torch can use here, got nowhere"),
        ("pack_documents.py", "--device", "cuda:99", "expected a device that torch can use here, got cuda:99"),
    ],
)
def test_wrong_arguments_of_examples_are_told(name, option, value, told):
    command = [sys.executable, EXAMPLES / name, option, value]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.endswith(f"argument {option}: {told}\n"), done.stderr


@pytest.mark.parametrize("name", ["long_context.py", "tensor_parallel.py"])
def test_what_wants_torchrun_says_so(name):
    alone = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"}
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, check=False, env=alone)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.endswith(f"expected torchrun to start it: torchrun --nproc-per-node 2 examples/{name}\n")


def test_ranks_that_are_no_groups_are_told():
    command, alone = [sys.executable, EXAMPLES / "tensor_parallel.py"], os.environ | {"WORLD_SIZE": "3"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=alone)
    assert done.returncode == 2 and done.stderr.endswith("expected --tensor to divide 3 processes, got 2\n")


def test_every_example_is_in_a_test():
    tested = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert path.name in tested or path.stem in ("gpt", "report", "timing", "training"), path.name
