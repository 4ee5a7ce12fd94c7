"""LoRA files of diffusers and kohya are added to weights, and wrong files are errors."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.config.settings import Lora
from diffusion_jax.weights import lora, torch_weights
from sd_jax.unet import UNet
from sd_jax.weights import lora_files, names, text
from sd_jax.weights.checkpoints import Checkpoint, UNetPart
from tests import written_runs
from tests.diffusion_jax.weights import torch_writer
from tests.sd_jax.cases import TEXT_WIDTH, unet_weights
from tests.sd_jax.weights import test_checkpoints

KINDS = {
    "1.x": UNet(32, (1, 2), 1, (0, 1), num_heads=8, linear_projections=False),
    "2.x": UNet(32, (1, 2), 1, (1,), num_heads=0, head_dim=32),
}
S = Lora(rank=3, alpha=2.0, targets="_attn/|res_?0?/conv1|skip|resample|init_conv")
DOWN_UP = ("down", "up")
TO_Q = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"


@pytest.fixture(scope="module", params=KINDS)
def opened(request):
    """Return a UNet with random parameters."""
    unet = KINDS[request.param]
    params = names.unet_from_torch(unet_weights(unet), unet, TEXT_WIDTH)
    return Checkpoint(UNetPart(unet, TEXT_WIDTH, params), None, [])


@pytest.fixture(scope="module")
def factors(opened):
    shapes = names.abstract_unet(opened.unet.network, TEXT_WIDTH)
    return written_runs.random_params(lambda key: lora.init(key, shapes, S))


@pytest.mark.parametrize("dialect", lora_files.DIALECTS)
@pytest.mark.parametrize("strength", [1.0, -0.5])
def test_applying_an_exported_lora_file_equals_merging_the_factors_of_its_run(
    opened, factors, tmp_path, dialect, strength
):
    path = tmp_path / "a.safetensors"
    lora_files.write(path, factors, S, opened.unet.network, dialect)
    merged = lora_files.apply([f"{path}:{strength}"], opened).unet.params
    expected = lora.merge(opened.unet.params, factors, S._replace(scale=strength))
    assert len(lora.flat(factors)) > 20
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), merged, expected)
    assert not jax.tree.all(jax.tree.map(np.array_equal, merged, opened.unet.params))


def test_several_lora_files_are_added(opened, factors, tmp_path):
    path = tmp_path / lora_files.FILE
    lora_files.write(path, factors, S, opened.unet.network)
    twice = lora_files.apply([f"{tmp_path}:0.25", f"{path}:0.5"], opened).unet.params
    once = lora_files.apply([f"{path}:0.75"], opened).unet.params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), twice, once)


def arrays(rank=2, out=64, width=64):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rank, width)).astype("f4"), rng.normal(size=(out, rank)).astype("f4")


Q_OF_KOHYA = "mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
PAIRS = {  # {} stands for the name of a factor.
    "peft": (f"{TO_Q}.lora_{{}}.weight", "AB"),
    "lora.down": (f"{TO_Q}.lora.{{}}.weight", DOWN_UP),
    "linear layers": (f"{TO_Q}.lora_linear_layer.{{}}.weight", DOWN_UP),
    "processors": (f"{TO_Q[:-5]}.processor.to_q_lora.{{}}.weight", DOWN_UP),
    "no prefix": (f"{TO_Q[5:-5]}.processor.to_q_lora.{{}}.weight", DOWN_UP),
    "kohya": (f"lora_unet_{Q_OF_KOHYA}.lora_{{}}.weight", DOWN_UP),
    "kohya in LDM's names": ("lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q.lora_{}.weight", DOWN_UP),
    "ComfyUI": (f"{TO_Q.replace('unet', 'diffusion_model')}.lora_{{}}.weight", "AB"),
    "ComfyUI in LDM's names": (
        "diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q.lora_{}.weight",
        DOWN_UP,
    ),
    "LyCORIS": (f"lycoris_{Q_OF_KOHYA}.lora_{{}}.weight", DOWN_UP),
    "LyCORIS unet": (f"lycoris_unet_{Q_OF_KOHYA}.lora_{{}}.weight", DOWN_UP),
    "another adapter's name": (f"{TO_Q}.lora_{{}}.cat.weight", "AB"),
    "a name with hyphens": (f"{TO_Q}.lora_{{}}.a-cat 2.weight", "AB"),
}
LAYOUTS = {layout: tuple(map(name.format, factors)) for layout, (name, factors) in PAIRS.items()}


def q_of(checkpoint):
    return np.asarray(checkpoint.unet.params["params"]["mid_attn"]["self_0"]["q"]["kernel"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lora_files_with_every_layout_of_names_can_be_read(opened, tmp_path, layout):
    down, up = arrays()
    torch_weights.write(tmp_path / "a.safetensors", dict(zip(LAYOUTS[layout], (down, up), strict=True)))
    merged = lora_files.apply([str(tmp_path / "a.safetensors")], opened)
    np.testing.assert_allclose(q_of(merged) - q_of(opened), (up @ down).T, atol=2e-6)


@pytest.mark.parametrize(
    ("alpha", "adapter_config", "scale"),
    [
        (4.0, None, 2.0),
        (None, {"unet.lora_alpha": 6}, 3.0),
        (None, {"unet.lora_alpha": 6, "unet.use_rslora": True}, 6 / 2**0.5),
        (None, {"unet.lora_alpha": 6, "unet.alpha_pattern": {"attn1.to_q": 1}}, 0.5),
        (None, {"text_encoder.lora_alpha": 6}, 1.0),
        (None, None, 1.0),
    ],
)
def test_alpha_comes_from_arrays_or_metadata_and_defaults_to_the_rank(opened, tmp_path, alpha, adapter_config, scale):
    down, up = arrays()
    state = dict(zip(LAYOUTS["peft"], (down, up), strict=True))
    state |= {f"{TO_Q}.alpha": np.array(alpha, "f4")} if alpha else {}
    metadata = {"lora_adapter_metadata": json.dumps(adapter_config)} if adapter_config else None
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
def test_the_config_of_a_peft_folder_sets_its_scale(opened, tmp_path, config, scale):
    """peft's names are relative to the UNet. Patterns match the ends of names."""
    down, up = arrays()
    weights = tmp_path / "adapter_model.safetensors"
    torch_weights.write(weights, dict(zip(PEFTS_OWN, (down, up), strict=True)))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    for lora_path in (tmp_path, weights):
        merged = lora_files.apply([f"{lora_path}:0.5"], opened)
        change = 0.5 * scale * (up @ down).T
        np.testing.assert_allclose(q_of(merged) - q_of(opened), change, atol=1e-5)


def test_peft_files_without_adapter_config_are_errors(opened, tmp_path):
    torch_weights.write(tmp_path / "adapter_model.safetensors", dict(zip(PEFTS_OWN, arrays(), strict=True)))
    with pytest.raises(ValueError, match=r"adapter_config\.json, which holds alpha, is also need"):
        lora_files.apply([str(tmp_path)], opened)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a.x": (2, 2)}, "not a LoRA, LoHa or LoKr: 1 of 1 arrays have unknown names, such as a.x"),
        (
            {f"{TO_Q}.lora_A.weight": (2, 64)},
            "is not a LoRA, LoHa or LoKr: 1 of 1 layers lack factors or mix kinds, such",
        ),
        *(
            ({f"{TO_Q}.lora_A.weight": (2, 64), name: (2,)}, f"is {family}, not a LoRA, LoHa or LoKr of named")
            for name, family in {
                "oft_unet_a.oft_blocks": "OFT",
                "lora_unet_a.diff": "a set of weight differences",
                f"{TO_Q}.lora_B.bias": "a LoRA with biases",
                "base_model.model.token_embedding.lora_embedding_A": "a LoRA of token embeddings",
                "unet:0:up": "a LoRA of lora_diffusion, which numbers layers",
                "3": "a LoRA of lora_diffusion, which numbers layers",
                f"{TO_Q}.lora_B.a-b.bias": "a LoRA with biases",
            }.items()
        ),
        *(
            (state, "LoKr: 1 of 1 layers lack factors or mix kinds, such as mid_block.*to_q")
            for state in (
                {f"{TO_Q}.dora_scale": (64, 1)},
                {f"{TO_Q}.hada_w1_a": (64, 2), f"{TO_Q}.hada_w1_b": (2, 64)},
                {f"{TO_Q}.lokr_w1": (8, 8), f"{TO_Q}.lokr_w2_a": (8, 1)},
                {f"{TO_Q}.lokr_w1": (8, 8), f"{TO_Q}.lokr_w2": (8, 8), f"{TO_Q}.lokr_t2": (1, 1)},
                {f"{TO_Q}.lokr_w1": (8, 8), f"{TO_Q}.lora_A.weight": (2, 64)},
            )
        ),
        (
            {f"{TO_Q}.hada_w3_a": (64, 2)},
            r"LoKr: 1 of 1 arrays have unknown names, such as unet.mid_block.*to_q.hada_w3_a",
        ),
        (
            {f"{TO_Q}.lokr_w1": (8, 8), f"{TO_Q}.lokr_w2": (8, 4)},
            r"to_q have the shapes \[8, 8\] and \[8, 4\], but the model's weight has the shape",
        ),
        (
            {f"{TO_Q}.lokr_w1": (8, 8), f"{TO_Q}.lokr_w2": (8, 8), f"{TO_Q}.dora_scale": (1, 32)},
            r"to_q have the shapes .*\[1, 32\].*, but the model's weight has the shape",
        ),
        (
            {f"{TO_Q}.lora_A.weight": (2, 64), f"{TO_Q}.lora_down.weight": (2, 64)},
            r"holds the factor down of mid_block.*to_q twice: keep one",
        ),
        (
            dict.fromkeys(LAYOUTS["kohya"] + LAYOUTS["kohya in LDM's names"], (2, 2)),
            "names a layer twice, by LDM's and diffusers' names: keep one",
        ),
        (
            {f"{TO_Q}s.lora_A.weight": (2, 64), f"{TO_Q}s.lora_B.weight": (64, 2)},
            "another model, because 1 of its 1 layers do not exist in this model, such as mid_b",
        ),
        *(
            (
                {f"{layer}.lora_{half}.weight": (2, 2) for half in ("down", "up")},
                f"belongs to {model}, because 1 of its 1 layers do not exist",
            )
            for layer, model in {
                "lora_unet_double_blocks_0_img_attn_proj": "Flux",
                "transformer.single_transformer_blocks.0.attn.to_q": "Flux",
                "transformer.transformer_blocks.0.attn.add_q_proj": "Stable Diffusion 3",
                "lora_unet_input_blocks_4_1_transformer_blocks_1_attn1_to_k": "Stable Diffusion XL",
                "unet.mid_block.attentions.0.transformer_blocks.9.ff": "Stable Diffusion XL",
            }.items()
        ),
        (
            {"model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight": (2, 2)},
            "holds Stable Diffusion 3 and is not a LoRA, LoHa or LoKr: 1 of 1 arrays have unkn",
        ),
        (
            {f"{TO_Q}.lora_A.weight": (2, 32), f"{TO_Q}.lora_B.weight": (64, 2)},
            r"to_q have the shapes \[2, 32\] and \[64, 2\], but the model's weight has the shape "
            r"\[64, 64\]",
        ),
        (
            {f"lora_te_text_model_encoder_layers_0_mlp_fc1.lora_{half}.weight": (2, 2) for half in ("down", "up")},
            "changes the text encoder, but the model has none: choose another model",
        ),
    ],
)
def test_lora_arrays_that_do_not_fit_are_errors_of_one_line(opened, tmp_path, state, message):
    path = tmp_path / "a.safetensors"
    torch_weights.write(path, {name: np.ones(shape, "f4") for name, shape in state.items()})
    with pytest.raises(ValueError, match=message) as error:
        lora_files.apply([str(path)], opened)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(
            ({"init_lora_weights": init}, f"with init_lora_weights='{init}', which changes the base")
            for init in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "new")
        ),
        ({"use_dora": True}, "with use_dora=True, but has layers without magnitudes"),
        ({"modules_to_save": ["conv_in"]}, r"with modules_to_save=\['conv_in'\], which is more"),
        ({"bias": "all"}, "with bias='all', which is more than a plain LoRA"),
        ({"layer_replication": [[0, 4]]}, r"with layer_replication=\[\[0, 4\]\], which is more"),
        ({"peft_type": "OFT"}, "is an adapter of the type OFT, not LORA, LOHA, LOKR"),
    ],
)
def test_adapters_other_than_plain_lora_are_errors_that_name_them(opened, tmp_path, config, message):
    weights = tmp_path / "adapter_model.safetensors"
    torch_weights.write(weights, dict(zip(PEFTS_OWN, arrays(), strict=True)))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 2} | config))
    with pytest.raises(ValueError, match=message):
        lora_files.apply([str(tmp_path)], opened)
    state = dict(zip(LAYOUTS["peft"], arrays(), strict=True))
    prefixed_config = {f"unet.{name}": value for name, value in config.items()}
    metadata = {"lora_adapter_metadata": json.dumps(prefixed_config)}
    torch_weights.write(tmp_path / "a.safetensors", state, metadata)
    with pytest.raises(ValueError, match=message):
        lora_files.apply([str(tmp_path / "a.safetensors")], opened)


@pytest.mark.parametrize("init", [True, "gaussian", "eva", "orthogonal"])
def test_initializations_that_do_not_change_the_base_are_allowed(opened, tmp_path, init):
    torch_weights.write(tmp_path / "adapter_model.safetensors", dict(zip(PEFTS_OWN, arrays(), strict=True)))
    config = {"lora_alpha": 2, "init_lora_weights": init, "modules_to_save": None, "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    lora_files.apply([str(tmp_path)], opened)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_factors_that_are_not_finite_are_errors(opened, tmp_path, value):
    down, up = arrays()
    down[1, 2] = value
    torch_weights.write(tmp_path / "a.safetensors", dict(zip(LAYOUTS["peft"], (down, up), strict=True)))
    message = r"a.safetensors: 1 of 2 arrays hold NaN or infinite values, such as unet\.mid_.*lora_A"
    with pytest.raises(ValueError, match=message):
        lora_files.apply([str(tmp_path / "a.safetensors")], opened)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_16_bit_and_8_bit_factors_can_be_read(opened, tmp_path, dtype):
    down, up = (array.astype(jnp.dtype(dtype)) for array in arrays())
    torch_weights.write(tmp_path / "a.safetensors", dict(zip(LAYOUTS["kohya"], (down, up), strict=True)))
    merged = lora_files.apply([str(tmp_path / "a.safetensors")], opened)
    product = (up.astype("f4") @ down.astype("f4")).T
    np.testing.assert_allclose(q_of(merged) - q_of(opened), product, atol=2e-6)


def test_the_middle_factor_of_a_convolution_is_used(opened, tmp_path):
    rng, layer = np.random.default_rng(0), "lora_unet_mid_block_resnets_0_conv1"
    factors = {"down": (2, 64, 1, 1), "mid": (3, 2, 3, 3), "up": (64, 3, 1, 1)}
    factors = {k: rng.normal(size=shape).astype("f4") for k, shape in factors.items()}
    state = {f"{layer}.lora_{k}.weight": w for k, w in factors.items()}
    torch_weights.write(tmp_path / "a.safetensors", state | {f"{layer}.alpha": np.float32(4)})
    merged = lora_files.apply([str(tmp_path / "a.safetensors")], opened)
    conv = lambda c: np.asarray(c.unet.params["params"]["mid_res_0"]["conv1"]["kernel"])
    down, up = (factors[k][..., 0, 0] for k in ("down", "up"))
    change = np.stack([[up @ factors["mid"][..., y, x] @ down for x in range(3)] for y in range(3)])
    np.testing.assert_allclose(conv(merged) - conv(opened), 2 * change.transpose(0, 1, 3, 2), atol=2e-5)


def test_a_lora_file_in_a_folder_is_found_with_any_name(opened, tmp_path):
    state = dict(zip(LAYOUTS["peft"], arrays(), strict=True))
    for name in ("pytorch_lora_weights.bin", "my_cat.safetensors", "lora.pt"):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        write = torch_weights.write if name.endswith("safetensors") else torch_writer.save
        write(folder / name, state)
        (folder / "README.md").write_text("a LoRA")
        merged = lora_files.apply([str(folder)], opened)
        np.testing.assert_allclose(q_of(merged) - q_of(opened), (arrays()[1] @ arrays()[0]).T, atol=2e-6)
    torch_writer.save(folder / "other.bin", state)
    with pytest.raises(ValueError, match=r"holds 2 files: name one of lora\.pt, other\.bin$"):
        lora_files.apply([str(folder)], opened)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="the folder holds no file such as pytorch_lora_w"):
        lora_files.apply([str(tmp_path / "empty")], opened)


@pytest.mark.parametrize("prefix", ["", "text_model."])
def test_dreambooth_folders_change_the_unet_and_the_text_encoder(opened, tmp_path, prefix):
    """peft uses names of transformers, which had the prefix text_model in old versions."""
    read = text.from_ldm(test_checkpoints.text_state("1.x"), {"num_attention_heads": 3})
    opened = opened._replace(text=read)
    q = f"base_model.model.{prefix}encoder.layers.1.self_attn.q_proj"
    names = {"unet": PEFTS_OWN, "text_encoder": [f"{q}.lora_{half}.weight" for half in "AB"]}
    for part, width in (("unet", 64), ("text_encoder", 24)):
        state = dict(zip(names[part], arrays(2, width, width), strict=True))
        torch_weights.write(tmp_path / part / "adapter_model.safetensors", state)
        (tmp_path / part / "adapter_config.json").write_text('{"lora_alpha": 6}')
    merged = lora_files.apply([f"{tmp_path}:0.5"], opened)
    down, up = arrays()
    np.testing.assert_allclose(q_of(merged) - q_of(opened), 1.5 * (up @ down).T, atol=1e-5)
    of_text = lambda c: c.text.params["params"]["layer_1_attention"]["q"]["kernel"]
    down, up = arrays(2, 24, 24)
    np.testing.assert_allclose(of_text(merged) - of_text(opened), 1.5 * (up @ down).T, atol=1e-5)
    alone = lora_files.apply([f"{tmp_path}/text_encoder:0.5"], opened)
    np.testing.assert_array_equal(of_text(alone), of_text(merged))


def test_a_missing_lora_file_and_an_invalid_strength_are_errors(tmp_path):
    (tmp_path / "a.safetensors").touch()
    with pytest.raises(ValueError, match=r"a\.safetensors:abc: the strength 'abc' is not a number"):
        lora_files.apply([f"{tmp_path}/a.safetensors:abc"], Checkpoint(None, None, []))
    with pytest.raises(FileNotFoundError, match=r"--lora=nope:0\.5: the file nope does not exist"):
        lora_files.apply(["nope:0.5"], Checkpoint(None, None, []))
    with pytest.raises(ValueError, match="the strength must be a finite number"):
        lora_files.apply(["nope:inf"], Checkpoint(None, None, []))
