"""accelerate and restore: what a model, its optimizer, its files and those who wrap it see of the swap."""

from __future__ import annotations

import copy
import inspect
import io

import pytest
import torch
import torch.nn.functional as F
from nn_helpers import CAUSAL, CLOSE, PAD, SMALL, built, decoders, encoders, is_routed, randn, rows_of
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import sdpa
import sdpa.nn
from sdpa.nn.accelerate import OURS, TORCHS

ENCODER = ["layers.0", "layers.0.self_attn", "layers.1", "layers.1.self_attn"]


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
    assert str(sdpa.nn.accelerate(attention)) == "swapped 1 module: (the model)"
    assert str(sdpa.nn.accelerate(attention)) == "swapped 0 modules; 1 was ours already"
    assert type(attention) is sdpa.nn.MultiheadAttention


@pytest.mark.parametrize("call", (sdpa.nn.accelerate, sdpa.nn.restore))
def test_what_is_no_module(call):
    with pytest.raises(TypeError, match=r"^expected a torch.nn.Module, got str$"):
        call("x")


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


ATTENTION = {
    "default": {},
    "no bias": {"bias": False},
    "kdim": {"kdim": 6},
    "vdim": {"vdim": 10},
    "both dims": {"kdim": 6, "vdim": 10},
    "both dims, no bias": {"kdim": 6, "vdim": 10, "bias": False},
    "bias_k and bias_v": {"add_bias_kv": True},
    "bias_k and bias_v, no bias": {"add_bias_kv": True, "bias": False},
    "bias_k and bias_v, vdim": {"add_bias_kv": True, "vdim": 10},
    "zero": {"add_zero_attn": True},
    "batch_first": {"batch_first": True},
    "double": {"dtype": torch.float64},
}
LAYER = {
    "default": {},
    "no bias": {"bias": False},
    "norm_first": {"norm_first": True},
    "batch_first": {"batch_first": True},
    "all": {"bias": False, "norm_first": True, "batch_first": True, "dtype": torch.float64},
}
STATES = [(kind.__name__, option) for kind in OURS for option in (ATTENTION if "Attention" in kind.__name__ else LAYER)]


def built_of(name, option):
    """Ours and torch's, small, with a constructor option; a stack of layers with and without a norm of its own."""
    if name == "MultiheadAttention":
        return built(name, 8, 2, **ATTENTION[option])
    if name == "Transformer":
        return built(name, 8, 2, 1, 1, 16, **LAYER[option])
    if name.endswith("Layer"):
        return built(name, 8, 2, 16, **LAYER[option])
    layer = getattr(torch.nn, f"{name}Layer")(8, 2, 16, **LAYER[option])
    return built(name, layer, 2, torch.nn.LayerNorm(8) if option == "default" else None)


@pytest.mark.parametrize("name,option", STATES)
def test_state_dicts_go_both_ways(name, option):
    ours, theirs = built_of(name, option)
    for source, target in ((ours, theirs), (theirs, ours)):
        for parameter in source.parameters():
            torch.nn.init.normal_(parameter)
        assert list(source.state_dict()) == list(target.state_dict())
        target.load_state_dict(source.state_dict(), strict=True)
        torch.testing.assert_close(target.state_dict(), source.state_dict(), rtol=0, atol=0)


def test_the_options_change_the_state():
    """Those of attention that have parameters of their own, so that the cases above are more than one case."""
    known = {frozenset((n, t.shape) for n, t in built("MultiheadAttention", 8, 2, **o)[0].state_dict().items())
             for o in ATTENTION.values()}  # fmt: skip
    assert len(known) == 9  # twelve, of which "zero", "batch_first" and "double" are like the default


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


def test_report_and_restore_tell_of_functional_calls():
    """Where no module is swapped as well, and by a later call."""
    routes = "routes scaled_dot_product_attention here while the model runs"
    model = torch.nn.Linear(2, 2)
    assert str(sdpa.nn.accelerate(model, functional=True)) == routes
    assert str(sdpa.nn.accelerate(model)) == routes and sdpa.nn.accelerate(model).functional
    assert sdpa.nn.restore(torch.nn.Sequential(model)) == ["functional calls of 0"]
    assert sdpa.nn.restore(model) == [] and str(sdpa.nn.accelerate(model)) == "swapped 0 modules"
    model = torch.nn.MultiheadAttention(8, 2)
    assert str(sdpa.nn.accelerate(model, functional=True)) == f"swapped 1 module: (the model)\n{routes}"
    assert sdpa.nn.restore(model) == ["(the model)", "functional calls of (the model)"]
    with pytest.raises(TypeError, match=r"^accelerate\(\): argument 'functional' must be bool, not str$"):
        sdpa.nn.accelerate(model, functional="yes")


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
