"""What ranks do in the tests of tensor-parallel plans: a module whole on each rank, and the same one shared by them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_cases import refused
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import sdpa.nn
from sdpa.distributed import tensor_parallel_plan

B, L, S, E, H, FF = 2, 5, 7, 16, 4, 32
SHARED = ("in_proj", "out_proj", "_proj_weight", "linear1", "linear2", ".h.", ".layer")  # names of matrices
WHOLE = StateDictOptions(full_state_dict=True)


class Case(NamedTuple):
    module: nn.Module
    inputs: tuple[Tensor, ...]  # that get gradients
    call: Callable[..., Any]


def randn(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, tensor_parallel_plan(module))


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(found: Tensor, expected: Tensor, told: str) -> None:
    size = expected.abs().max().clamp_min(1.0).item()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * size, msg=lambda m: f"{told}: {m}")


def attentions() -> dict[str, Case]:
    """MultiheadAttention, each way that it projects, and each mask."""
    found = {}
    g = torch.Generator().manual_seed(1)
    for name, options in {
        "sequence first": {},
        "batch first": {"batch_first": True},
        "no bias": {"bias": False},
        "other widths": {"kdim": 6, "vdim": 10, "batch_first": True},
        "extra keys": {"add_bias_kv": True, "add_zero_attn": True},
    }.items():
        torch.manual_seed(2)
        module = sdpa.nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
        for bias in (module.in_proj_bias, module.out_proj.bias):
            if bias is not None:
                nn.init.normal_(bias)
        shapes = [(B, L, E), (B, S, options.get("kdim", E)), (B, S, options.get("vdim", E))]
        if not module.batch_first:
            shapes = [(length, batch, width) for batch, length, width in shapes]
        inputs = tuple(randn(g, *shape) for shape in shapes)
        found[name] = Case(module, inputs, lambda m, *given: m(*given, need_weights=True))
    module = found["batch first"].module
    x, y = found["batch first"].inputs[:2]
    by_head, padding = randn(g, B * H, L, S), torch.arange(S) >= torch.tensor([[S], [3]])
    found |= {
        "own": Case(module, (x,), lambda m, x: m(x, x, x, need_weights=True, average_attn_weights=False)),
        "memory, padding": Case(module, (x, y), lambda m, x, y: m(x, y, y, key_padding_mask=padding)),
        "lengths": Case(module, (x, y), lambda m, x, y: m(x, y, y, torch.tensor([S, 3]), need_weights=False)),
        "learned mask of heads": Case(module, (x, y, by_head), lambda m, x, y, mask: m(x, y, y, attn_mask=mask)),
        "learned padding": Case(
            module, (x, y, by_head[:B, 0]), lambda m, x, y, mask: m(x, y, y, key_padding_mask=mask)
        ),
        "learned mask": Case(module, (x, y, by_head[0]), lambda m, x, y, mask: m(x, y, y, attn_mask=mask)),
        "one sequence": Case(
            module, (x[0], y[0], by_head[:H]), lambda m, x, y, mask: m(x, y, y, attn_mask=mask, need_weights=False)
        ),
    }
    return found


def layers() -> dict[str, Case]:
    g = torch.Generator().manual_seed(3)
    torch.manual_seed(4)
    options: dict[str, Any] = {"dropout": 0.0, "dtype": torch.float64}
    encoder = sdpa.nn.TransformerEncoderLayer(E, H, FF, batch_first=True, activation=F.gelu, **options)
    decoder = sdpa.nn.TransformerDecoderLayer(E, H, FF, norm_first=True, **options)
    both = sdpa.nn.Transformer(E, H, 2, 2, FF, batch_first=True, **options)
    # An activation of which nothing is known: the feed-forward block stays whole.
    other = sdpa.nn.TransformerEncoderLayer(E, H, FF, activation=lambda x: x.softmax(-1), **options)
    tanh = sdpa.nn.TransformerEncoderLayer(E, H, FF, activation=partial(F.gelu, approximate="tanh"), **options)
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    long, short = torch.arange(S) >= torch.tensor([[S], [3]]), torch.arange(L) >= torch.tensor([[4], [L]])
    src, tgt = randn(g, B, S, E), randn(g, B, L, E)
    return {
        "encoder layer": Case(encoder, (src,), lambda m, x: m(x, src_key_padding_mask=long)),
        "other activation": Case(other, (src,), lambda m, x: m(x)),
        "activation with options": Case(tanh, (src,), lambda m, x: m(x)),
        "decoder layer": Case(
            decoder,
            (tgt.transpose(0, 1), src.transpose(0, 1)),
            lambda m, x, y: m(x, y, causal, memory_key_padding_mask=long, tgt_is_causal=True),
        ),
        "transformer": Case(
            both,
            (src, tgt),
            lambda m, x, y: m(
                x, y, tgt_mask=causal, src_key_padding_mask=long, tgt_key_padding_mask=short,
                memory_key_padding_mask=long, tgt_is_causal=True,
            ),
        ),
    }  # fmt: skip


def learn(case: Case, module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and the gradients of the inputs; the parameters keep theirs."""
    inputs = [t.clone().requires_grad_() for t in case.inputs]
    results = case.call(module, *inputs)
    results = [t for t in (results if isinstance(results, tuple) else (results,)) if t is not None]
    sum((t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in results).backward()
    return results, [t.grad for t in inputs]


def modules(rank: int, cases: Callable[[], dict[str, Case]]) -> None:
    """Results, gradients and states are those of one process."""
    mesh = init_device_mesh("cpu", (2,))
    for name, case in cases().items():
        case.module.zero_grad()
        shared = parallel(copy.deepcopy(case.module), mesh)
        expected, found = learn(case, case.module), learn(case, shared)
        for many, others in zip(found, expected, strict=True):
            for one, other in zip(many, others, strict=True):
                close(one, other, name)
        same_gradients(case.module, shared, name)
        same_state(case.module, shared, mesh, name)
        with torch.no_grad():
            again = case.call(shared, *case.inputs)
            again = again[0] if isinstance(again, tuple) else again
            close(again, expected[0][0], f"{name}, inference")


def same_gradients(expected: nn.Module, found: nn.Module, told: str) -> None:
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        close(whole(one.grad), other.grad, f"{told} {name}")


def same_state(expected: nn.Module, found: nn.Module, mesh: DeviceMesh, told: str) -> None:
    """The whole state loads into a module of one process, and the other way."""
    wanted = expected.state_dict()
    for name, value in found.state_dict().items():
        assert torch.equal(whole(value), wanted[name]), (told, name)
        if value.dim() == 2 and any(part in name for part in SHARED) and "other activation" not in told:
            assert is_part(value), (told, name)
    state = get_model_state_dict(found, options=WHOLE)
    if mesh.get_rank() == 0:
        fresh = copy.deepcopy(expected)
        for parameter in fresh.parameters():
            nn.init.zeros_(parameter)
        fresh.load_state_dict(state)
        assert all(torch.equal(value, wanted[name]) for name, value in fresh.state_dict().items()), told
    found.zero_grad()  # gradients that were gathered cannot be copied
    empty = copy.deepcopy(found)
    for parameter in empty.parameters():
        nn.init.zeros_(parameter)
    set_model_state_dict(empty, dict(wanted), options=WHOLE)  # it exchanges the entries
    assert all(torch.equal(whole(value), wanted[name]) for name, value in empty.state_dict().items()), told


class Collectives(TorchDispatchMode):
    """How often ranks sum, and send anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = self.others = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # it comes again with the rank's tensors
        name = str(function)
        if "c10d" in name and "wait" not in name and "wrap" not in name:
            self.sums += "all_reduce" in name
            self.others += "all_reduce" not in name
        return function(*args, **kwargs or {})


def traffic(rank: int) -> None:
    """Ranks sum activations once for each block and direction, and exchange packed weights once each way."""
    mesh = init_device_mesh("cpu", (2,))
    cases = {"sdpa.nn": (layers()["encoder layer"].module, 1)}
    if has_transformers():
        cases["Llama"] = (transformers_models(("Llama",))["Llama, sdp_kernels"].model.layers[0], 0)
    for name, (module, exchanges) in cases.items():
        shared = parallel(module, mesh)
        x = randn(torch.Generator().manual_seed(5), B, S, next(module.parameters()).shape[-1]).requires_grad_()
        turns = torch.ones(1, S, 8, dtype=x.dtype), torch.zeros(1, S, 8, dtype=x.dtype)
        with Collectives() as forward:
            out = shared(x) if exchanges else shared(x, position_embeddings=turns)
        assert (forward.sums, forward.others) == (2, exchanges), (name, forward.sums, forward.others)
        with Collectives() as backward:
            out.sum().backward()
        # The bias that belongs to a packed weight is whole, so that its gradient is gathered.
        assert (backward.sums, backward.others) == (2, 2 * exchanges), (name, backward.sums, backward.others)


def is_part(parameter: Any) -> bool:
    """Whether a rank has half of it."""
    return isinstance(parameter, DTensor) and 2 * parameter.to_local().numel() == parameter.numel()


def steps(rank: int) -> None:
    """Generation, whose stores have this rank's heads; dropout of one seed leaves what is whole the same."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(6)
    layer = sdpa.nn.TransformerDecoderLayer(E, H, FF, dropout=0.5, batch_first=True, dtype=torch.float64)
    decoder = sdpa.nn.TransformerDecoder(layer, 2).eval()
    shared = parallel(copy.deepcopy(decoder), mesh)
    g = torch.Generator().manual_seed(7)
    memory, tgt = randn(g, B, S, E), randn(g, B, L, E)
    padding = torch.arange(S) >= torch.tensor([[S], [3]])
    caches = [module.new_cache(memory, L, padding) for module in (decoder, shared)]
    assert caches[1].own[0].keys.shape == (B, H // 2, L, E // H)
    for part in tgt.split(2, 1):
        close(shared.step(part, caches[1]), decoder.step(part, caches[0]), "a step")
    torch.manual_seed(8)
    out = shared.train()(tgt, memory, memory_key_padding_mask=padding)
    other = out.detach().clone()
    dist.broadcast(other, 0)
    assert torch.equal(out, other) and not torch.equal(out, shared.eval()(tgt, memory))


def has_transformers() -> bool:
    return find_spec("transformers") is not None


def transformers_models(names: tuple[str, ...] = ()) -> dict[str, Any]:
    """By name and implementation of attention; those of `names` alone if there are any."""
    import transformers as T

    import sdpa.integrations.transformers  # noqa: F401  which registers sdp_kernels

    small = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 4, "initializer_range": 0.2}
    gpt = {"vocab_size": 40, "n_embd": 32, "n_layer": 1, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0}
    gpt |= {"attn_pdrop": 0, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 1}
    still = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    kinds: dict[str, tuple[Any, Any]] = {
        "Llama": (T.LlamaForCausalLM, T.LlamaConfig(**small, num_key_value_heads=2, attention_bias=True)),
        "Qwen3": (T.Qwen3ForCausalLM, T.Qwen3Config(**small, num_key_value_heads=2, head_dim=8)),
        "GPT-2": (T.GPT2LMHeadModel, T.GPT2Config(**gpt, add_cross_attention=True)),
        "GPT-J": (T.GPTJForCausalLM, T.GPTJConfig(**gpt, rotary_dim=4)),
        "GPT-NeoX": (T.GPTNeoXForCausalLM, T.GPTNeoXConfig(**small, bos_token_id=0, eos_token_id=1)),
        "BERT": (T.BertForMaskedLM, T.BertConfig(**small, **still)),
    }
    found = {}
    for implementation in ("sdp_kernels", "sdpa"):
        for name, (kind, config) in kinds.items():
            if names and name not in names:
                continue
            torch.manual_seed(9)
            config._attn_implementation = implementation
            found[f"{name}, {implementation}"] = kind(config).double().train()
    return found


def blocks(rank: int) -> None:
    """transformers' models: losses and gradients, of padded batches."""
    mesh = init_device_mesh("cpu", (2,))
    g = torch.Generator().manual_seed(10)
    tokens = torch.randint(0, 40, (2, 7), generator=g)
    padding = (torch.arange(7) >= torch.tensor([[0], [3]])).long()  # in front, as for generation
    for name, model in transformers_models().items():
        shared = parallel(copy.deepcopy(model), mesh)
        given: dict[str, Any] = {"input_ids": tokens, "attention_mask": padding, "labels": tokens}
        if "GPT-2" in name:
            given["encoder_hidden_states"] = randn(g, 2, 3, 32)
        expected, found = model(**given), shared(**given)
        close(found.logits, expected.logits, name)
        for one in (expected, found):
            one.loss.backward()
        # transformers' norms of Llama and Qwen3 round to float32.
        bound = 1e-6 if "Llama" in name or "Qwen3" in name else 1e-12
        for (key, p), q in zip(shared.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=0, atol=bound, msg=lambda m: f"{name} {key}: {m}")  # noqa: B023
        same_state(model, shared, mesh, name)


def refusals(rank: int) -> None:
    """Sentences that name the sizes or the class. A block is not changed before its sizes are counted."""
    mesh = init_device_mesh("cpu", (2,))
    three = sdpa.nn.MultiheadAttention(18, 3)
    before = copy.deepcopy(three.state_dict())
    told = "expected multiples of the 2 ranks, which share them, got 3 heads of MultiheadAttention"
    refused(lambda: parallel(three, mesh), told)
    assert all(torch.equal(value, before[name]) for name, value in three.state_dict().items())
    odd = sdpa.nn.TransformerEncoderLayer(E, H, 33)
    refused(lambda: parallel(odd, mesh), "got 33 hidden features of TransformerEncoderLayer")
    refused(lambda: tensor_parallel_plan(nn.MultiheadAttention(E, H)), "sdpa.accelerate(model) makes torch's ours")
    changed = type("Changed", (sdpa.nn.MultiheadAttention,), {})(E, H)
    refused(lambda: tensor_parallel_plan(changed), "expected sdpa.nn.MultiheadAttention, got plan_cases.Changed")
    twice = parallel(sdpa.nn.MultiheadAttention(E, H), mesh)
    refused(lambda: tensor_parallel_plan(twice), "AttentionOfRank has DTensors; a plan is applied once, and before")
    refused(lambda: tensor_parallel_plan(nn.Linear(2, 2)), "Linear has no block that is known here")
    refused(
        lambda: parallelize_module(three, init_device_mesh("cpu", (1, 2)), {"": tensor_parallel_plan(three)[""]}),
        "expected a mesh of one dimension, got shape (1, 2)",
    )


def transformers_refusals(rank: int) -> None:
    import transformers as T

    mesh = init_device_mesh("cpu", (2,))
    small: dict[str, Any] = {"vocab_size": 40, "hidden_size": 48, "num_hidden_layers": 1}
    llama = T.LlamaConfig(**small, intermediate_size=48, num_attention_heads=6, num_key_value_heads=3)
    told = "got 6 heads and 3 key heads of LlamaAttention"
    refused(lambda: parallel(T.LlamaModel(llama), mesh), told)
    gpt = T.GPT2Config(vocab_size=40, n_embd=48, n_layer=1, n_head=3)
    refused(lambda: parallel(T.GPT2Model(gpt), mesh), "got 3 heads of GPT2Attention")
    opt = T.OPTConfig(**small, ffn_dim=48, num_attention_heads=4, word_embed_proj_dim=48)
    refused(lambda: tensor_parallel_plan(T.OPTModel(opt)), "OPTAttention shapes heads by num_heads, which counts all")
    t5 = T.T5Config(vocab_size=40, d_model=32, d_ff=48, num_layers=1, num_heads=4, d_kv=8)
    refused(lambda: tensor_parallel_plan(T.T5Model(t5)), "T5Attention is an attention that is not known here")
    olmo = T.Olmo2Config(**small, intermediate_size=48, num_attention_heads=4, pad_token_id=0)
    refused(lambda: tensor_parallel_plan(T.Olmo2Model(olmo)), "Olmo2Attention is an attention that is not known here")


def ours(rank: int) -> None:
    modules(rank, attentions)
    modules(rank, layers)
    traffic(rank)
    steps(rank)
    checkpointed(rank)
    curves(rank, [(1, 1, 2), (1, 2, 1)])
    refusals(rank)


def theirs(rank: int) -> None:
    blocks(rank)
    transformers_refusals(rank)


class GPT(nn.Module):
    """Small, of our layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(32, E), nn.Embedding(L + S, E)
        layer = sdpa.nn.TransformerEncoderLayer(E, H, FF, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = sdpa.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(E, 32)

    def forward(self, batch: Tensor) -> Tensor:
        text, following = batch[:, :-1], batch[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        x = self.embedding(text) + self.positions.weight[: text.shape[1]]
        return F.cross_entropy(self.head(self.encoder(x, mask, is_causal=True)).flatten(0, 1), following.flatten())


def made() -> GPT:
    torch.manual_seed(11)
    return GPT()


Shape = tuple[int, int, int]  # ranks with whole copies, that share parameters, that share heads


def curves(rank: int, shapes: list[Shape]) -> None:
    """Losses of training in float32 are those of one process, by FSDP2, tensor parallelism, or both."""
    g = torch.Generator().manual_seed(12)
    batches = [(torch.randint(0, 32, (4, 1), generator=g) + 3 * torch.arange(L + S)) % 32 for _ in range(16)]
    alone = made()
    expected = train(alone, batches, None)
    assert expected[-1] < expected[0] - 1, expected
    with torch.no_grad():
        last = alone(batches[0])
    for shape in shapes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts", "tensor"))
        model, data = made(), mesh["copies", "parts"]
        if shape[2] > 1:
            parallel(model, mesh["tensor"])
        if data.size() > 1:
            for layer in model.encoder.layers:
                fully_shard(layer, mesh=data)
            fully_shard(model, mesh=data)
        losses = train(model, batches, data)
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5, msg=lambda m: f"{shape}: {m}")  # noqa: B023
        state = get_model_state_dict(model, options=WHOLE)
        if rank == 0:
            fresh = made()
            fresh.load_state_dict(state)
            with torch.no_grad():
                torch.testing.assert_close(fresh(batches[0]), last, rtol=0, atol=1e-4)
        dist.barrier()


def train(model: nn.Module, batches: list[Tensor], data: DeviceMesh | None) -> Tensor:
    """The losses of SGD with momentum; ranks along `data` have parts of each batch, and others the same."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        place = 0 if data is None else data.get_coordinate()[0] * data.size(1) + data.get_coordinate()[1]
        loss = model(batch if data is None else batch.chunk(data.size())[place])
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if data is not None:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(mean)
    return torch.stack(losses)


def checkpointed(rank: int) -> None:
    """Computed again in the backward pass, gradients are the same."""
    mesh = init_device_mesh("cpu", (2,))
    batch = torch.arange(48).view(4, 12) % 32
    alone, model = made(), parallel(made(), mesh)
    alone(batch).backward()
    checkpoint(model, batch, use_reentrant=False).backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(one.grad), other.grad, rtol=0, atol=1e-6)
