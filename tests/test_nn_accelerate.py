"""accelerate and restore: what a model, its optimizer, its files and those who wrap it see of the swap."""

from __future__ import annotations

import copy
import inspect
import io
import re

import pytest
import torch
import torch.nn.functional as F
from nn_helpers import CAUSAL, CLOSE, PAD, SMALL, built, decoders, encoders, randn, rows_of
from torch.ao.nn import quantizable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize

import sdpa
import sdpa.nn
from sdpa.nn.accelerate import OURS, TORCHS

ENCODER = ["layers.0", "layers.0.self_attn", "layers.1", "layers.1.self_attn"]


def is_routed():
    """Whether what is called as torch's function changes our last choice."""
    x = torch.zeros(1, 1, 2, 4)
    sdpa.scaled_dot_product_attention(x, x, x, kernel="math")
    F.scaled_dot_product_attention(x, x, x)
    return sdpa.last_choice().kernel.name != "math"


class Model(torch.nn.Module):
    """An encoder in the middle, a buffer, tied weights, and an attention called as a function."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(11, 8)
        layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True, **SMALL)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.seen = []

    def forward(self, tokens, mask=None, fail=False):
        self.seen.append(is_routed())
        x = self.encoder(self.embedding(tokens) * self.scale, src_key_padding_mask=mask)
        if fail:
            raise ValueError("on purpose")
        return self.head(F.scaled_dot_product_attention(x, x, x))


TOKENS = torch.arange(15).view(3, 5) % 11


def everything_of(model):
    return {id(t) for t in (*model.parameters(), *model.buffers(), *model.modules())}


def train(model, steps, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
        optimizer.step()
    return optimizer


# The swap


@pytest.mark.parametrize("torchs", OURS, ids=lambda kind: kind.__name__)
def test_constructors_and_forward_have_the_signatures_of_torch(torchs):
    for name in ("__init__", "forward"):
        ours, theirs = (inspect.signature(getattr(kind, name), eval_str=True) for kind in (OURS[torchs], torchs))
        assert ours == theirs
    assert issubclass(OURS[torchs], torchs) and TORCHS[OURS[torchs]] is torchs


def test_a_swap_changes_classes_and_nothing_else():
    model = Model()
    model.encoder.layers[0].requires_grad_(False)
    model.encoder.layers[1].linear1.bfloat16()
    model.encoder.layers[1].eval()
    objects, state = everything_of(model), {name: t.clone() for name, t in model.state_dict().items()}
    learned = [p.requires_grad for p in model.parameters()]
    before = [type(module) for module in model.modules()]
    report = sdpa.nn.accelerate(model)
    assert report.swapped == ["encoder", *(f"encoder.{name}" for name in ENCODER)] and not report.left
    assert everything_of(model) == objects and [p.requires_grad for p in model.parameters()] == learned
    assert list(model.state_dict()) == list(state) and model.head.weight is model.embedding.weight
    assert all(torch.equal(t, state[name]) and t.dtype == state[name].dtype for name, t in model.state_dict().items())
    assert [layer.training for layer in model.encoder.layers] == [True, False]
    again = sdpa.nn.accelerate(model)
    assert not again.swapped and not again.left
    assert sdpa.nn.restore(model) == report.swapped
    assert [type(module) for module in model.modules()] == before and sdpa.nn.restore(model) == []


def test_a_model_may_be_the_module_itself():
    attention = torch.nn.MultiheadAttention(8, 2)
    assert str(sdpa.nn.accelerate(attention)) == "swapped 1 modules: (the model)"
    assert type(attention) is sdpa.nn.MultiheadAttention


@pytest.mark.parametrize("stack", (encoders, decoders))
def test_stacks_and_a_transformer_give_the_same_results(stack):
    module = stack(batch_first=True)[1]
    args = [randn(3, 5, 8)] * (2 if stack is decoders else 1)
    name = "tgt_key_padding_mask" if stack is decoders else "src_key_padding_mask"
    wanted = module(*args, **{name: PAD})
    sdpa.nn.accelerate(module)
    torch.testing.assert_close(module(*args, **{name: PAD}), wanted.masked_fill(rows_of(PAD), 0.0), **CLOSE)
    whole = built("Transformer", 8, 2, 1, 1, 16, 0.0)[1]
    wanted = whole(*args[:1], args[0], tgt_mask=CAUSAL[:3, :3])
    assert len(sdpa.nn.accelerate(whole).swapped) == 8
    torch.testing.assert_close(whole(*args[:1], args[0], tgt_mask=CAUSAL[:3, :3]), wanted, **CLOSE)


def test_an_optimizer_goes_on_with_the_same_steps():
    plain, swapped = Model(), Model()
    optimizers = [train(model, 2) for model in (plain, swapped)]
    sdpa.nn.accelerate(swapped)
    for model, optimizer in zip((plain, swapped), optimizers, strict=True):
        train(model, 3, optimizer)
    torch.testing.assert_close(swapped.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)
    sdpa.nn.restore(swapped)
    train(swapped, 1, optimizers[1])
    train(plain, 1, optimizers[0])
    torch.testing.assert_close(swapped.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


def test_hooks_go_on_seeing_what_they_saw():
    model, seen = Model(), []
    for module in (model.encoder, model.encoder.layers[1], model.encoder.layers[0].self_attn):
        module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
        module.register_forward_hook(lambda module, inputs, output: seen.append(type(output)))
        module.register_full_backward_hook(lambda module, grads, outs: seen.append(outs[0].shape))
    model(TOKENS, PAD).sum().backward()
    before, wanted = list(seen), len(seen)
    sdpa.nn.accelerate(model)
    model(TOKENS, PAD).sum().backward()
    assert seen[wanted:] == before and wanted == 9


# Files and copies


def round_trip(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", (copy.deepcopy, round_trip))
@pytest.mark.parametrize("functional", (False, True))
def test_copies_and_pickles_are_models_of_their_own(duplicate, functional):
    model = Model()
    sdpa.nn.accelerate(model, functional=functional)
    twin = duplicate(model)
    torch.testing.assert_close(twin(TOKENS, PAD), model(TOKENS, PAD), rtol=0, atol=0)
    assert type(twin.encoder) is sdpa.nn.TransformerEncoder and twin.seen[-1] == functional
    assert twin.head.weight is twin.embedding.weight is not model.head.weight
    sdpa.nn.restore(twin)
    twin(TOKENS), model(TOKENS)
    assert type(twin.encoder) is torch.nn.TransformerEncoder and not twin.seen[-1]
    assert type(model.encoder) is sdpa.nn.TransformerEncoder and model.seen[-1] == functional


@pytest.mark.parametrize("name", [kind.__name__ for kind in OURS])
def test_state_dicts_go_both_ways(name):
    arguments = {
        "TransformerEncoder": (torch.nn.TransformerEncoderLayer(8, 2, 16), 2, torch.nn.LayerNorm(8)),
        "TransformerDecoder": (torch.nn.TransformerDecoderLayer(8, 2, 16), 2),
        "Transformer": (8, 2, 1, 1, 16),
    }.get(name, (8, 2))
    ours, theirs = built(name, *arguments)
    for source, target in ((ours, theirs), (theirs, ours)):
        torch.nn.init.normal_(next(source.parameters()))
        target.load_state_dict(source.state_dict(), strict=True)
        assert torch.equal(next(source.parameters()), next(target.parameters()))


def test_devices_and_dtypes_of_construction():
    with torch.device("meta"):
        model = sdpa.nn.Transformer(8, 2, 1, 1, 16)
    assert all(p.is_meta for p in model.parameters())
    x = torch.empty(5, 3, 8, device="meta")
    mask = torch.empty(3, 5, dtype=torch.bool, device="meta")
    assert model(x, x, src_key_padding_mask=mask, tgt_mask=CAUSAL.to("meta")).shape == (5, 3, 8)
    model = model.to_empty(device="cpu").double()
    assert next(model.parameters()).dtype == torch.float64
    given = sdpa.nn.TransformerEncoderLayer(8, 2, 16, device="meta", dtype=torch.bfloat16)
    assert {(p.is_meta, p.dtype) for p in given.parameters()} == {(True, torch.bfloat16)}
    torch.set_default_device("meta")
    try:
        layer = sdpa.nn.TransformerEncoderLayer(8, 2, 16)
        assert layer.self_attn.in_proj_weight.is_meta
        cpu = sdpa.nn.TransformerEncoder(sdpa.nn.TransformerEncoderLayer(8, 2, 16, device="cpu"), 1)
        lengths = torch.tensor([4, 2, 5], device="cpu")
        x = torch.zeros(5, 3, 8, device="cpu")
        for mask in (PAD, lengths):
            assert cpu(x, src_key_padding_mask=mask).device.type == "cpu"
    finally:
        torch.set_default_device(None)


# What is left alone


class Shouting(torch.nn.TransformerEncoderLayer):
    def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
        return 2 * super()._sa_block(x, attn_mask, key_padding_mask, is_causal)


def overridden():
    return Shouting(8, 2, batch_first=True, **SMALL), "is a .*Shouting, whose code may rely on torch's", ["self_attn"]


def quantized():
    module = quantizable.MultiheadAttention(8, 2, batch_first=True)
    return module, "is a torch.ao.nn.quantizable.*MultiheadAttention, whose code", []


def parametrized():
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    return parametrizations.weight_norm(module, "in_proj_weight"), "is parametrized; call accelerate before", []


def with_own_forward():
    module = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True, **SMALL)
    module.forward = lambda src, **options: 3 * torch.nn.TransformerEncoderLayer.forward(module, src, **options)
    return module, "has a forward of its own, set on the instance", ["self_attn"]


@pytest.mark.parametrize("case", (overridden, quantized, parametrized, with_own_forward))
def test_what_is_left_alone_has_a_reason_and_runs(case):
    module, reason, inside = case()
    module.eval()
    x = randn(3, 5, 8)
    args = (x, x, x) if isinstance(module, torch.nn.MultiheadAttention) else (x,)
    wanted = module(*args)
    kind = type(module)
    report = sdpa.nn.accelerate(torch.nn.Sequential(module))
    assert list(report.left) == ["0"] and report.swapped == [f"0.{name}" for name in inside]
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


# Functional calls


def test_functional_calls_are_answered_while_the_model_runs():
    model = Model()
    wanted = model(TOKENS)
    assert str(sdpa.nn.accelerate(model, functional=True)).endswith("here while the model runs")
    sdpa.nn.accelerate(model, functional=True)
    torch.testing.assert_close(model(TOKENS), wanted, **CLOSE)
    assert model.seen == [False, True] and not is_routed() and len(model._forward_hooks) == 1
    with pytest.raises(ValueError, match="on purpose"):
        model(TOKENS, fail=True)
    assert model.seen[-1] and not is_routed()
    with sdpa.patch():
        with pytest.raises(ValueError, match="on purpose"):
            model(TOKENS, fail=True)
        assert is_routed()
    sdpa.nn.restore(torch.nn.Sequential(model))
    model(TOKENS)
    assert not model.seen[-1] and not model._forward_hooks and not model._forward_pre_hooks


def test_a_hook_that_raises_before_the_model_leaves_an_outer_patch_alone():
    model = Model()

    def refuse(module, inputs):
        raise ValueError("on purpose")

    model.register_forward_pre_hook(refuse)
    sdpa.nn.accelerate(model, functional=True)
    with sdpa.patch():
        with pytest.raises(ValueError, match="on purpose"):
            model(TOKENS)
        assert is_routed()
    assert not is_routed()


# Wrappers


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def learnt(model, given):
    """The state after two steps on a padded batch."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(randn(3, 5, 8), **given).square().sum().backward()
        optimizer.step()
    return model.state_dict()


def test_data_parallel_training(process_group, packed):
    module = encoders(batch_first=True)[1]
    sdpa.nn.accelerate(module)
    twin, given = copy.deepcopy(module), {"src_key_padding_mask": PAD}
    wrapped = learnt(DistributedDataParallel(module), given)
    assert len(packed) == 2
    torch.testing.assert_close({n.removeprefix("module."): t for n, t in wrapped.items()}, learnt(twin, given))


def test_fully_sharded_training_packs_as_well(process_group, packed):
    module = encoders(batch_first=True)[1]
    sdpa.nn.accelerate(module)
    twin, given = copy.deepcopy(module), {"src_key_padding_mask": PAD}
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for part in (*module.layers, module):
        torch.distributed.fsdp.fully_shard(part, mesh=mesh)
    wrapped = {name: t.full_tensor() for name, t in learnt(module, given).items()}
    assert len(packed) == 2 and isinstance(module, sdpa.nn.TransformerEncoder)
    torch.testing.assert_close(wrapped, learnt(twin, given))


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("training", (True, False), ids=("train", "eval"))
@pytest.mark.parametrize(
    "masks", ({}, {"mask": CAUSAL}, {"src_key_padding_mask": PAD}), ids=("plain", "mask", "padding")
)
def test_one_graph_of_a_compiled_encoder(masks, training, fresh_compiler):
    module = encoders(batch_first=True)[1].train(training)
    sdpa.nn.accelerate(module)
    x = randn(3, 5, 8).requires_grad_()
    results = []
    for call in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        with torch.set_grad_enabled(training):
            out = call(x, **masks)
        grads = torch.autograd.grad(out.square().sum(), (x, *module.parameters())) if training else ()
        results.append((out, *grads))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ("compiled", "checkpointed"))
def test_layers_compiled_or_wrapped_one_by_one(kind, fresh_compiler):
    module, plain = encoders(batch_first=True)
    for i, layer in enumerate(module.layers):
        if kind == "compiled":
            layer.compile(backend="aot_eager", fullgraph=True)
        else:
            module.layers[i] = checkpoint_wrapper(layer)
    for mask in (PAD, PAD.roll(1, 0), PAD[:, :4]):
        x = randn(*mask.shape, 8)
        got, wanted = (m(x, src_key_padding_mask=mask)[~mask] for m in (module, plain))
        torch.testing.assert_close(got, wanted, **CLOSE)


def test_one_graph_of_any_size_and_any_lengths(fresh_compiler):
    module = encoders(batch_first=True, dropout=0.1)[1]
    sdpa.nn.accelerate(module)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for B, L in ((3, 5), (4, 7)):
        results = []
        for call in (compiled, module):
            torch.manual_seed(0)
            out = call(randn(B, L, 8), src_key_padding_mask=torch.arange(B))
            results.append((out, *torch.autograd.grad(out.square().sum(), tuple(module.parameters()))))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-4)
