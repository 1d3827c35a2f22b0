"""TransformerDecoder.step: position by position what forward gives at once, in stores that never change their size."""

from __future__ import annotations

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
    with pytest.raises(IndexError), torch.no_grad():
        decoder.step(draw(T, True, 1), decoder.new_cache(memory, T - 1))
    decoder.layers[1].self_attn.add_zero_attn = True
    with pytest.raises(ValueError, match="layer 1 has bias_k or a zero key"):
        decoder.new_cache(memory, T)

    class Own(torch.nn.TransformerDecoderLayer):
        pass

    plain = nn.TransformerDecoder(Own(D, HEADS, batch_first=True), 1)
    with pytest.raises(TypeError, match=r"needs sdpa.nn.TransformerDecoderLayer, got Own as layer 0"):
        plain.new_cache(memory.float(), T)


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
