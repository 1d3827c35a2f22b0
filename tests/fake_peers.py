"""What stands for packages of peers where they are not installed: of ZenTorch, OpenVINO and FlashInfer what `sdpa
bench` uses."""

from __future__ import annotations

import types

import torch


def zentorchs(seen):
    """Its operator, by torch's attention."""

    def zentorch_sdpa(q, k, v, is_causal, attn_mask):
        seen.append(attn_mask)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal), None

    return types.SimpleNamespace(zentorch_sdpa=zentorch_sdpa)


class OpenVINOs:
    """What is used of its package, on views of torch's memory; notes the views and what a model is compiled with."""

    def __init__(self) -> None:
        self.views, self.options, self.causal = {}, {}, None
        self.Core = self.opset13 = self
        self.Shape, self.Type = tuple, types.SimpleNamespace(bf16="bf16")
        self.create_infer_request = lambda: self

    class Tensor:
        def __init__(self, array, shape=None, element_type=None, shared_memory=False) -> None:
            assert array.flags.c_contiguous and (shared_memory or element_type == "bf16")
            self.array, self.shape, self.element_type = array, shape or array.shape, element_type or array.dtype

        def torchs(self):
            tensor = torch.from_numpy(self.array)
            return tensor.view(torch.bfloat16) if self.element_type == "bf16" else tensor

    def __call__(self):
        return self

    def parameter(self, shape, element_type):
        return tuple(shape), element_type

    def scaled_dot_product_attention(self, *inputs, causal):
        self.causal = causal
        return inputs

    def Model(self, results, inputs):
        assert results == [tuple(inputs)]
        return inputs

    def compile_model(self, inputs, device, options):
        assert device == "CPU"
        self.inputs, self.options = inputs, options
        return self

    def set_input_tensor(self, place, view):
        assert self.inputs[place] == (tuple(view.shape), view.element_type)
        self.views[place] = view

    def set_output_tensor(self, place, view):
        self.written = view

    def infer(self):
        given = (self.views[place].torchs() for place in range(len(self.inputs)))
        out = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=self.causal)
        self.written.torchs().copy_(out)


class FlashInfers:
    """Its attention for prefill, by torch's; notes the (queries, keys) of a batch entry that are planned."""

    def __init__(self, plans) -> None:
        self.plans = plans

    def BatchPrefillWithRaggedKVCacheWrapper(self, workspace, kv_layout):
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD"
        return self

    def plan(self, qo_indptr, kv_indptr, H, Hkv, D, Dv, *, causal, window_left, q_data_type):
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32 and len(qo_indptr) == len(kv_indptr)
        self.M, self.N, self.causal, self.window = int(qo_indptr[1]), int(kv_indptr[1]), causal, window_left
        self.shapes = (H, D), (Hkv, D), (Hkv, Dv)
        self.plans.append((self.M, self.N))

    def run(self, q, k, v):
        assert tuple(t.shape[1:] for t in (q, k, v)) == self.shapes
        q, k, v = (t.unflatten(0, (-1, n)).transpose(1, 2) for t, n in ((q, self.M), (k, self.N), (v, self.N)))
        distance = torch.arange(self.M)[:, None] + self.N - self.M - torch.arange(self.N)
        seen = (distance >= 0) | torch.tensor(not self.causal)
        if self.window >= 0:
            seen &= distance <= self.window
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)
