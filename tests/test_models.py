"""The suite of whole models: its variants agree, figures are of what was asked, and a wrong one is not timed."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from click.testing import CliRunner

from sdpa.bench import model_plots, models
from sdpa.bench.models import Disagreement, Sizes
from sdpa.cli.app import app
from sdpa.cli.models import as_dict

SMALL = Sizes(2, 16, 2, 24, 2)


def small(name):
    made = {
        "encoder": lambda: models.padded_encoder(SMALL, "cpu", torch.float32, training=False),
        "encoder_training": lambda: models.padded_encoder(SMALL, "cpu", torch.float32, training=True),
        "weights": lambda: models.attention_with_weights(SMALL, "cpu", torch.float32),
        "gpt": lambda: models.gpt_training(SMALL, "cpu", torch.float32),
        "vit": lambda: models.vit_inference(SMALL, "cpu", torch.float32),
        "llama": lambda: models.llama_decode(replace(SMALL, E=32, heads=4), "cpu", torch.float32),
    }
    return made[name]()


@pytest.mark.parametrize("name", ["encoder", "encoder_training", "weights", "gpt", "vit", "llama"])
def test_every_variant_is_timed_beside_torch(name):
    model = small(name)
    outcomes = models.run_model(model, rounds=2)
    assert [o.variant for o in outcomes] == list(model.variants) and {"torch", "ours"} <= set(model.variants)
    for outcome in outcomes:
        figures = as_dict(outcome, outcomes)
        assert figures["samples"] == 2 and figures["peak_bytes"] is None
        assert figures["tokens_per_s"] == pytest.approx(model.tokens / (figures["min_ms"] * 1e-3))
    best = max(as_dict(o, outcomes)["ratio"] for o in outcomes if o.variant in models.TORCHS)
    assert best == 1.0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_suites_name_what_they_measure(device):
    """Nothing is built before it is run: a GPU's suite is named without one."""
    made = models.models(device) if device == "cpu" else None
    if made is None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(models, "evenly_filled", lambda B, L, share, device: torch.ones(B, L, dtype=torch.bool))
            made = models.models(device)
    names = [model.name.partition(" ")[0] for model in made]
    assert {"padded", "attention", "GPT", "ViT", "Llama"} == set(names)
    for model in made:
        compiled = [name for name in model.variants if name.endswith("compiled")]
        assert bool(compiled) == (device == "cuda" and model.name.partition(" ")[0] in ("GPT", "ViT", "Llama"))


def test_tokens_are_real_ones():
    padding = models.evenly_filled(4, 16, 0.5, "cpu")
    assert (~padding).sum(1).tolist() == [1, 5, 11, 16]
    assert small("encoder").tokens == int((~models.evenly_filled(SMALL.B, SMALL.L, 0.5, "cpu")).sum())


def test_a_wrong_variant_is_not_timed():
    model = small("weights")
    wrong = replace(model, variants={**model.variants, "ours": lambda: lambda: torch.zeros(3 * SMALL.E, SMALL.E)})
    with pytest.raises(Disagreement, match=r"attention with weights.*: ours is 1 away from torch"):
        models.run_model(wrong, rounds=1)


def test_the_fast_path_is_given_back():
    before = torch.backends.mha.get_fastpath_enabled()
    with models.fast_path(not before):
        assert torch.backends.mha.get_fastpath_enabled() is not before
    assert torch.backends.mha.get_fastpath_enabled() is before


def test_command(monkeypatch, tmp_path):
    monkeypatch.setattr("sdpa.cli.models.models", lambda device: (small("weights"), small("gpt")))
    path = tmp_path / "models.json"
    options = ["bench", "--suite", "models", "--repeat", "2", "--only", "GPT", "--json", str(path)]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert "GPT training 2 x 16" in result.output and "attention with weights" not in result.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["variant"] for row in rows] == ["written out", "torch", "ours"]


ROWS = [
    {"model": "GPT", "variant": f"{name}{compiled}", "tokens_per_s": 1234.5 * number, "ratio": number / 2}
    for compiled in ("", " compiled") for number, name in enumerate(("written out", "torch", "ours"), 1)
]  # fmt: skip


def test_bars_stand_as_in_nanogpts_figure():
    stages = model_plots.stages_of(ROWS)
    order = [(stage, [row["variant"] for _, row in bars]) for stage, bars in stages.items()]
    assert order == [
        ("written out", ["written out"]), ("written out\ncompiled", ["written out compiled"]),
        ("fused", ["torch", "ours"]), ("fused\ncompiled", ["torch compiled", "ours compiled"]),
    ]  # fmt: skip
    places = [place for bars in stages.values() for place, _ in bars]
    assert places == sorted(places) and min(b - a for a, b in pairwise(places)) == 1.0
    eager = model_plots.stages_of([{**row, "model": "encoder"} for row in ROWS[1:3]])
    assert list(eager) == ["fused"]
    assert [model_plots.short(x) for x in (12.34, 12340, 1234000)] == ["12.3", "12.3k", "1.23M"]


def test_every_variant_has_a_colour():
    made = (small(name) for name in ("encoder", "encoder_training", "weights", "gpt", "vit", "llama"))
    assert {name for model in made for name in model.variants} == set(model_plots.COLORS)


def test_plot(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("sdpa.cli.models.models", lambda device: (small("encoder"), small("weights"), small("gpt")))
    path, picture, again = (tmp_path / name for name in ("m.json", "m.png", "again.png"))
    options = ["bench", "--suite", "models", "--repeat", "1", "--json", str(path), "--plot", str(picture)]
    assert CliRunner().invoke(app, options).exit_code == 0
    assert picture.stat().st_size > 5000
    result = CliRunner().invoke(app, ["bench", "--from-json", str(path), "--plot", str(again), "--only", "GPT"])
    assert result.exit_code == 0 and 5000 < again.stat().st_size < picture.stat().st_size
    model_plots.plot_models(again, "GPT", ROWS)


@pytest.mark.parametrize("text,said", [
    (None, "No such file"), ("no JSON", "is not what sdpa bench --json writes"), ("{}", "is not what sdpa bench"),
    ('{"suite": "tiny"}', "holds suite tiny, expected models"),
    ('{"suite": "models", "rows": [], "versions": {}, "description": ""}', "there is no model to plot"),
])  # fmt: skip
def test_wrong_files(text, said, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "m.json"
    if text is not None:
        path.write_text(text)
    result = CliRunner().invoke(app, ["bench", "--from-json", str(path), "--plot", str(tmp_path / "m.png")])
    assert result.exit_code == 1 and said in " ".join(result.output.split())


@pytest.mark.parametrize("options,text", [
    (["--only", "nothing"], "no model of suite models contains 'nothing'"),
    (["--from-json", "m.json"], "--from-json needs --plot FILE"),
    (["--suite", "cpu-forward"], "suite models runs alone"),
])  # fmt: skip
def test_wrong_arguments(options, text):
    result = CliRunner().invoke(app, ["bench", "--suite", "models", *options])
    assert result.exit_code == 2 and text in " ".join(result.output.split())
