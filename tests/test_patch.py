"""sdpa.patch, install and uninstall: what is reached, what is given back, nesting, threads, models."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

import helpers
import sdpa
from sdpa.patch import ROUTING

TORCHS = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def given_back():
    yield
    assert F.scaled_dot_product_attention is TORCHS


@pytest.fixture
def qkv():
    return helpers.qkv(H=4, M=16, N=16)


@pytest.fixture
def user_module():
    """A module that did `from torch.nn.functional import scaled_dot_product_attention as attend`."""
    module = ModuleType("somebody_elses_model")
    module.attend = TORCHS
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_patch_replaces_and_restores(user_module):
    with sdpa.patch():
        assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
        assert torch.nn.functional.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
        assert user_module.attend is sdpa.scaled_dot_product_attention
    assert user_module.attend is TORCHS


def test_our_modules_that_mean_torchs_keep_the_original(qkv):
    """By it they tell torch's function from ours, in the masks' refusal among others."""
    kept = [F.scaled_dot_product_attention]
    with sdpa.patch():
        ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "sdpa"]
        assert {vars(module)["TORCHS"] for module in ours if callable(vars(module).get("TORCHS"))} == set(kept)
        query = qkv[0].as_subclass(type("Own", (torch.Tensor,), {}))
        with pytest.raises(TypeError, match="pass it to sdpa"):
            kept[0](query, *qkv[1:], sdpa.Mask(causal=True))


def test_torchs_override_tables_keep_the_original():
    original = TORCHS  # the patch replaces this module's own name, too
    torch.overrides.get_testing_overrides.cache_clear()
    torch.overrides.get_testing_overrides()
    with sdpa.patch():
        assert original in torch.overrides.get_testing_overrides()


def test_a_graph_that_is_first_traced_under_the_patch_leaves_the_original_overridable():
    """What the compiler takes for overridable is read from torch.nn.functional when the first graph is traced."""
    code = """
import sdpa, torch, torch.nn.functional as F
from sdpa.patch import ROUTING
from torch._dynamo.testing import EagerAndRecordGraphs

q = torch.ones(1, 2, 8, 16)
with sdpa.patch():
    torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend="eager", fullgraph=True)(q)
recorded = EagerAndRecordGraphs()
with ROUTING:
    torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend=recorded, fullgraph=True)(q)
assert any("attention_forward" in str(node.target) for node in recorded.graphs[0].graph.nodes)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_nesting_and_exceptions(user_module):
    with pytest.raises(KeyError), sdpa.patch():
        with sdpa.patch():
            pass
        assert user_module.attend is sdpa.scaled_dot_product_attention
        raise KeyError
    assert user_module.attend is TORCHS


def test_install_and_uninstall_count():
    sdpa.install()
    sdpa.install()
    sdpa.uninstall()
    assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
    sdpa.uninstall()
    assert F.scaled_dot_product_attention is TORCHS
    sdpa.uninstall()
    assert F.scaled_dot_product_attention is TORCHS


def test_block_inside_install_does_not_uninstall():
    sdpa.install()
    with sdpa.patch():
        pass
    assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
    sdpa.uninstall()


def test_somebody_elses_later_patch_is_left_alone(user_module):
    def theirs():
        pass

    with sdpa.patch():
        user_module.attend = theirs
    assert user_module.attend is theirs


def test_a_block_like_the_last_looks_through_no_modules(user_module, monkeypatch):
    """Training enters one for each step, and beside transformers there are thousands of modules."""
    with sdpa.patch():
        pass
    looked = []
    monkeypatch.setattr(sys.modules["sdpa.patch"], "references", lambda: looked.append(True))
    with sdpa.patch():
        assert user_module.attend is sdpa.scaled_dot_product_attention
    assert user_module.attend is TORCHS and not looked
    with sdpa.patch():
        pass
    assert helpers.python_calls(lambda: sdpa.patch().__enter__()) < 20
    sdpa.uninstall()


@pytest.mark.parametrize("change", ["a name more", "a name of before", "a module more", "one for another"])
def test_a_block_reaches_what_came_after_the_last(user_module, monkeypatch, change):
    user_module.other = None
    with sdpa.patch():
        pass
    module = user_module
    if change in ("a name more", "a name of before"):
        setattr(module, {"a name more": "late", "a name of before": "other"}[change], TORCHS)
    else:
        module = ModuleType("came_later")
        module.attend = TORCHS
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if change == "one for another":
            del user_module.attend
    names = [name for name, value in vars(module).items() if value is TORCHS]
    with sdpa.patch():
        assert all(getattr(module, name) is sdpa.scaled_dot_product_attention for name in names) and names
    assert all(getattr(module, name) is TORCHS for name in names)


def test_without_exact_counts_every_block_looks(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    looked = []
    monkeypatch.setattr(sys.modules["sdpa.patch"], "references", lambda: looked.append(True) or [])
    for _ in range(2):
        with sdpa.patch():
            pass
    assert len(looked) == 2


def test_overlapping_blocks_of_two_threads():
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with sdpa.patch():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    with sdpa.patch():
        thread.start()
        assert entered.wait(10)
    assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
    leave.set()
    thread.join(10)
    assert F.scaled_dot_product_attention is TORCHS


def test_many_threads_at_once():
    def enter_and_leave():
        for _ in range(50):
            with sdpa.patch():
                assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention

    threads = [threading.Thread(target=enter_and_leave) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


def test_every_kernel_runs_under_the_patch_without_recursion(qkv):
    expected = F.scaled_dot_product_attention(*qkv)
    for name in ("cpu_flash", "vendor_cpu_flash", "vendor_math", "math"):
        with sdpa.patch(), sdpa.sdpa_kernel(name):
            torch.testing.assert_close(F.scaled_dot_product_attention(*qkv), expected)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.ones(16, 16).tril()}])
def test_same_values_as_torch(qkv, options):
    expected = F.scaled_dot_product_attention(*qkv, **options)
    with sdpa.patch():
        torch.testing.assert_close(F.scaled_dot_product_attention(*qkv, **options), expected)


def test_causal_bias_reaches_us(qkv):
    q, k, v = qkv
    bias = causal_lower_right(8, 16)
    expected = F.scaled_dot_product_attention(q[..., :8, :], k, v, bias)
    with sdpa.patch():
        torch.testing.assert_close(F.scaled_dot_product_attention(q[..., :8, :], k, v, bias), expected)


def test_multihead_attention_trains_through_us():
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 10, 32)
    expected = torch.autograd.grad(layer(x, x, x, need_weights=False)[0].square().sum(), layer.in_proj_weight)
    with sdpa.patch(), sdpa.sdpa_kernel("cpu_flash"):
        out = layer(x, x, x, need_weights=False)[0]
        assert sdpa.last_choice().kernel.name == "cpu_flash"
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), layer.in_proj_weight), expected)


def test_a_compiled_function_is_traced_through_us(qkv):
    def model(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with sdpa.patch():
        torch.testing.assert_close(compiled(*qkv), TORCHS(*qkv))


def test_import_alone_patches_nothing():
    code = (
        "import torch.nn.functional as F; before = F.scaled_dot_product_attention; import sdpa; "
        "assert F.scaled_dot_product_attention is before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class VisionAttention(torch.nn.Module):
    """timm's attention of a vision transformer: one projection, norms of q and k, fused or written out."""

    def __init__(self, fused):
        super().__init__()
        self.fused, self.heads = fused, 3
        self.qkv, self.proj = torch.nn.Linear(24, 72), torch.nn.Linear(24, 24)
        self.q_norm, self.k_norm = torch.nn.LayerNorm(8), torch.nn.LayerNorm(8)

    def forward(self, x, attn_mask=None):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=0.0)
        else:
            scores = q * 8**-0.5 @ k.transpose(-2, -1)
            x = (scores if attn_mask is None else scores + attn_mask).softmax(dim=-1) @ v
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


@pytest.mark.parametrize("masked", [False, True])
def test_a_vision_transformers_attention(masked):
    """197 positions: 14 x 14 patches and the class."""
    torch.manual_seed(0)
    layer, written_out = VisionAttention(fused=True), VisionAttention(fused=False)
    written_out.load_state_dict(layer.state_dict())
    x, mask = torch.randn(2, 197, 24), torch.randn(1, 3, 197, 197) if masked else None

    def result(module):
        out = module(x, mask)
        return out, torch.autograd.grad(out.square().mean(), list(module.parameters()))

    expected = result(written_out)
    with sdpa.patch(), sdpa.sdpa_kernel("cpu_flash"):
        found = result(layer)
        assert sdpa.last_choice().kernel.name == "cpu_flash"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_example_with_timm_runs_or_says_what_is_missing():
    path = Path(__file__).parents[1] / "examples/timm_vit.py"
    run = subprocess.run([sys.executable, str(path)], check=False, capture_output=True, text=True)
    assert "same logits: True" in run.stdout or run.stderr.startswith("this example needs timm and a torchvision")


def test_routing_is_of_one_thread_and_reaches_references_kept_elsewhere(qkv):
    kept, chosen = [TORCHS], {}

    def attend(name):
        sdpa.scaled_dot_product_attention(*qkv, kernel="math")
        torch.testing.assert_close(kept[0](*qkv), TORCHS(*qkv))
        chosen[name] = sdpa.last_choice().kernel.name

    with ROUTING, sdpa.sdpa_kernel("cpu_flash"):
        attend("here")
        thread = threading.Thread(target=attend, args=["elsewhere"])
        thread.start()
        thread.join(10)
    assert chosen == {"here": "cpu_flash", "elsewhere": "math"}


@pytest.mark.parametrize("grad", [True, False])
def test_routing_reaches_into_torchs_multihead_attention(grad):
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True).train(grad)
    x = torch.randn(2, 10, 32)
    expected = layer(x, x, x, need_weights=False)[0]
    with torch.set_grad_enabled(grad), ROUTING, sdpa.sdpa_kernel("cpu_flash"):
        torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], expected)
        assert sdpa.last_choice().kernel.name == "cpu_flash"
