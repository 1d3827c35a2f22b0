"""Tensor-parallel plans: what ranks share is what one process computes, and its state loads on one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import plan_cases as cases
import pytest
from ranks import run


def test_attentions_and_layers():
    """Results, gradients, states, what is sent, generation, checkpointing, losses of training, and what is refused."""
    run(2, cases.ours)


def test_blocks_of_transformers():
    pytest.importorskip("transformers")
    run(2, cases.theirs)


def test_training_on_two_dimensions():
    """Tensor parallelism beside FSDP2, whose ranks have parts of parameters, or copies."""
    run(4, cases.curves, [(1, 2, 2), (2, 1, 2)])


def test_the_example():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [Path(__file__).parent.parent / "examples/tensor_parallel.py", "--steps", "2"]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=alone, timeout=240)
    assert done.returncode == 0, done.stderr
    found = re.search(r"largest distance of the losses from one process: (\S+)$", done.stdout.strip())
    assert found and float(found[1]) < 1e-5, done.stdout
    assert "data x tensor 1 x 2: each rank has 59%" in done.stdout, done.stdout
