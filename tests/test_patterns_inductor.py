"""install(patterns=True) in Inductor itself: training, caches, settings, other passes."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import checkpoint
from written_out import OURS, SCALE, B, D, H, M, N, draw, inside, model, qkv, results, scored, times

import sdpa
from sdpa.patterns import hook

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inductor_trains_and_infers(installed, dtype, caplog):
    caplog.set_level(logging.INFO, "sdpa.patterns")
    x, weight = draw(B, M, H * D, dtype=dtype), draw(3 * H * D, H * D, dtype=dtype, seed=1) / 8
    mask = draw(M, M, dtype=dtype, seed=2)
    args = [x.requires_grad_(), weight.requires_grad_(), mask]
    expected = results(model, args, args[:2])
    compiled = torch.compile(model)
    sdpa.scaled_dot_product_attention(*qkv(learn=False), kernel="math")
    found = results(compiled, args, args[:2])
    assert sdpa.last_choice().problem.direction == "backward"
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 6e-2}
    torch.testing.assert_close(found, expected, **tolerance)
    with torch.no_grad(), sdpa.sdpa_kernel("vendor_cpu_flash"):
        torch.testing.assert_close(compiled(*args), expected[0], **tolerance)
    assert sdpa.last_choice().kernel.name == "vendor_cpu_flash"  # chosen where it runs
    assert caplog.text.count("1 written out") == 2  # the graph with gradients and the one without


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_activation_checkpointing(installed, p, caplog):
    """The graph of a checkpoint is one inside of another; what is dropped is the same when it is computed again."""

    def inner(q, k, v):
        return F.dropout((q @ k.transpose(-2, -1) * SCALE).softmax(-1), p) @ v

    caplog.set_level(logging.INFO, "sdpa.patterns")
    args = [*qkv()[:2], torch.eye(N).expand(B, H, N, N).clone().requires_grad_()]
    compiled = torch.compile(lambda *a: checkpoint(inner, *a, use_reentrant=False), fullgraph=True)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        out = compiled(*args)
    assert caplog.text.count("attention of sdpa in place of 1 written out") == 1
    # With one-hot values the output is the weights, and the sum over its columns is linear in what was kept.
    (grad,) = torch.autograd.grad(out.sum(), args[2])
    torch.testing.assert_close(grad, out.sum(-2).unsqueeze(-1).expand_as(grad).detach())


class Noted(CustomGraphPass):
    def __init__(self):
        self.graphs = 0

    def __call__(self, graph):
        self.graphs += 1

    def uuid(self):
        return "noted"


def run_inductor(number):
    """Compiles a graph that no cache knows, and runs it."""
    compiled = torch.compile(lambda q, k, v: times(q, k, v) + number)
    with (
        torch.no_grad(),
        config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        torch.testing.assert_close(compiled(*qkv(learn=False)), times(*qkv(learn=False)) + number)


def chosen(number):
    sdpa.scaled_dot_product_attention(*qkv(learn=False), kernel="math")
    run_inductor(number)
    return sdpa.last_choice().kernel.name


def test_uninstall_gives_back_and_keeps_a_users_pass():
    assert chosen(1.0) == "math"  # nothing of ours ran since
    with config.patch(pre_grad_custom_pass=(mine := Noted())):
        sdpa.install(patterns=True)
        assert chosen(2.0) == "cpu_flash" and mine.graphs == 1
        sdpa.install()
        sdpa.uninstall()
        assert config.pre_grad_custom_pass is not mine
        sdpa.uninstall()
        assert config.pre_grad_custom_pass is mine
        torch.compiler.reset()
        assert chosen(3.0) == "math" and mine.graphs == 2
    assert config.pre_grad_custom_pass is None


def targets_after(run):
    """What a graph calls after a pass."""
    targets = []

    def backend(module, inputs):
        run(module.graph)
        targets.extend(node.target for node in module.graph.nodes)
        return module

    torch.compiler.reset()
    torch.compile(times, backend=backend)(*qkv(learn=False))
    return targets


def test_who_replaced_the_pass_meanwhile_has_the_last_word():
    sdpa.install(patterns=True)
    ours, mine = config.pre_grad_custom_pass, Noted()
    config.pre_grad_custom_pass = mine
    sdpa.uninstall()
    assert config.pre_grad_custom_pass is mine
    config.pre_grad_custom_pass = None
    assert isinstance(ours, hook.WrittenOut)
    assert OURS in targets_after(hook.WrittenOut(None))
    assert OURS not in targets_after(ours)  # kept somewhere, it does nothing any more


def test_without_patterns_nothing_of_inductor_is_touched():
    sdpa.install()
    assert config.pre_grad_custom_pass is None
    sdpa.uninstall()


def test_the_pass_is_known_to_inductors_cache(installed):
    assert isinstance(installed, CustomGraphPass) and installed.uuid() == (hook.fingerprint(),)
    assert pickle.loads(pickle.dumps(installed)).uuid() == installed.uuid()
    assert hook.WrittenOut(Noted()).uuid() == (hook.fingerprint(), "noted")
    assert hook.WrittenOut([Noted(), Noted()]).uuid() == (hook.fingerprint(), "noted", "noted")
    assert hook.WrittenOut(print).uuid() is None


def masked(q, k, v):
    """Two masks of two dimensions, held together in float32."""
    scores = scored(q, k) + torch.zeros(M, N)
    return scores.masked_fill(torch.zeros(M, N) > 0, -1e30).softmax(-1) @ v


def folded(q, k, v):
    """Heads folded into the batch, and nothing that tells how many."""
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(dim=-1), v)


def unfolded(q, k, v):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(B, H, M, N) + torch.zeros(M, N)
    return torch.bmm(scores.view(B * H, M, N).softmax(dim=-1), v)


@pytest.mark.parametrize("function", [times, masked, folded, unfolded], ids=lambda f: f.__name__)
def test_graphs_are_found_in_autograds_cache(installed, function, caplog):
    """Those in which tensors are converted and brought into the operator's form, too."""
    caplog.set_level(logging.INFO, "sdpa.patterns")
    tensors = inside(qkv(learn=False))
    counters.clear()
    for _ in range(2):
        torch.compiler.reset()
        with torch.no_grad():
            torch.compile(function)(*tensors)
    assert "1 written out" in caplog.text
    assert counters["aot_autograd"]["autograd_cache_hit"] >= 1
    assert sdpa.last_choice().kernel.name == "cpu_flash"


def test_inductor_is_imported_by_who_asks():
    code = (
        "import sys, sdpa; sdpa.install(); loaded = lambda: any(m.startswith('torch._inductor') for m in sys.modules)\n"
    )
    code += "print(loaded(), 'sdpa.patterns' in sys.modules); sdpa.install(patterns=True); print(loaded())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]


@pytest.mark.parametrize("missing", ["torch._inductor.config", "torch._inductor.custom_graph_pass"])
def test_a_torch_without_the_hook_says_so(missing):
    code = "import sys, sdpa, torch.nn.functional as F; own = F.scaled_dot_product_attention\n"
    code += f"sys.modules[{missing!r}] = None\n"
    code += "try: sdpa.install(patterns=True)\n"
    code += "except RuntimeError as error: print(error, F.scaled_dot_product_attention is own)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(
        "install(patterns=True) needs torch._inductor.config.pre_grad_custom_pass, which torch "
    )
    assert done.stdout.endswith("does not have. True\n")
