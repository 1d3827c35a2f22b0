"""Styles of tensor parallelism that torch does not have: packed projections, GPT-2's layers, our attention.

A style makes DTensors of a module's parameters and lets it compute on this rank's parts as ordinary tensors. What a
rank reads whole gets the sum of the ranks' gradients, and what the ranks' results are parts of is their sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module

from sdpa.nn.attention import MultiheadAttention

INPUT = "hidden_states"


def distribute(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh, of: Mapping[str, Placement]) -> None:
    """Make DTensors of a module's own parameters, by name, as far as it has them."""
    for name, placement in of.items():
        given = module._parameters.get(name)
        if given is not None:
            made = distribute_tensor(given.detach(), mesh, [placement], src_data_rank=style.src_data_rank)
            module.register_parameter(name, nn.Parameter(made, given.requires_grad))


def check_sizes(kind: str, sizes: Mapping[str, int], mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise ValueError(f"tensor_parallel_plan: expected a mesh of one dimension, got shape {tuple(mesh.shape)}")
    if any(size % mesh.size() for size in sizes.values()):
        found = " and ".join(f"{size} {what}" for what, size in sizes.items())
        raise ValueError(
            f"tensor_parallel_plan: expected multiples of the {mesh.size()} ranks, which share them, got {found} of "
            f"{kind}"
        )


def shared(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same tensor, which all ranks have whole and each reads for its own heads: its gradient is their sum."""
    if not tensor.requires_grad:
        return tensor
    return as_whole(tensor, mesh).to_local(grad_placements=[Partial()])


def own_part(parameter: Any, dim: int, parts: int) -> Tensor:
    """This rank's part of each of `parts` equal parts of a dimension, in which the DTensor is whole or, of one part,
    sharded. Gradients go back to how it is stored."""
    split = parameter.unflatten(dim, (parts, -1)).redistribute(placements=[Shard(dim + 1)])
    own: Tensor = split.to_local().flatten(dim, dim + 1)
    return own


class Shared(ParallelStyle):
    """A block of which the ranks share something, whose sizes have to be multiples of the ranks.

    What several projections read becomes a DTensor once, so that its gradient is summed over the ranks once.
    Attributes named in `divided`, which tell of the features of all heads, become the rank's.
    """

    def __init__(self, kind: str, sizes: Mapping[str, int], reads: int = 1, divided: Sequence[str] = ()) -> None:
        self.kind, self.sizes, self.reads, self.divided = kind, sizes, reads, divided

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_sizes(self.kind, self.sizes, device_mesh)
        for name in self.divided:
            setattr(module, name, getattr(module, name) // device_mesh.size())
        if self.reads > 1 and not self.divided:
            module.register_forward_pre_hook(partial(enter, device_mesh), with_kwargs=True)
        return module


def enter(mesh: DeviceMesh, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """A hook: the block's input, given by position or by transformers' name of it, as a DTensor."""
    if args:
        return (as_whole(args[0], mesh), *args[1:]), kwargs
    return args, {name: as_whole(given, mesh) if name == INPUT else given for name, given in kwargs.items()}


def as_whole(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that all ranks have alike."""
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


class TransposedColumns(ParallelStyle):
    """GPT-2's linear layer, of which each rank computes its part of each of `parts` parts of the features."""

    def __init__(self, parts: int = 1) -> None:
        self.parts = parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight, bias = (Shard(1), Shard(0)) if self.parts == 1 else (Shard(0), Replicate())
        distribute(module, self, device_mesh, {"weight": weight, "bias": bias})
        module.parts = self.parts  # type: ignore[assignment]
        module.__class__ = ColumnsOfRank
        return module


class TransposedRows(ParallelStyle):
    """GPT-2's linear layer of features of which each rank has a part."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, self, device_mesh, {"weight": Shard(0), "bias": Replicate()})
        module.__class__ = RowsOfRank
        return module


class ColumnsOfRank(nn.Module):
    """(..., own features) of whole (..., in); the weight is (in, out)."""

    parts: int

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        own = own_part(weight, 1, self.parts)
        return F.linear(shared(x, weight.device_mesh), own.t(), own_part(self.bias, 0, self.parts))


class RowsOfRank(nn.Module):
    """Whole (..., out) of (..., own features)."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        bias: Any = self.bias
        part = DTensor.from_local(x @ weight.to_local(), weight.device_mesh, [Partial()], run_check=False)
        return part.redistribute(placements=[Replicate()]).to_local() + bias.to_local()


class SharedAttention(ParallelStyle):
    """Our MultiheadAttention, of which each rank computes some heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, MultiheadAttention)
        check_sizes(type(module).__name__, {"heads": module.num_heads}, device_mesh)
        separate = dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), Shard(0))
        extra = dict.fromkeys(("bias_k", "bias_v"), Shard(2))
        packed = {"in_proj_weight": Shard(1), "in_proj_bias": Replicate()}
        distribute(module, self, device_mesh, packed | separate | extra)
        parallelize_module(module.out_proj, device_mesh, RowwiseParallel(), src_data_rank=self.src_data_rank)
        module.num_heads //= device_mesh.size()
        module.__class__ = AttentionOfRank
        module.mesh = device_mesh  # type: ignore[assignment]
        # A hook that sees results keeps padded batches from being packed, too: `Packed` reads whole weights.
        module.register_forward_hook(with_all_weights)
        return module


class AttentionOfRank(MultiheadAttention):
    """The heads of one rank, between whole inputs and outputs. `num_heads` is theirs; masks are of all heads."""

    mesh: DeviceMesh

    def check_call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> bool:
        if query.dim() == 2:  # else only their dimension is looked at
            attn_mask = self.own_mask(attn_mask)
        return super().check_call(query, key, value, key_padding_mask, attn_mask, is_causal)

    def attend(
        self,
        heads: Sequence[Tensor],
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        average: bool | None,
    ) -> tuple[Tensor, Tensor | None]:
        if key_padding_mask is not None:
            key_padding_mask = shared(key_padding_mask, self.mesh)
        return super().attend(heads, key_padding_mask, self.own_mask(attn_mask), is_causal, average)

    def own_mask(self, mask: Tensor | None) -> Tensor | None:
        """(L, S) as it is; (B * own heads, L, S) of (B * heads, L, S)."""
        if mask is None:
            return None
        mask = shared(mask, self.mesh)
        if mask.dim() != 3:
            return mask
        by_rank = mask.unflatten(0, (-1, self.mesh.size(), self.num_heads))
        return by_rank[:, self.mesh.get_local_rank()].flatten(0, 1)

    def own_heads(self, query: Tensor) -> Sequence[Tensor]:
        return self.all_heads(self.project(query, query, query), self.batch_first)

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        if query is key and key is value and self._qkv_same_embed_dim:
            weight, bias = own_part(self.in_proj_weight, 0, 3), self.own_bias()
            return F.linear(shared(query, self.mesh), weight, bias).chunk(3, -1)
        once = {id(t): shared(t, self.mesh) for t in (query, key, value)}
        given = [once[id(t)] for t in (query, key, value)]
        return [F.linear(rows, *of) for rows, of in zip(given, self.projections(), strict=True)]

    def own_bias(self) -> Tensor | None:
        return None if self.in_proj_bias is None else own_part(self.in_proj_bias, 0, 3)

    def projections(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weight and bias of the own heads' queries, keys and values."""
        weights: Sequence[Tensor]
        if self._qkv_same_embed_dim:
            weights = own_part(self.in_proj_weight, 0, 3).chunk(3)
        else:
            separate: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            weights = [weight.to_local() for weight in separate]
        bias = self.own_bias()
        return list(zip(weights, (None,) * 3 if bias is None else bias.chunk(3), strict=True))

    def project_query(self, query: Tensor) -> Tensor:
        return F.linear(query, *self.projections()[0])

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        rows = [F.linear(memory, *of) for of in self.projections()[1:]]
        keys, values = (t.contiguous() for t in self.all_heads(rows, self.batch_first))
        return keys, values

    def merge(self, out: Tensor, batch_first: bool) -> Tensor:
        rows = out.transpose(1, 2) if batch_first else out.permute(2, 0, 1, 3)
        found: Tensor = self.out_proj(rows.flatten(-2))  # whose style sums over the ranks
        return found

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        biases: Any = (self.bias_k, self.bias_v)
        own: Any = SimpleNamespace(add_zero_attn=self.add_zero_attn)
        own.bias_k, own.bias_v = (None if bias is None else bias.to_local() for bias in biases)
        return MultiheadAttention.extend(own, k, v)


def with_all_weights(module: Any, _: Any, results: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """A hook: the output, and the weights of all heads or their mean."""
    out, weights = results
    if weights is None:
        return results
    averaged = weights.dim() == out.dim()
    ranks = module.mesh.size()
    part = DTensor.from_local(
        weights / ranks if averaged else weights, module.mesh, [Partial() if averaged else Shard(-3)], run_check=False
    )
    return out, part.redistribute(placements=[Replicate()]).to_local()
