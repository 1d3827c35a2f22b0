"""What accelerate leaves alone: each with its reason, and none of it changed."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from nn_helpers import CLOSE, PAD, SMALL, randn
from torch.ao.nn import quantizable
from torch.nn.utils import parametrizations, parametrize

import sdpa.nn


def quantize_dynamic(module, *arguments, **options):
    with warnings.catch_warnings():  # it is deprecated, and models that it made are there
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(module.eval(), *arguments, **options)


class Shouting(torch.nn.TransformerEncoderLayer):
    def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
        return 2 * super()._sa_block(x, attn_mask, key_padding_mask, is_causal)


def overridden():
    return Shouting(8, 2, batch_first=True, **SMALL), "is a .*Shouting, whose code may rely on torch's", ["self_attn"]


def quantizable_attention():
    module = quantizable.MultiheadAttention(8, 2, batch_first=True)
    return module, "is a torch.ao.nn.quantizable.*MultiheadAttention, whose code", []


def dynamically_quantised(of=torch.nn.TransformerEncoderLayer):
    """In the layout (L, B, E): of the other torch's own layer cannot run it."""
    module = quantize_dynamic(of(8, 2, **SMALL), {torch.nn.Linear})
    return module, "is quantised: linear1 is a torch.ao.nn.quantized.dynamic", []


class Integers(torch.nn.Module):
    """A linear layer with weights of eight bits."""

    def __init__(self, rows, columns):
        super().__init__()
        self.register_buffer("weight", torch.arange(rows * columns, dtype=torch.int8).view(rows, columns))

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) / 127)


def of_integers():
    module = torch.nn.TransformerEncoderLayer(8, 2, **SMALL)
    module.linear2 = Integers(8, 16)
    return module, "is quantised: linear2 is a .*Integers of torch.int8", []


def parametrized():
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    return parametrizations.weight_norm(module, "in_proj_weight"), "is parametrized; call accelerate before", []


def with_own_forward():
    module = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True, **SMALL)
    module.forward = lambda src, **options: 3 * torch.nn.TransformerEncoderLayer.forward(module, src, **options)
    return module, "has a forward of its own, set on the instance", ["self_attn"]


CASES = (overridden, quantizable_attention, dynamically_quantised, of_integers, parametrized, with_own_forward)


@pytest.mark.parametrize("case", CASES)
def test_what_is_left_alone_has_a_reason_and_runs(case):
    module, reason, inside = case()
    module.eval()
    x = randn(3, 5, 8)
    args = (x, x, x) if isinstance(module, torch.nn.MultiheadAttention) else (x,)
    wanted = module(*args)
    kind = type(module)
    attentions = [f"0.{name}" for name, inner in module.named_children() if type(inner) is torch.nn.MultiheadAttention]
    report = sdpa.nn.accelerate(torch.nn.Sequential(module))
    assert list(report.left) == ["0", *(name for name in attentions if name not in report.swapped)]
    assert report.swapped == [f"0.{name}" for name in inside]
    assert re.match(reason, report.left["0"])
    assert f"left 0: {report.left['0']}" in str(report) and type(module) is kind
    torch.testing.assert_close(module(*args), wanted, **CLOSE)


def test_layers_left_alone_run_in_a_stack_of_ours():
    stacks = [torch.nn.TransformerEncoder(overridden()[0], 2, enable_nested_tensor=False) for _ in range(2)]
    stacks[1].load_state_dict(stacks[0].state_dict())
    report = sdpa.nn.accelerate(stacks[1])
    assert list(report.left) == ["layers.0", "layers.1"] and "(the model)" in report.swapped
    torch.testing.assert_close(*(stack(randn(3, 5, 8), src_key_padding_mask=PAD) for stack in stacks), **CLOSE)


def test_parametrized_afterwards_stays_ours():
    module = sdpa.nn.MultiheadAttention(8, 2)
    parametrizations.weight_norm(module, "in_proj_weight")
    x = randn(5, 3, 8)
    module(x, x, x)[0].sum().backward()
    report = sdpa.nn.accelerate(module)
    assert not report.swapped and not report.left and sdpa.nn.restore(module) == []
    parametrize.remove_parametrizations(module, "in_proj_weight")
    assert sdpa.nn.restore(module) == ["(the model)"]


def test_nothing_is_computed_to_find_out():
    """A spectral norm takes a step whenever its weight is asked for in training."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, **SMALL)
    parametrizations.spectral_norm(layer.linear1)
    state = {name: t.clone() for name, t in layer.state_dict().items()}
    assert sdpa.nn.accelerate(layer).swapped == ["(the model)", "self_attn"]
    torch.testing.assert_close(dict(layer.state_dict()), state, rtol=0, atol=0)


# Quantised models


def quantised_stack(name):
    """torch's, whose layers have quantised inner products, and an input of each argument."""
    layer = getattr(torch.nn, f"{name}Layer")(8, 2, **SMALL)
    stack = getattr(torch.nn, name)(layer, 2, **({"enable_nested_tensor": False} if "Encoder" in name else {}))
    return quantize_dynamic(stack, {torch.nn.Linear}), [randn(5, 3, 8)] * (1 if "Encoder" in name else 2)


@pytest.mark.parametrize("name", ["TransformerEncoder", "TransformerDecoder"])
def test_a_quantised_stack_stays_torchs_and_is_named(name):
    stack, args = quantised_stack(name)
    kinds, wanted = [type(module) for module in stack.modules()], stack(*args)
    report = sdpa.nn.accelerate(stack)
    attentions = ["self_attn"] if "Encoder" in name else ["self_attn", "multihead_attn"]
    inside = [f"layers.{i}{tail}" for i in range(2) for tail in ("", *(f".{part}" for part in attentions))]
    assert not report.swapped and list(report.left) == ["(the model)", *inside]
    assert report.left["layers.1"].startswith("is quantised: linear1 is a torch.ao.nn.quantized.dynamic.")
    assert report.left["layers.1.self_attn"].startswith("is in a layer that is quantised: linear1 is a torch.ao.nn.")
    assert [type(module) for module in stack.modules()] == kinds and torch.equal(stack(*args), wanted)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_what_is_beside_a_quantised_stack_is_swapped():
    """A Transformer of which one half is quantised."""
    model = torch.nn.Transformer(8, 2, 1, 1, 16, 0.0).eval()
    model.encoder = quantize_dynamic(model.encoder, {torch.nn.Linear})
    x = randn(5, 3, 8)
    memory, wanted = model.encoder(x), model(x, x)
    report = sdpa.nn.accelerate(model)
    assert list(report.left) == ["(the model)", "encoder", "encoder.layers.0", "encoder.layers.0.self_attn"]
    assert type(model.decoder) is sdpa.nn.TransformerDecoder and "decoder.layers.0.multihead_attn" in report.swapped
    assert torch.equal(model.encoder(x), memory)
    torch.testing.assert_close(model(x, x), wanted, **CLOSE)


def test_attention_with_a_quantised_projection_is_left_alone():
    linear = torch.nn.modules.linear.NonDynamicallyQuantizableLinear
    config = {linear: torch.ao.quantization.default_dynamic_qconfig}
    attention = torch.nn.MultiheadAttention(8, 2)
    module = quantize_dynamic(attention, config, mapping={linear: torch.ao.nn.quantized.dynamic.Linear})
    report = sdpa.nn.accelerate(module)
    assert type(module) is torch.nn.MultiheadAttention and not report.swapped
    assert report.left["(the model)"].startswith("is quantised: out_proj is a torch.ao.nn.quantized.dynamic.")


@pytest.mark.parametrize("make,reason", [
    (lambda: torch.nn.Linear(2, 2), "Linear: it has none of torch's attention modules; functional=True answers"),
    (lambda: quantised_stack("TransformerEncoder")[0], r"TransformerEncoder: \(the model\) is quantised: "),
])  # fmt: skip
def test_that_nothing_was_reached_is_said(make, reason):
    with pytest.warns(UserWarning, match=f"^accelerate reached nothing in this {reason}"):
        sdpa.nn.accelerate(make())


@pytest.mark.parametrize("make,functional", [
    (lambda: torch.nn.MultiheadAttention(8, 2), False), (lambda: sdpa.nn.MultiheadAttention(8, 2), False),
    (lambda: torch.nn.Linear(2, 2), True),
])  # fmt: skip
def test_what_was_reached_is_no_warning(make, functional, recwarn):
    model = make()
    for _ in range(2):
        sdpa.nn.accelerate(model, functional=functional)
    assert not [warning for warning in recwarn if "reached nothing" in str(warning.message)]
