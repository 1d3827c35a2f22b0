"""transformers' masks as fields: what they let through against its own tensors, and what reaches our attention."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs

transformers = pytest.importorskip("transformers", reason="pip install transformers")

from test_transformers import NAME, arguments_of, ids, left_padded, made  # noqa: E402
from transformers import masking_utils as theirs  # noqa: E402

from sdpa.integrations import transformers as integration  # noqa: E402
from sdpa.integrations.transformers_masks import FieldMask, attention_mask, held  # noqa: E402
from sdpa.mask import Mask  # noqa: E402

if "q_length" not in inspect.signature(theirs.sdpa_mask).parameters:
    pytest.skip("masks of earlier releases: test_transformers_models.py", allow_module_level=True)

FUNCTIONS = {
    "causal": (theirs.causal_mask_function, None),
    "bidirectional": (theirs.bidirectional_mask_function, None),
    "window": (theirs.sliding_window_causal_mask_function(3), 3),
    "bidirectional window": (theirs.sliding_window_bidirectional_mask_function(2), 2),
}
SIZES = {  # M, N, q_offset, kv_offset
    "whole": (6, 6, 0, 0),
    "continued": (4, 9, 5, 0),
    "step": (1, 7, 6, 0),
    "window of a cache": (3, 5, 8, 6),
    "step in a window": (1, 3, 8, 6),
    "longer keys": (4, 7, 0, 0),
    "between": (2, 9, 3, 0),
    "one of many": (1, 5, 0, 0),
}


def paddings(length):
    positions = torch.arange(length)
    return {
        "none": None,
        "ones": torch.ones(3, length, dtype=torch.bool),
        "left": positions >= torch.tensor([0, 1, length - 1])[:, None],
        "right": positions < torch.tensor([length, length - 1, 1])[:, None],
        "holes": positions % 3 != torch.tensor([0, 1, 5])[:, None],
        "short": torch.ones(3, length - 1, dtype=torch.bool),
    }


@pytest.mark.parametrize("padding", paddings(2))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_like_their_tensor(name, size, padding):
    M, N, q_offset, kv_offset = SIZES[size]
    function, window = FUNCTIONS[name]
    given = {
        "batch_size": 3, "q_length": M, "kv_length": N, "q_offset": q_offset, "kv_offset": kv_offset,
        "mask_function": function, "attention_mask": paddings(kv_offset + N)[padding], "local_size": window,
    }  # fmt: skip
    wanted = theirs.sdpa_mask(**given, allow_is_causal_skip=False)
    found = attention_mask(**given)
    assert found.shape == wanted.shape == (3, 1, M, N)
    assert torch.equal(found[...], wanted)
    if size not in ("between", "longer keys", "one of many"):
        assert isinstance(found, FieldMask)
        allowed = found.mask.allowed
        assert allowed is None or allowed.shape == (3, 1, 1, N)


@pytest.mark.parametrize("last", [False, True])  # as transformers 5.23 has it, and as its other releases do
@pytest.mark.parametrize("window", [None, 3])
def test_documents_packed_in_a_row(window, last):
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5, 6, 7]])
    documents = theirs.find_packed_sequence_indices(positions)
    inner = FUNCTIONS["causal" if window is None else "window"][0]
    remap = getattr(theirs, "remap_positions_for_packed_sequence", lambda inner, positions: inner)
    parts = theirs.packed_sequence_mask_function(documents), remap(inner, positions)
    function = theirs.and_masks(*(reversed(parts) if last else parts))
    given = {"batch_size": 2, "q_length": 9, "kv_length": 9, "mask_function": function, "local_size": window}
    found = attention_mask(**given, allow_is_causal_skip=False)
    assert found.mask.segments is documents and found.mask.allowed is None
    assert torch.equal(found[...], theirs.sdpa_mask(**given, allow_is_causal_skip=False))


@pytest.mark.parametrize("options", [
    {"mask_function": theirs.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long)), "local_size": 3},
    {"mask_function": theirs.or_masks(theirs.causal_mask_function, lambda b, h, q, k: k < 2), "use_vmap": True,
     "allow_is_causal_skip": False},
    {"mask_function": theirs.sliding_window_causal_mask_function(4), "local_size": 3},
    {"allow_is_causal_skip": False},
    {"q_offset": torch.tensor(2), "allow_is_causal_skip": False},
], ids=["chunked", "custom", "another window", "asked for a tensor", "a static cache's step"])  # fmt: skip
def test_what_stays_a_tensor(options):
    given = {"batch_size": 2, "q_length": 4, "kv_length": 6, **options}
    assert torch.equal(attention_mask(**given), theirs.sdpa_mask(**given))


def test_functions_are_told_apart_by_code_and_by_what_they_hold():
    window = theirs.sliding_window_causal_mask_function
    assert held(window(3), window(3)) == [] and held(window(3), window(4)) is None
    assert held(window(3), theirs.causal_mask_function) is None
    assert held(lambda b, h, q, k: q >= k, theirs.causal_mask_function) is None


@pytest.fixture
def seen(monkeypatch):
    """The masks that our attention is called with."""
    masks = []

    def spy(query, key, value, mask, *args, **options):
        masks.append(mask)
        return attend(query, key, value, mask, *args, **options)

    attend = integration.scaled_dot_product_attention
    monkeypatch.setattr(integration, "scaled_dot_product_attention", spy)
    return masks


def right_padded(rows, columns):
    return left_padded(rows, columns).flip(1)


@pytest.mark.parametrize("name,padded,wanted", [
    ("llama", right_padded, {"causal": True, "lengths": [11, 8, 6]}),
    ("llama", left_padded, {"causal": True, "allowed": (3, 1, 1, 11)}),
    ("mistral", None, {"causal": True, "window": (4, 0)}),
    ("mistral", right_padded, {"causal": True, "window": (4, 0), "lengths": [11, 8, 6]}),
    ("bert", right_padded, {"causal": False, "lengths": [11, 8, 6]}),
])  # fmt: skip
def test_fields_reach_our_attention(name, padded, wanted, seen):
    padding = {} if padded is None else {"attention_mask": padded(3, 11)}
    results = [made(name, way)(input_ids=ids(3, 11), **padding)[0] for way in ("eager", NAME)]
    real = padding.get("attention_mask", torch.ones(3, 11)).bool()
    torch.testing.assert_close(results[1][real], results[0][real], rtol=1e-4, atol=2e-5)
    for mask in seen:
        assert mask.causal == wanted["causal"] and mask.window == wanted.get("window")
        assert (mask.lengths is None) == ("lengths" not in wanted)
        assert mask.lengths is None or mask.lengths.tolist() == wanted["lengths"]
        assert (None if mask.allowed is None else mask.allowed.shape) == wanted.get("allowed")
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_packed_documents_like_eager(name, seen):
    positions = torch.cat([torch.arange(4), torch.arange(7)])[None].expand(2, -1)
    results = [
        made(name, way)(input_ids=ids(2, 11), position_ids=positions, use_cache=False).logits for way in ("eager", NAME)
    ]
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=2e-5)
    assert all(mask.segments is not None and mask.allowed is None for mask in seen) and len(seen) == 2


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_prefill_of_a_static_cache_has_fields(name, seen):
    options = {"max_new_tokens": 1, "cache_implementation": "static", "disable_compile": True}
    made(name, NAME).generate(ids(3, 9), attention_mask=left_padded(3, 9), **options)
    if transformers.__version__.startswith("5.8."):
        pytest.skip("this release of transformers asks for tensors here")
    windows = {"llama": [None] * 2, "mistral": [(4, 0)] * 2, "gemma2": [(4, 0), None]}
    assert [mask.window for mask in seen] == windows[name]
    assert all(mask.causal and mask.allowed.shape[1:3] == (1, 1) for mask in seen)


def rows_of_masks(graph):
    """How many queries the masks tell apart that a graph gives to our operator."""
    calls = [n for m in graph.modules() for n in m.graph.nodes if "attention_forward" in str(n.target)]
    given = [a.meta["example_value"] for n in calls for a in n.args if isinstance(a, torch.fx.Node) and a.meta]
    assert calls
    return {value.shape[-2] for value in given if isinstance(value, torch.Tensor) and value.dtype == torch.bool}


COPIES = pytest.mark.skipif(
    torch.__version__.startswith("2.10."),
    reason="transformers' T5 copies its settings, which Dynamo of 2.10 cannot trace",
)


@pytest.mark.parametrize("name,padded,rows", [
    ("llama", False, set()), ("llama", True, {1}), ("bert", True, {1}), pytest.param("t5", True, {1}, marks=COPIES),
    ("mistral", False, {11}), ("gemma2", True, {1, 11}),
])  # fmt: skip
def test_a_compiled_model_is_one_graph(name, padded, rows):
    model, arguments = made(name, NAME).requires_grad_(False), arguments_of(name, padded)
    wanted, recorded = model(**arguments)[0], EagerAndRecordGraphs()
    torch._dynamo.reset()
    found = torch.compile(model, backend=recorded, fullgraph=True)(**arguments)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)
    (graph,) = recorded.graphs
    assert rows_of_masks(graph) == rows


def test_it_comes_into_a_graph_that_began_before():
    """As of models whose own code breaks the graph between the mask and a layer."""
    fields = Mask(causal=True, lengths=torch.tensor([3, 2]))
    mask, module = FieldMask(fields, (2, 1, 4, 4), "cpu"), torch.nn.Module()
    q = torch.randn(2, 2, 4, 8)

    def layer(q, mask):
        return integration.attention_forward(module, q, q, q, mask)[0]

    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for keys in (mask, FieldMask(Mask(causal=True), (2, 1, 4, 4), "cpu")):
        torch.testing.assert_close(compiled(q, keys), layer(q, keys))
    assert not torch.equal(compiled(q, mask), compiled(q, keys))


def test_a_model_may_treat_it_as_a_tensor():
    mask = FieldMask(Mask(causal=True, lengths=torch.tensor([3, 2])), (2, 1, 4, 4), "cpu")
    tensor = mask[...]
    assert (mask.ndim, mask.dtype, mask.shape) == (tensor.ndim, tensor.dtype, tensor.shape)
    assert mask.contiguous() is mask and torch.equal(mask[:, :, -1:], tensor[:, :, -1:])
    assert torch.equal(mask.float(), tensor.float()) and torch.equal(mask.to(torch.float32), tensor.float())
    assert torch.equal(~mask, ~tensor) and torch.equal(torch.cat([mask, tensor]), torch.cat([tensor, tensor]))
    assert torch.equal(tensor & mask, tensor)
    for twin in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), mask.to("cpu")):
        assert isinstance(twin, FieldMask) and torch.equal(twin[...], tensor)
    assert mask.to("meta").mask.lengths.is_meta and mask.to("meta").device.type == "meta"


@pytest.mark.filterwarnings("ignore:PegasusXEncoder computes attention by its own code")
def test_a_model_that_does_not_say_it_is_causal_sees_no_future():
    """PegasusX's attention has is_causal=False in its decoder, and transformers leaves it the mask."""
    config = transformers.PegasusXConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=0, block_size=4,
        num_global_tokens=2, dropout=0.0, decoder_start_token_id=0, attn_implementation=NAME,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.PegasusXForConditionalGeneration(config).eval()
    tokens, target = torch.arange(1, 9)[None], torch.tensor([[3, 5, 7, 9, 11]])
    other = target.index_fill(1, torch.tensor([4]), 13)
    with torch.no_grad():
        one, two = (model(input_ids=tokens, decoder_input_ids=t).logits[0] for t in (target, other))
    assert torch.equal(one[:4], two[:4])
    assert not torch.equal(one[4], two[4])


def test_a_field_mask_counts_as_its_tensor():
    mask = FieldMask(Mask(causal=True), (2, 1, 3, 3), "cpu")
    tensor = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
    for found, wanted in (
        (mask == 0, tensor == 0), (mask != 0, tensor != 0), (mask & mask, tensor), (mask * 2, tensor * 2),
        (1.0 + mask, 1.0 + tensor), (mask.to(torch.float16), tensor.half()), (mask.to(dtype=torch.int32), tensor.int()),
        (mask.to(torch.zeros(1)), tensor.float()), (mask.to("cpu", torch.float64), tensor.double()),
    ):  # fmt: skip
        assert torch.equal(found, wanted) and found.dtype == wanted.dtype
    assert len(mask) == 2 and len({mask}) == 1
    assert isinstance(mask.to("cpu"), FieldMask) and isinstance(mask.to(device="cpu"), FieldMask)
