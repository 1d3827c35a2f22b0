"""A server's decoding: sequences of different lengths come and go, their keys and values in pages of one cache.

    python examples/serve_pages.py [--tokens 48] [--device cuda]

Beside it the plain way, a padded cache (B, H, longest, D) with a boolean mask for torch's function. Both decode the
same requests by the same weights, which are random; the tokens are equal. When a sequence ends its pages are free for
the next request, which begins at once; the padded cache has a row for each place and is as long as the longest.
"""

from __future__ import annotations

import argparse
import random

import torch
import torch.nn.functional as F
from timing import fastest, positive, table, usable
from torch import Tensor, nn

import sdpa

VOCABULARY, HEADS, KV_HEADS, D, LAYERS = 500, 8, 2, 64, 2
WIDTH = HEADS * D
PLACES, PAGE, LONGEST = 8, 64, 2048  # sequences at a time; keys of a page; keys of a sequence at most
SEED = 0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * D, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, attend) -> Tensor:
        """x: (PLACES, WIDTH), the newest token of each."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, D)).split((HEADS, KV_HEADS, KV_HEADS), 1)
        return x + self.proj(attend(q, k, v).flatten(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, attends) -> Tensor:
        x = self.embedding(tokens)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, attend)
        return x @ self.embedding.weight.T  # (PLACES, VOCABULARY)


class Pages:
    """The cache of all layers in pages, and which pages each place has."""

    def __init__(self, device: str) -> None:
        count = PLACES * LONGEST // PAGE
        shape = (LAYERS, count, PAGE, KV_HEADS, D)
        self.k, self.v = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        self.free, self.owned = list(range(count)), [[] for _ in range(PLACES)]
        self.table = torch.zeros(PLACES, LONGEST // PAGE, dtype=torch.int32)
        self.most = 0  # pages that were in use at once

    def attends(self, lengths: list[int], device: str):
        """What attends in each layer, after it has stored the newest keys at their places."""
        for place, length in enumerate(lengths):
            if length == 0:  # a new request: the pages of the one before are free
                self.free += self.owned[place]
                self.owned[place] = []
            if length % PAGE == 0:
                self.owned[place].append(self.free.pop())
                self.table[place, length // PAGE] = self.owned[place][-1]
        self.most = max(self.most, sum(map(len, self.owned)))
        now = torch.tensor(lengths)
        pages = self.table[torch.arange(PLACES), now // PAGE].to(device, torch.long)
        rows, width = (now % PAGE).to(device), max(lengths) // PAGE + 1
        table, counts = self.table[:, :width].to(device), (now + 1).to(device)

        def of_layer(number: int):
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                self.k[number, pages, rows], self.v[number, pages, rows] = k, v
                cache = self.k[number], self.v[number]
                return sdpa.paged_attention(q[:, None], *cache, table, counts, enable_gqa=True)[:, 0]

            return attend

        return [of_layer(number) for number in range(LAYERS)]


class Padded:
    """The plain cache: as long for each place as the longest sequence may be."""

    def __init__(self, device: str) -> None:
        shape = (LAYERS, PLACES, KV_HEADS, LONGEST, D)
        self.k, self.v = torch.zeros(shape, device=device), torch.zeros(shape, device=device)

    def attends(self, lengths: list[int], device: str):
        now, width = torch.tensor(lengths, device=device), max(lengths) + 1
        mask = (torch.arange(width, device=device) <= now[:, None])[:, None, None]  # (PLACES, 1, 1, width)
        places = torch.arange(PLACES, device=device)

        def of_layer(number: int):
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                self.k[number, places, :, now], self.v[number, places, :, now] = k, v
                keys, values = self.k[number, :, :, :width], self.v[number, :, :, :width]
                out = F.scaled_dot_product_attention(q[:, :, None], keys, values, mask, enable_gqa=True)
                return out[:, :, 0]

            return attend

        return [of_layer(number) for number in range(LAYERS)]


@torch.no_grad()
def serve(model: Model, cache: Pages | Padded, steps: int, device: str) -> Tensor:
    """(steps, PLACES, VOCABULARY) logits; each next token is the likeliest. A request is how long its sequence gets."""
    choose = random.Random(SEED)
    lengths, ends = [0] * PLACES, [choose.randint(PAGE, LONGEST - 1) for _ in range(PLACES)]
    tokens, logits = torch.arange(PLACES, device=device), []
    for _ in range(steps):
        logits.append(model(tokens, cache.attends(lengths, device)))
        tokens = logits[-1].argmax(-1)
        lengths = [length + 1 for length in lengths]
        for place in range(PLACES):
            if lengths[place] == ends[place]:
                lengths[place], ends[place] = 0, choose.randint(PAGE, LONGEST - 1)
    return torch.stack(logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=positive, default=600, help="of each place")
    parser.add_argument("--device", type=usable, default="cpu")
    given = parser.parse_args()
    torch.manual_seed(SEED)
    model = Model().to(given.device)
    logits: dict[str, Tensor] = {}
    caches: dict[str, Pages | Padded] = {}

    def way(name: str, kind: type[Pages] | type[Padded]):
        def run() -> None:
            caches[name] = kind(given.device)
            logits[name] = serve(model, caches[name], given.tokens, given.device)

        return run

    ways = {"padded, torch": way("padded, torch", Padded), "pages, sdpa": way("pages, sdpa", Pages)}
    seconds = fastest(ways, 1, given.device)
    pages = caches["pages, sdpa"].most
    print(f"{PLACES} sequences of up to {LONGEST} keys; at most {pages} of {PLACES * LONGEST // PAGE} pages in use")
    print(table(seconds, PLACES * given.tokens, "tokens"))
    ours, plain = logits["pages, sdpa"], logits["padded, torch"]
    same = torch.equal(ours.argmax(-1), plain.argmax(-1))
    distance = float((ours - plain).abs().max() / plain.abs().max())
    print(f"same tokens: {same}; largest distance of the logits, as a share of the largest: {distance:.1e}")


if __name__ == "__main__":
    main()
