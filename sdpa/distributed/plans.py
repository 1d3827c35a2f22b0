"""Plans of tensor parallelism: which styles `parallelize_module` applies to layers of ours and of transformers.

A rank computes some heads of each attention and some features of each feed-forward block, and the results are summed
over the ranks (Shoeybi et al., Megatron-LM, 2019). Between the blocks every rank has whole activations.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from sdpa.distributed.styles import Shared, SharedAttention, TransposedColumns, TransposedRows
from sdpa.nn.attention import MultiheadAttention
from sdpa.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from sdpa.nn.rowwise import is_elementwise, is_unchanged

Plan = dict[str, ParallelStyle]
Names = tuple[tuple[str, ...], str]  # of the projections into heads or features, and of the one out of them

ATTENTIONS: tuple[Names, ...] = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),  # Llama
    (("q_proj", "k_proj", "v_proj"), "out_proj"),  # GPT-J
    (("query_key_value",), "dense"),  # GPT-NeoX: q, k and v of a head side by side
    (("c_attn",), "c_proj"),  # GPT-2: all heads' q, k and v side by side
    (("c_attn", "q_attn"), "c_proj"),  # the same to an encoder
    (("self.query", "self.key", "self.value"), "output.dense"),  # BERT
)
FEED_FORWARDS: tuple[Names, ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("fc_in",), "fc_out"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("c_fc",), "c_proj"),
    (("intermediate.dense",), "output.dense"),
)
BEHIND = frozenset({"output.LayerNorm"})  # of whole rows, behind an attention's sum over the ranks
NORMS_OF_HEADS = frozenset({"q_norm", "k_norm"})  # whose (D,) weights all heads share
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size")
# By such a child an attention of transformers is told, whether its shape is known or not.
SIGNS = frozenset({"q_proj", "query", "query_key_value", "c_attn", "qkv_proj", "Wqkv", "q_lin", "qkv", "q"})
# Code that shapes heads by such a number of all ranks' would make other heads of a rank's.
COUNTS = frozenset({
    "all_head_size", "embed_dim", "hidden_size", "n_head", "n_heads", "num_attention_heads", "num_heads",
    "num_key_value_heads", "num_kv_heads",
})  # fmt: skip
LAYERS = (TransformerEncoderLayer, TransformerDecoderLayer)
ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU)


def tensor_parallel_plan(module: nn.Module) -> Plan:
    """A plan for `torch.distributed.tensor.parallel.parallelize_module`: ranks share heads and hidden features.

        parallelize_module(model, mesh, sdpa.distributed.tensor_parallel_plan(model))

    It has the layers of `sdpa.nn`, and those blocks of transformers that are built as in Llama, GPT-2, GPT-J, GPT-NeoX
    and BERT, wherever they are in `module`. All else stays whole on every rank: norms, embeddings, a vocabulary's head,
    and feed-forward blocks that are not known. Inputs, outputs and masks are whole, too, and the same on all ranks.

    Parameters become DTensors of the shapes and names that they had. `fully_shard` takes them afterwards, and
    torch.distributed.checkpoint.state_dict gives and takes the state of one process. Where queries, keys and values are
    packed in one weight (`in_proj_weight`, `c_attn`), a rank keeps a part of its input features, and at each call ranks
    exchange them for the rows of their heads: of 3 E^2 numbers a rank sends less than 1 / ranks. `num_heads` of our
    attention is then the rank's.

    With dropout, give the ranks of the mesh one seed: what they have whole has to stay the same. Heads and features of
    different ranks then drop the same places, unlike those of one process.

    Args:
        module: a model, a layer or an attention.

    Returns:
        Styles by the names of modules, "" for the module itself.

    Raises:
        ValueError: a module without such a block or with DTensors, an attention that is torch's, changes ours, or is
            transformers' and built otherwise. `parallelize_module` raises it where heads, key heads or hidden features
            are no multiples of the ranks.
    """
    kind = type(module).__name__
    if not isinstance(module, nn.Module):
        raise TypeError(f"tensor_parallel_plan: expected a torch.nn.Module, got {kind}")
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise ValueError(f"tensor_parallel_plan: {kind} has DTensors; a plan is applied once, and before fully_shard")
    plan: Plan = {}
    done: set[nn.Module] = set()
    for name, block in module.named_modules():
        if block not in done:
            for inner, style in styles_of(block, done):
                plan[".".join(filter(None, (name, inner)))] = style
    if not plan:
        raise ValueError(
            f"tensor_parallel_plan: {kind} has no block that is known here: layers of sdpa.nn, and of "
            "transformers Llama, GPT-2, GPT-J, GPT-NeoX and BERT, and what is built as they are"
        )
    return plan


def styles_of(block: nn.Module, done: set[nn.Module]) -> Iterator[tuple[str, ParallelStyle]]:
    """The styles of one block by names inside of it; `done` gets the modules that need no further look."""
    kind = type(block).__name__
    if type(block) is MultiheadAttention:
        done.update(block.modules())
        yield "", SharedAttention()
    elif isinstance(block, nn.MultiheadAttention):
        raise ValueError(
            f"tensor_parallel_plan: expected sdpa.nn.MultiheadAttention, got {type(block).__module__}.{kind}; "
            "sdpa.accelerate(model) makes torch's ours"
        )
    elif isinstance(block, LAYERS):
        if any(isinstance(block, layer) and is_unchanged(block, layer) for layer in LAYERS) and is_known(block):
            yield "", Shared(kind, {"hidden features": block.linear1.out_features})
            yield from (("linear1", ColwiseParallel()), ("linear2", RowwiseParallel()))
    elif any(of.__module__.startswith("transformers") for of in type(block).__mro__):
        attention = next((names for names in ATTENTIONS if has_projections(block, names, exactly=True)), None)
        feed_forward = next((names for names in FEED_FORWARDS if has_projections(block, names)), None)
        if attention:
            done.update(block.modules())
            yield from attention_styles(block, attention)
        elif SIGNS.intersection(block._modules):
            raise ValueError(f"tensor_parallel_plan: {kind} is an attention that is not known here")
        elif feed_forward:
            yield from feed_forward_styles(block, feed_forward)


def is_known(layer: TransformerEncoderLayer | TransformerDecoderLayer) -> bool:
    """Whether a layer's activation treats every feature alone."""
    activation = layer.activation
    return isinstance(activation, ACTIVATIONS) if isinstance(activation, nn.Module) else is_elementwise(activation)


def has_projections(block: nn.Module, names: Names, exactly: bool = False) -> bool:
    """Whether a block has linear layers of these names, and with `exactly` no other parameters."""
    modules = dict(block.named_modules())
    wanted = {*names[0], names[1]}
    if not all(name in modules and is_linear(modules[name]) for name in wanted):
        return False
    others = {name for name, one in modules.items() if any(True for _ in one.parameters(recurse=False))} - wanted
    return not exactly or others <= BEHIND | NORMS_OF_HEADS


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is transformers' linear layer of GPT-2, whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D"


def out_features(module: Any) -> int:
    found: int = module.nf if is_transposed(module) else module.out_features
    return found


def attention_styles(block: nn.Module, names: Names) -> Iterator[tuple[str, ParallelStyle]]:
    """Of one of transformers' attentions. Raises ValueError where its code counts the heads of all ranks."""
    columns, rows = names
    inner = columns[0].rpartition(".")[0]
    own: Any = block.get_submodule(inner)  # what shapes the heads
    kind, modules = type(own).__name__, dict(block.named_modules())
    D = next((getattr(own, name) for name in HEAD_SIZES if hasattr(own, name)), None)
    norms = [name for name in NORMS_OF_HEADS if name in modules]
    if counted := COUNTS & names_read(type(own)):
        raise ValueError(f"tensor_parallel_plan: {kind} shapes heads by {sorted(counted)[0]}, which counts all of them")
    if D is None or any(tuple(p.shape) != (D,) for name in norms for p in modules[name].parameters()):
        raise ValueError(f"tensor_parallel_plan: {kind} is an attention that is not known here")
    widths = [out_features(modules[name]) for name in columns]
    packed = "c_attn" in columns
    if packed:
        sizes = {"heads": own.split_size // D}
    elif len(columns) == 1:
        sizes = {"heads": widths[0] // (3 * D)}
    else:
        sizes = {"heads": widths[0] // D, "key heads": widths[1] // D}
    yield inner, Shared(kind, sizes, reads=len(columns), divided=("split_size",) if packed else ())
    for name, width in zip(columns, widths, strict=True):
        yield name, columns_style(modules[name], width // own.split_size if packed else 1)
    for name in norms:  # each rank's heads are a part of the rows, whose sums are the weights' gradients
        yield name, SequenceParallel(sequence_dim=2, use_local_output=True)
    yield rows, rows_style(modules[rows])


def feed_forward_styles(block: nn.Module, names: Names) -> Iterator[tuple[str, ParallelStyle]]:
    columns, rows = names
    inner = columns[0].rpartition(".")[0]
    modules = dict(block.named_modules())
    yield inner, Shared(type(block).__name__, {"hidden features": out_features(modules[columns[0]])}, len(columns))
    for name in columns:
        yield name, columns_style(modules[name], 1)
    yield rows, rows_style(modules[rows])


def columns_style(module: nn.Module, parts: int) -> ParallelStyle:
    return TransposedColumns(parts) if is_transposed(module) else ColwiseParallel()


def rows_style(module: nn.Module) -> ParallelStyle:
    return TransposedRows() if is_transposed(module) else RowwiseParallel()


def names_read(kind: type) -> set[str]:
    """The names of attributes and globals in the methods of a class, but for the one that makes it."""
    found: set[str] = set()
    for of in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, value in vars(of).items():
            if isinstance(value, FunctionType) and name != "__init__":
                found.update(inspect.unwrap(value).__code__.co_names)
    return found
