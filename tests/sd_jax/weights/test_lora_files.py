"""LoRA files of diffusers and kohya: what they add to a model's weights, and what is refused."""

import json

import jax
import numpy as np
import pytest

from diffusion_jax import lora
from diffusion_jax.config.settings import Lora
from diffusion_jax.weights import torch_weights
from sd_jax.unet import UNet
from sd_jax.weights import lora_files, names
from sd_jax.weights.checkpoints import Checkpoint, UNetPart
from tests import written_runs
from tests.sd_jax.cases import TEXT_WIDTH, unet_weights

KINDS = {
    "1.x": UNet(32, (1, 2), 1, (0, 1), num_heads=8, linear_projections=False),
    "2.x": UNet(32, (1, 2), 1, (1,), num_heads=0, head_dim=32),
}
S = Lora(rank=3, alpha=2.0, targets="_attn/|res_?0?/conv1|skip|resample|init_conv")
TO_Q = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"


@pytest.fixture(scope="module", params=KINDS)
def opened(request):
    """A UNet with random numbers in every parameter."""
    unet = KINDS[request.param]
    params = names.unet_from_torch(unet_weights(unet), unet, TEXT_WIDTH)
    return Checkpoint(UNetPart(unet, TEXT_WIDTH, params), None, [])


@pytest.fixture(scope="module")
def factors(opened):
    shapes = names.abstract_unet(opened.unet.network, TEXT_WIDTH)
    return written_runs.random_params(lambda key: lora.init(key, shapes, S))


@pytest.mark.parametrize("dialect", lora_files.DIALECTS)
@pytest.mark.parametrize("strength", [1.0, -0.5])
def test_what_is_written_is_merged_as_the_run_itself(opened, factors, tmp_path, dialect, strength):
    path = tmp_path / "a.safetensors"
    lora_files.write(path, factors, S, opened.unet.network, dialect)
    merged = lora_files.apply([f"{path}:{strength}"], opened).unet.params
    expected = lora.merge(opened.unet.params, factors, S._replace(scale=strength))
    assert len(lora.flat(factors)) > 20
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), merged, expected)
    assert not jax.tree.all(jax.tree.map(np.array_equal, merged, opened.unet.params))


def test_several_files_add_up(opened, factors, tmp_path):
    path = tmp_path / lora_files.FILE
    lora_files.write(path, factors, S, opened.unet.network)
    twice = lora_files.apply([f"{tmp_path}:0.25", f"{path}:0.5"], opened).unet.params
    once = lora_files.apply([f"{path}:0.75"], opened).unet.params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), twice, once)


def arrays(rank=2, out=64, width=64):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rank, width)).astype("f4"), rng.normal(size=(out, rank)).astype("f4")


LAYOUTS = {
    "peft": (f"{TO_Q}.lora_A.weight", f"{TO_Q}.lora_B.weight"),
    "lora.down": (f"{TO_Q}.lora.down.weight", f"{TO_Q}.lora.up.weight"),
    "linear layers": (f"{TO_Q}.lora_linear_layer.down.weight",
                      f"{TO_Q}.lora_linear_layer.up.weight"),
    "processors": (f"{TO_Q[:-5]}.processor.to_q_lora.down.weight",
                   f"{TO_Q[:-5]}.processor.to_q_lora.up.weight"),
    "no prefix": (f"{TO_Q[5:-5]}.processor.to_q_lora.down.weight",
                  f"{TO_Q[5:-5]}.processor.to_q_lora.up.weight"),
    "kohya": ("lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q.lora_down.weight",
              "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q.lora_up.weight"),
    "kohya in LDM's names": (
        "lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q.lora_down.weight",
        "lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q.lora_up.weight"),
}  # fmt: skip


def q_of(checkpoint):
    return np.asarray(checkpoint.unet.params["params"]["mid_attn"]["self_0"]["q"]["kernel"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_names_is_read(opened, tmp_path, layout):
    down, up = arrays()
    torch_weights.write(
        tmp_path / "a.safetensors", dict(zip(LAYOUTS[layout], (down, up), strict=True))
    )
    merged = lora_files.apply([str(tmp_path / "a.safetensors")], opened)
    np.testing.assert_allclose(q_of(merged) - q_of(opened), (up @ down).T, atol=2e-6)


@pytest.mark.parametrize(
    ("alpha", "said", "scale"),
    [
        (4.0, None, 2.0),
        (None, {"unet.lora_alpha": 6}, 3.0),
        (None, {"unet.lora_alpha": 6, "unet.use_rslora": True}, 6 / 2**0.5),
        (None, {"unet.lora_alpha": 6, "unet.alpha_pattern": {"attn1.to_q": 1}}, 0.5),
        (None, {"text_encoder.lora_alpha": 6}, 1.0),
        (None, None, 1.0),
    ],
)
def test_alpha_stands_beside_the_arrays_or_is_the_rank(opened, tmp_path, alpha, said, scale):
    down, up = arrays()
    state = dict(zip(LAYOUTS["peft"], (down, up), strict=True))
    state |= {f"{TO_Q}.alpha": np.array(alpha, "f4")} if alpha else {}
    metadata = {"lora_adapter_metadata": json.dumps(said)} if said else None
    torch_weights.write(tmp_path / "a.safetensors", state, metadata)
    merged = lora_files.apply([str(tmp_path / "a.safetensors")], opened)
    np.testing.assert_allclose(q_of(merged) - q_of(opened), scale * (up @ down).T, atol=4e-6)


PEFTS_OWN = [f"{TO_Q.replace('unet.', 'base_model.model.')}.lora_{half}.weight" for half in "AB"]


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"lora_alpha": 7}, 3.5),
        ({"lora_alpha": 7, "use_rslora": True}, 7 / 2**0.5),
        ({"lora_alpha": 7, "r": 9, "rank_pattern": {"to_q": 2}}, 3.5),
        ({"lora_alpha": 7, "alpha_pattern": {"mid_.*to_q": 3, "to_q": 5}}, 1.5),
        ({"lora_alpha": 7, "alpha_pattern": {"q": 3}}, 3.5),
    ],
)
def test_the_strength_of_pefts_own_files_is_in_their_config(opened, tmp_path, config, scale):
    """peft names modules relative to the UNet; patterns match whole ends of these names."""
    down, up = arrays()
    weights = tmp_path / "adapter_model.safetensors"
    torch_weights.write(weights, dict(zip(PEFTS_OWN, (down, up), strict=True)))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    for given in (tmp_path, weights):
        merged = lora_files.apply([f"{given}:0.5"], opened)
        change = 0.5 * scale * (up @ down).T
        np.testing.assert_allclose(q_of(merged) - q_of(opened), change, atol=1e-5)


def test_pefts_own_names_without_their_config_are_refused(opened, tmp_path):
    torch_weights.write(
        tmp_path / "adapter_model.safetensors", dict(zip(PEFTS_OWN, arrays(), strict=True))
    )
    with pytest.raises(ValueError, match=r"adapter_config\.json, which holds alpha, is also need"):
        lora_files.apply([str(tmp_path)], opened)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a.hada_w1_a": (2, 2)}, "not a LoRA with two factors per layer, because 1 of 1 arrays"),
        (
            {f"{TO_Q}.lora_A.weight": (2, 64)},
            "is not a LoRA with two factors per layer, because 1 of 1 lay",
        ),
        ({f"{TO_Q}.dora_scale": (2,)}, "If it is a LoHa, LoKr or DoRA, merge it into the model"),
        (
            {f"{TO_Q}s.lora_A.weight": (2, 64), f"{TO_Q}s.lora_B.weight": (64, 2)},
            "another model, because 1 of its 1 layers do not exist in this model, such as mid_b",
        ),
        (
            {f"{TO_Q}.lora_A.weight": (2, 32), f"{TO_Q}.lora_B.weight": (64, 2)},
            r"to_q have the shapes \[2, 32\] and \[64, 2\], but the model's weight has the shape "
            r"\[64, 64\]",
        ),
        (
            {"lora_te_a.lora_down.weight": (2, 4), "lora_te_a.lora_up.weight": (4, 2)},
            "changes the text encoder, but the model has none: choose another model",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(opened, tmp_path, state, message):
    path = tmp_path / "a.safetensors"
    torch_weights.write(path, {name: np.ones(shape, "f4") for name, shape in state.items()})
    with pytest.raises(ValueError, match=message) as error:
        lora_files.apply([str(path)], opened)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_and_a_strength_that_is_none():
    with pytest.raises(FileNotFoundError, match=r"--lora=nope:0\.5: the file nope does not exist"):
        lora_files.apply(["nope:0.5"], Checkpoint(None, None, []))
    with pytest.raises(ValueError, match="the strength must be a finite number"):
        lora_files.apply(["nope:inf"], Checkpoint(None, None, []))
