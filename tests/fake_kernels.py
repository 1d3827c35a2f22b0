"""A catalog of fake kernels, whose modules answer with zeros or fail as they are told."""

from __future__ import annotations

import sys
import types

import torch

from sdpa.dispatch import candidates, catalog, select, tables
from sdpa.dispatch.kernel import Kernel, load_module
from sdpa.problem import Gradients, Results, Tile

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
ONE_TILE = (Tile(64, 64),)


def fake_kernel(monkeypatch, name, error=None, tiles=ONE_TILE, **limits):
    """A row whose module answers with zeros, or raises `error` (or what it says of a problem and a tile); `ran` counts
    and `tiles_seen` lists."""
    module = types.ModuleType(f"fake_kernels.{name}")
    module.ran, module.tiles_seen = 0, []

    def work(problem, tile):
        module.ran += 1
        module.tiles_seen.append(tile)
        raised = error(problem, tile) if isinstance(error, types.FunctionType) else error
        if raised is not None:
            raise raised

    def forward(inputs, problem, tile):
        work(problem, tile)
        return Results(torch.zeros_like(inputs.q), None)

    def backward(inputs, results, upstream, problem, tile):
        work(problem, tile)
        return Gradients(*(torch.zeros_like(t) for t in inputs[:3]))

    module.forward, module.backward = forward, backward
    module.TILES, module.unavailable = tiles, lambda: None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    options = {"family": "flash", "efficiency": 0.5, **limits}
    row = Kernel(name=name, module=module.__name__, devices=(), dtypes=DTYPES, features=catalog.EVERYTHING, summary="",
                 **options)  # fmt: skip
    monkeypatch.setitem(catalog.BY_NAME, name, row)
    return row


def catalog_of_fakes(monkeypatch, tmp_path):
    """The body of a fixture: a function that puts rows (name, error, limits) in the catalog's place, the fastest first,
    and returns their modules."""
    monkeypatch.setenv("SDPA_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(tables, "SHIPPED", tmp_path)

    def put(*given):
        made = [
            fake_kernel(monkeypatch, name, error, **{"overhead": 1e-6 * (1 + place), **limits})
            for place, (name, error, limits) in enumerate(given)
        ]
        monkeypatch.setattr(candidates, "KERNELS", tuple(made))
        load_module.cache_clear()
        select.clear_caches()
        return [row.load() for row in made]

    yield put
    select.clear_caches()
