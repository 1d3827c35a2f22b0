"""TransformerDecoder.step: position by position what forward gives at once, in stores that never change their size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_nn_stacks import NoHost

from sdpa import nn

D, HEADS, B, S, T = 24, 3, 4, 6, 7


def decoder_of(batch_first, norm_first, bias=True):
    torch.manual_seed(1)
    layer = nn.TransformerDecoderLayer(
        D, HEADS, 32, 0.0, norm_first=norm_first, batch_first=batch_first, bias=bias, dtype=torch.float64
    )
    return nn.TransformerDecoder(layer, 2, torch.nn.LayerNorm(D, dtype=torch.float64)).eval()


def draw(rows, batch_first, seed):
    made = torch.randn(B, rows, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return made if batch_first else made.transpose(0, 1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("batch_first,norm_first,bias", [(True, False, True), (False, True, False), (True, True, True)])
def test_steps_are_the_forward(batch_first, norm_first, bias, padded):
    decoder = decoder_of(batch_first, norm_first, bias)
    tgt, memory = draw(T, batch_first, 1), draw(S, batch_first, 2)
    mask = torch.arange(S) >= torch.tensor([S, 2, 1, 5])[:, None] if padded else None
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    wanted = decoder(tgt, memory, tgt_mask=causal, memory_key_padding_mask=mask)
    dim = 1 if batch_first else 0
    cache = decoder.new_cache(memory, 10, mask)
    assert cache.max_length == 10
    for parts in ([3, 1, 1, 2], [1] * T, [T]):
        cache.reset()
        with torch.no_grad():
            found = [decoder.step(part, cache) for part in tgt.split(parts, dim)]
        torch.testing.assert_close(torch.cat(found, dim), wanted, rtol=1e-9, atol=1e-10)
        assert cache.lengths.tolist() == [T] * B


def test_nothing_comes_to_the_host():
    decoder = decoder_of(True, False)
    cache = decoder.new_cache(draw(S, True, 2), T)
    with NoHost(), torch.no_grad():
        decoder.step(draw(1, True, 1), cache)
        decoder.step(draw(2, True, 3), cache)


def test_stores_stay_where_they_are():
    """As a CUDA graph needs it: a step writes into the same tensors."""
    decoder = decoder_of(True, False)
    cache = decoder.new_cache(draw(S, True, 2), T)
    before = [t.data_ptr() for s in (*cache.own, *cache.memory) for t in (s.keys, s.values)] + [
        cache.lengths.data_ptr()
    ]
    with torch.no_grad():
        decoder.step(draw(2, True, 1), cache)
    cache.reorder(torch.tensor([1, 0, 2, 3]))
    after = [t.data_ptr() for s in (*cache.own, *cache.memory) for t in (s.keys, s.values)] + [cache.lengths.data_ptr()]
    assert before == after


def test_beams_change_places():
    decoder = decoder_of(True, False)
    memory, first, second = draw(S, True, 2), draw(3, True, 3), draw(1, True, 4)
    order = torch.tensor([2, 2, 0, 1])
    cache, other = decoder.new_cache(memory, T), decoder.new_cache(memory[order], T)
    with torch.no_grad():
        decoder.step(first, cache)
        cache.reorder(order)
        decoder.step(first[order], other)
        torch.testing.assert_close(decoder.step(second, cache), decoder.step(second, other))


def test_wrong_layers_and_masks():
    decoder, memory = decoder_of(True, False), draw(S, True, 2)
    with pytest.raises(ValueError, match=r"must be bool here, got torch.float64"):
        decoder.new_cache(memory, T, torch.zeros(B, S, dtype=torch.float64))
    decoder.layers[1].self_attn.add_zero_attn = True
    with pytest.raises(ValueError, match="layer 1 has bias_k or a zero key"):
        decoder.new_cache(memory, T)

    class Own(torch.nn.TransformerDecoderLayer):
        pass

    plain = nn.TransformerDecoder(Own(D, HEADS, batch_first=True), 1)
    with pytest.raises(TypeError, match=r"needs sdpa.nn.TransformerDecoderLayer, got Own as layer 0"):
        plain.new_cache(memory.float(), T)


MEMORY, TGT, HIDDEN = draw(S, True, 2), draw(1, True, 1), torch.zeros(B, S, dtype=torch.bool)
DIMENSIONS = r"must be \(batch, length, features\), got shape"
MASK = rf"memory_key_padding_mask must have shape \({B}, {S}\), as memory has {B} sequences of {S} positions, got "
ORDER = rf"order must be int64 or int32 of shape \({B},\), got "
# name: (call of a decoder and its cache, exception, pattern)
WRONG = {
    "no cache": (lambda d, c: d.step(TGT, None), TypeError, "cache must be a DecoderCache, .*, got NoneType"),
    "no target": (lambda d, c: d.step(None, c), TypeError, "tgt must be a Tensor, got NoneType"),
    "target": (lambda d, c: d.step(TGT[0], c), ValueError, f"tgt {DIMENSIONS}"),
    "layers": (lambda d, c: d.step(TGT, replace(c, own=())), ValueError, "is of 0 layers, expected this decoder's 2"),
    "no memory": (lambda d, c: d.new_cache(None, T), TypeError, "memory must be a Tensor, got NoneType"),
    "memory": (lambda d, c: d.new_cache(MEMORY[0], T), ValueError, f"memory {DIMENSIONS}"),
    "features": (
        lambda d, c: d.step(TGT[..., 1:], c),
        ValueError,
        rf"^tgt must be \(batch, length, {D}\), got shape \({B}, 1, {D - 1}\)$",
    ),
    "memory's features": (
        lambda d, c: d.new_cache(MEMORY[..., 1:], T),
        ValueError,
        rf"^memory must be \(batch, length, {D}\), got shape \({B}, {S}, {D - 1}\)$",
    ),
    "no mask": (lambda d, c: d.new_cache(MEMORY, T, [S]), TypeError, "_padding_mask must be a Tensor, got list"),
    "short mask": (lambda d, c: d.new_cache(MEMORY, T, HIDDEN[:, 1:]), ValueError, rf"{MASK}\({B}, {S - 1}\)"),
    "mask of one": (lambda d, c: d.new_cache(MEMORY, T, HIDDEN[:1]), ValueError, rf"{MASK}\(1, {S}\)"),
    "flat mask": (lambda d, c: d.new_cache(MEMORY, T, HIDDEN[:, 0]), ValueError, rf"{MASK}\({B},\)"),
    "no order": (lambda d, c: c.reorder([0, 1, 2, 3]), TypeError, "order must be a Tensor, got list"),
    "short order": (lambda d, c: c.reorder(torch.tensor([0])), ValueError, rf"{ORDER}torch.int64 of shape \(1,\)"),
    "one number": (lambda d, c: c.reorder(torch.tensor(0)), ValueError, rf"{ORDER}torch.int64 of shape \(\)"),
    "bool order": (lambda d, c: c.reorder(HIDDEN[:, 0]), ValueError, f"{ORDER}torch.bool"),
    "float order": (lambda d, c: c.reorder(torch.zeros(B)), ValueError, f"{ORDER}torch.float32"),
}


def test_fx_is_told_what_can_trace_a_step():
    decoder = decoder_of(True, False)
    cache = decoder.new_cache(MEMORY, T)
    for call in (lambda memory: decoder.new_cache(memory, T), lambda tgt: decoder.step(tgt, cache)):
        with pytest.raises(TypeError, match=r"must be a Tensor, got Proxy: .* use torch\.export$"):
            torch.fx.symbolic_trace(call)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    decoder = decoder_of(True, False)
    call, kind, pattern = WRONG[name]
    with pytest.raises(kind, match=pattern) as error:
        call(decoder, decoder.new_cache(MEMORY, T))
    assert len(str(error.value).splitlines()) == 1 and error.value.__context__ is None


def test_features_where_the_length_comes_first():
    decoder = decoder_of(False, False)
    cache = decoder.new_cache(draw(S, False, 2), T)
    with pytest.raises(ValueError, match=rf"^tgt must be \(length, batch, {D}\), got shape \(1, {B}, {D + 1}\)$"):
        decoder.step(torch.zeros(1, B, D + 1, dtype=torch.float64), cache)
    assert cache.lengths.tolist() == [0] * B


def test_more_positions_than_there_is_room():
    decoder = decoder_of(True, False)
    cache = decoder.new_cache(draw(S, True, 2), T - 1)
    with pytest.raises(IndexError, match=f"tgt has {T} positions, the cache room for {T - 1}"):
        decoder.step(draw(T, True, 1), cache)
    decoder.step(draw(T - 1, True, 1), cache)
    with pytest.raises(IndexError, match=f"no room for 1 more positions, max_length is {T - 1}"):
        decoder.step(draw(1, True, 1), cache)
    assert cache.lengths.tolist() == [T - 1] * B


# Gradients


def test_a_step_has_no_gradient_to_be_wrong():
    """Whatever the mode: nothing that a step keeps or returns asks for one, and torch says so in the backward."""
    decoder, memory, tgt = decoder_of(True, False), draw(S, True, 2), draw(2, True, 1)
    cache = decoder.new_cache(memory, T)
    out = decoder.step(tgt, cache)
    kept = [t for stored in (*cache.own, *cache.memory) for t in (stored.keys, stored.values)]
    assert torch.is_grad_enabled() and not any(t.requires_grad for t in (out, *kept))
    with pytest.raises(RuntimeError, match="does not require grad"):
        out.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inputs_that_require_a_gradient_are_refused_where_gradients_are_recorded(mode):
    decoder, memory = decoder_of(True, False), draw(S, True, 2).requires_grad_()
    tgt = draw(2, True, 1).requires_grad_()
    cache = decoder.new_cache(memory.detach(), T)
    with pytest.raises(RuntimeError, match=r"^memory requires a gradient, which .* or detach memory\.$"):
        decoder.new_cache(memory, T)
    with pytest.raises(RuntimeError, match=r"^tgt requires a gradient, which .* or detach tgt\.$"):
        decoder.step(tgt, cache)
    assert cache.lengths.tolist() == [0] * B
    with mode():
        found = decoder.step(tgt, decoder.new_cache(memory, T))
    assert torch.equal(found, decoder.step(tgt.detach(), cache))


@pytest.mark.parametrize("length", [0, -1, 2.5])
def test_wrong_lengths(length):
    with pytest.raises(ValueError, match=f"max_length must be a positive integer, got {length}"):
        decoder_of(True, False).new_cache(draw(S, True, 2), length)


@pytest.mark.parametrize("batch_first", [True, False])
def test_another_number_of_sequences(batch_first):
    decoder = decoder_of(batch_first, False)
    cache = decoder.new_cache(draw(S, batch_first, 2), T)
    tgt = draw(1, batch_first, 3)
    with pytest.raises(ValueError, match=f"tgt has 1 sequences, expected the cache's {B}"):
        decoder.step(tgt[:1] if batch_first else tgt[:, :1], cache)


def test_new_cache_of_a_symbolic_length():
    decoder = decoder_of(True, False)

    def generated(memory, x):
        return decoder.step(x, decoder.new_cache(memory, memory.shape[1] + 2))

    compiled = torch.compile(generated, dynamic=True, fullgraph=True, backend="aot_eager")
    for size in (S, S + 3):
        memory, x = torch.randn(B, size, D, dtype=torch.float64), draw(3, True, 5)
        torch.testing.assert_close(compiled(memory, x), generated(memory, x))


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_step_of_a_sharded_decoder(process_group):
    """fully_shard makes classes of its own of ours, and gathers parameters for a layer's forward only."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    decoder, sharded = decoder_of(True, False), decoder_of(True, False)
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    register_fsdp_forward_method(sharded, "step")
    memory, tgt = draw(S, True, 4), draw(T, True, 5)
    caches = [model.new_cache(memory, T) for model in (decoder, sharded)]
    for position in range(3):
        want, got = (m.step(tgt[:, position, None], c) for m, c in zip((decoder, sharded), caches, strict=True))
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(sharded(tgt, memory), decoder(tgt, memory))


class Own(nn.TransformerDecoderLayer):
    def _mha_block(self, *args, **kwargs):
        return 2 * super()._mha_block(*args, **kwargs)


def test_a_layer_with_code_of_its_own_has_no_cache():
    decoder = nn.TransformerDecoder(Own(D, HEADS, 32, batch_first=True, dtype=torch.float64), 1)
    with pytest.raises(TypeError, match="got Own as layer 0"):
        decoder.new_cache(draw(S, True, 4), T)


class OwnAttention(nn.MultiheadAttention):
    def forward(self, query, key, value, **options):
        return super().forward(query, key, value, **options)


@pytest.mark.parametrize("name", ["self_attn", "multihead_attn"])
def test_an_attention_with_code_of_its_own_has_no_cache(name):
    decoder = decoder_of(True, False)
    setattr(decoder.layers[1], name, OwnAttention(D, HEADS, batch_first=True, dtype=torch.float64))
    with pytest.raises(TypeError, match=f"needs sdpa.nn.MultiheadAttention, got OwnAttention as {name} of layer 1"):
        decoder.new_cache(draw(S, True, 4), T)
    assert decoder(draw(T, True, 1), draw(S, True, 4)).shape == (B, T, D)


def test_hooks_see_the_positions_of_a_step():
    decoder, seen, x = decoder_of(True, False), [], draw(2, True, 1)
    for name, module in decoder.named_modules():
        module.register_forward_pre_hook(lambda module, inputs, name=name: seen.append((name, inputs[0].shape)))
        module.register_forward_hook(lambda module, inputs, output, name=name: seen.append(f"after {name}"))
    cache = decoder.new_cache(draw(S, True, 2), T)
    got = decoder.step(x, cache)
    for part in ("", ".self_attn", ".multihead_attn", ".norm3"):
        for layer in ("layers.0", "layers.1"):
            assert seen.count((layer + part, x.shape)) == 1 and seen.count(f"after {layer}{part}") == 1
    torch.testing.assert_close(got, decoder_of(True, False).step(x, decoder.new_cache(draw(S, True, 2), T)))


def test_a_step_after_the_layers_were_exchanged():
    layer = torch.nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
    decoder = nn.TransformerDecoder(layer, 2).eval()
    nn.accelerate(decoder)
    cache = decoder.new_cache(torch.randn(2, 3, 16), 4)
    for each in decoder.layers:
        nn.restore(each)
    with pytest.raises(
        TypeError, match=r"step needs sdpa\.nn\.TransformerDecoderLayer, got TransformerDecoderLayer as layer 0"
    ):
        decoder.step(torch.randn(2, 1, 16), cache)
