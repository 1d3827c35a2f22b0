"""diffusers' models with our attention: results and gradients against its own processors, and what is left alone."""

from __future__ import annotations

import copy
import pickle
import runpy
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs

diffusers = pytest.importorskip("diffusers", reason="pip install diffusers")

from diffusers.models import attention_processor as processors  # noqa: E402

import sdpa  # noqa: E402
from sdpa.integrations.diffusers import Routed, accelerate, restore  # noqa: E402

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
UNET = {
    "sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4,
    "cross_attention_dim": 12, "attention_head_dim": 4,
}  # fmt: skip
CROSS = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}  # fmt: skip
SIMPLE = {"down_block_types": ("SimpleCrossAttnDownBlock2D", "DownBlock2D"),
          "up_block_types": ("UpBlock2D", "SimpleCrossAttnUpBlock2D"),
          "mid_block_type": "UNetMidBlock2DSimpleCrossAttn", "encoder_hid_dim": 12}  # fmt: skip
MODELS = {
    "unet": lambda: diffusers.UNet2DConditionModel(**UNET, **CROSS),
    "unet_added_keys": lambda: diffusers.UNet2DConditionModel(**UNET, **SIMPLE),
    "dit": lambda: diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=6, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=7,
    ),
    "sd3": lambda: diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=12, caption_projection_dim=16, pooled_projection_dim=10, out_channels=4,
        qk_norm="rms_norm",
    ),
    "flux": lambda: diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=12, pooled_projection_dim=10, axes_dims_rope=(4, 4, 8),
    ),
    "vae": lambda: diffusers.AutoencoderKL(
        block_out_channels=(8,), down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
        norm_num_groups=4,
    ),
}  # fmt: skip


def made(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters():  # some begin as zeros, and hide the rest
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def arguments_of(name):
    torch.manual_seed(1)
    image, step = torch.randn(2, 4, 8, 8), torch.tensor([3, 5])
    text, pooled = torch.randn(2, 7, 12), torch.randn(2, 10)
    seen = (torch.arange(7) < torch.tensor([[4], [7]])).long()
    return {
        "unet": {"sample": image, "timestep": step, "encoder_hidden_states": text, "encoder_attention_mask": seen},
        "unet_added_keys": {"sample": image, "timestep": step, "encoder_hidden_states": text},
        "dit": {"hidden_states": image, "timestep": step, "class_labels": torch.tensor([0, 6])},
        "sd3": {"hidden_states": image, "timestep": step, "encoder_hidden_states": text, "pooled_projections": pooled},
        "flux": {
            "hidden_states": torch.randn(2, 9, 4), "timestep": step / 10, "encoder_hidden_states": text,
            "pooled_projections": pooled, "img_ids": torch.randn(9, 3), "txt_ids": torch.zeros(7, 3),
        },
        "vae": {"sample": torch.randn(2, 3, 8, 8)},
    }[name]  # fmt: skip


def result_of(model, name):
    return model(**arguments_of(name)).sample


def gradients_of(model, name):
    learned = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(result_of(model, name).square().mean(), learned, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def last_kernel():
    return sdpa.last_choice().kernel.name


@pytest.fixture
def unet():
    return made("unet")


@pytest.mark.parametrize("name", MODELS)
def test_like_diffusers_own(name):
    model = made(name)
    wanted, gradients = result_of(model, name), gradients_of(model, name)
    state = dict(model.state_dict())
    report = accelerate(model)
    layers = [layer for layer, module in model.named_modules() if hasattr(module, "set_processor")]
    assert layers and report.swapped == [f"{layer}.processor" for layer in layers] and not report.left
    with sdpa.sdpa_kernel("cpu_flash"):
        torch.testing.assert_close(result_of(model, name), wanted, **CLOSE)
        assert last_kernel() == "cpu_flash"
        torch.testing.assert_close(gradients_of(model, name), gradients, **CLOSE)
    assert all(model.state_dict()[key] is not None for key in state) and len(model.state_dict()) == len(state)


@pytest.mark.parametrize("name", ["unet", "flux"])
def test_a_compiled_model_is_one_graph(name):
    model = made(name).requires_grad_(False)
    wanted, recorded = result_of(model, name), EagerAndRecordGraphs()
    count = len(accelerate(model).swapped)
    torch._dynamo.reset()
    torch.testing.assert_close(result_of(torch.compile(model, backend=recorded, fullgraph=True), name), wanted, **CLOSE)
    called = [str(node.target) for node in recorded.graphs[0].graph.nodes]
    assert len(recorded.graphs) == 1 and sum("attention_forward" in target for target in called) == count


def test_activation_checkpointing(unet):
    """What runs again in the backward is routed, too."""
    wanted = gradients_of(unet.train(), "unet")
    accelerate(unet)
    unet.enable_gradient_checkpointing()
    torch.testing.assert_close(gradients_of(unet, "unet"), wanted, **CLOSE)


def test_restore_gives_diffusers_classes_back(unet):
    before = {name: type(processor) for name, processor in unet.attn_processors.items()}
    report = accelerate(unet)
    assert accelerate(unet) == report and all(isinstance(p, Routed) for p in unet.attn_processors.values())
    assert restore(unet) == report.swapped and restore(unet) == []
    assert {name: type(processor) for name, processor in unet.attn_processors.items()} == before


def test_a_processor_that_all_layers_share(unet):
    shared = processors.AttnProcessor2_0()
    unet.set_attn_processor(shared)
    assert len(accelerate(unet).swapped) == len(restore(unet)) == len(unet.attn_processors)
    assert type(shared) is processors.AttnProcessor2_0


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles(unet, duplicate):
    accelerate(unet)
    twin = duplicate(unet)
    torch.testing.assert_close(result_of(twin, "unet"), result_of(unet, "unet"), rtol=0, atol=0)
    restore(twin)
    assert all(isinstance(p, Routed) for p in unet.attn_processors.values())


@pytest.mark.filterwarnings("ignore:accelerate reached nothing")
def test_what_is_left_alone_and_why(unet):
    class Other:
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
            return hidden_states

    unet.set_attn_processor(processors.AttnProcessor())
    assert set(accelerate(unet).left) == set(unet.attn_processors)
    assert "AttnProcessor, whose call has neither F.scaled_dot_product_attention nor" in str(accelerate(unet))
    layer = unet.mid_block.attentions[0].transformer_blocks[0].attn1
    for processor, text in [(Other(), "Other, whose call"), (processors.SlicedAttnProcessor(1), "Sliced"),
                            (len, "builtin_function_or_method, which is not written in Python")]:  # fmt: skip
        layer.set_processor(processor)
        assert text in accelerate(layer).left["processor"]
    assert not any(isinstance(p, Routed) for p in unet.attn_processors.values())


def test_that_nothing_was_reached_is_said(unet):
    nothing = "^accelerate reached nothing in this Linear: it has none of diffusers' attention processors; "
    with pytest.warns(UserWarning, match=nothing):
        accelerate(torch.nn.Linear(2, 2))
    unet.set_attn_processor(processors.AttnProcessor())
    with pytest.warns(
        UserWarning, match=r"^accelerate reached nothing in this UNet2DConditionModel: down.* is a diffusers"
    ):
        accelerate(unet)


def test_a_backend_that_was_asked_for_is_kept():
    model = made("flux")
    processor = model.transformer_blocks[0].attn.processor
    processor._attention_backend = diffusers.models.attention_dispatch.AttentionBackendName._NATIVE_MATH
    report = accelerate(model)
    assert "backend _native_math" in report.left["transformer_blocks.0.attn.processor"]
    assert report.swapped == ["single_transformer_blocks.0.attn.processor"]
    model.reset_attention_backend()
    assert not accelerate(model).left


def test_parallel_attention_is_left_alone():
    model = made("flux")
    model.transformer_blocks[0].attn.processor._parallel_config = object()
    assert "several devices" in accelerate(model).left["transformer_blocks.0.attn.processor"]


def test_an_adapter_keeps_its_weights():
    """A processor that is a module itself; diffusers hands it its arguments by the names in its signature."""
    layer = processors.Attention(8, cross_attention_dim=8, heads=2, dim_head=4)
    layer.set_processor(processors.IPAdapterAttnProcessor2_0(8, 8, num_tokens=(3,)))
    layer.eval()
    x, text, pictures = torch.randn(2, 5, 8), torch.randn(2, 6, 8), [torch.randn(2, 1, 3, 8)]
    wanted, state = layer(x, encoder_hidden_states=(text, pictures)), layer.state_dict()
    assert accelerate(layer).swapped == ["processor"]
    assert layer.state_dict().keys() == state.keys() and isinstance(layer.processor, torch.nn.Module)
    with sdpa.sdpa_kernel("cpu_flash"):
        torch.testing.assert_close(layer(x, encoder_hidden_states=(text, pictures)), wanted, **CLOSE)
        assert last_kernel() == "cpu_flash"
    restore(layer)
    assert type(layer.processor) is processors.IPAdapterAttnProcessor2_0


@pytest.mark.parametrize("options", [
    {"norm_num_groups": 4, "residual_connection": True, "rescale_output_factor": 2.0, "spatial_norm_dim": 6},
    {"cross_attention_dim": 12, "cross_attention_norm": "layer_norm", "bias": True},
    {"cross_attention_dim": 12, "cross_attention_norm": "group_norm", "cross_attention_norm_num_groups": 3},
    {"qk_norm": "layer_norm", "upcast_attention": True, "upcast_softmax": True},
], ids=["spatial", "layer_norm", "group_norm", "qk_norm"])  # fmt: skip
def test_options_of_a_layer(options):
    torch.manual_seed(0)
    layer = processors.Attention(32, heads=2, dim_head=4, **options).eval()
    given = {"hidden_states": torch.randn(2, 32, 3, 4) if "spatial_norm_dim" in options else torch.randn(2, 12, 32)}
    N = 12
    if "spatial_norm_dim" in options:
        given["temb"] = torch.randn(2, 6, 3, 4)
    if "cross_attention_dim" in options:
        given["encoder_hidden_states"], N = torch.randn(2, 7, 12), 7
    given["attention_mask"] = torch.zeros(2, 1, N).masked_fill(torch.arange(N) > 4, -10000.0)
    wanted = layer(**given)
    accelerate(layer)
    with sdpa.sdpa_kernel("cpu_flash"):
        torch.testing.assert_close(layer(**given), wanted, **CLOSE)
        assert last_kernel() == "cpu_flash"


def test_example(capsys):
    path = Path(__file__).parents[1] / "examples/diffusers_unet.py"
    runpy.run_path(str(path), run_name="__main__")
    told = capsys.readouterr().out
    assert "swapped 8 modules" in told and "same image: True" in told


def test_a_pipeline_is_no_model():
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, as pipeline.unet or .transformer is, got dict"):
        accelerate({})
