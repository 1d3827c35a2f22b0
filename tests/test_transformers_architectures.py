"""Some of the architectures of `transformers_cases.py`, of the installed release.

All of them, of any release: `python tests/transformers_cases.py`.
"""

from __future__ import annotations

import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="pip install transformers")

import transformers_cases as cases  # noqa: E402

SERVED = (
    "Llama",
    "Gemma2",
    "GptOss",
    "Llama4Text",
    "Cohere2",
    "OPT",
    "ModernBertDecoder",
    "CLIPVision",
    "Bart",
    "Whisper",
)
WITH_GRAPHS = ("Mistral", "Bart")
REFUSED = ("Falcon", "Deberta", "XLNet", "FSMT", "Git", "SamVision", "Data2VecVision", "Cvt", "GPTNeo")


@pytest.fixture(autouse=True)
def quiet():
    """transformers warns of right padding and of sizes that only such small models have."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(before)


@pytest.mark.parametrize("name", SERVED)
def test_like_transformers_own(name):
    assert cases.check(name, compiling=False) == "equal"


@pytest.mark.parametrize(
    "name", ["Bert", "T5", "DeepseekV32", "GlmMoeDsa", "DeepseekV4", "Inkling2Text", "BigBirdPegasus"]
)
def test_like_transformers_own_where_a_release_serves_them(name):
    said = cases.check(name, compiling=False)
    assert said in ("equal", "absent") or said.startswith("refused")


@pytest.mark.parametrize("name", WITH_GRAPHS)
def test_no_more_graphs_than_transformers_own(name):
    assert cases.check(name) == "equal"


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_a_model_is_made(name):
    assert cases.check(name).startswith("refused: ")


def test_a_trace_has_whatever_padding_it_is_given():
    class Traced(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = cases.made("Mistral", cases.NAME)

        def forward(self, ids, mask):
            return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    model, ids = Traced(), cases.ids(3, 12)
    traced = torch.jit.trace(model, (ids, torch.ones(3, 12, dtype=torch.long)), check_trace=False)
    for side in ("left", "right"):
        mask = cases.seen(3, 12, side)
        torch.testing.assert_close(traced(ids, mask)[mask.bool()], model(ids, mask)[mask.bool()], rtol=1e-4, atol=1e-4)
