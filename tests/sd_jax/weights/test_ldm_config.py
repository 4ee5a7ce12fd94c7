"""The number of attention heads is read from LDM's yaml, NeMo's config or metadata."""

import functools
import io
import json
import re
import tarfile

import jax
import numpy as np
import pytest
import yaml

from sd_jax.unet import UNet
from sd_jax.weights import checkpoints, formats, ldm_config, opened
from sd_jax.weights.ldm_config import LdmSettings
from tests.diffusion_jax.weights import torch_writer
from tests.sd_jax.cases import TEXT_WIDTH, unet_weights
from tests.sd_jax.weights.test_checkpoints import text_state

# Layers like in 1.x, but with 4 heads instead of the published 8.
FOUR = UNet(32, (1, 2), 1, (1,), num_heads=4, linear_projections=False, norm_groups=16)
FIELDS = {
    "model_channels": 32,
    "channel_mult": [1, 2],
    "num_res_blocks": 1,
    "num_heads": 4,
    "attention_resolutions": [2],
    "num_head_channels": -1,
}


@functools.cache
def state():
    return {f"model.diffusion_model.{name}": w for name, w in unet_weights(FOUR).items()}


@functools.cache
def text():
    return {f"cond_stage_model.{name}": w for name, w in text_state("1.x").items()}


def written(path, config):
    path.write_text(yaml.safe_dump(config))
    return path


def of_model(**fields):
    return {"model": {"target": "ldm.LatentDiffusion", "params": fields}}


@pytest.fixture
def file(tmp_path):
    np.savez(tmp_path / "a.npz", **state(), **text())
    return tmp_path / "a.npz"


def test_an_unknown_number_of_attention_heads_is_an_error(file):
    message = "the UNet has width 32 and 2 levels, and the number of attention heads is known only"
    with pytest.raises(ValueError, match=rf"a\.npz: {message}.*--config=v1-inference\.yaml"):
        checkpoints.load(file)
    linear = {n: w[..., 0, 0] if w.ndim == 4 and ".proj_" in n else w for n, w in state().items()}
    np.savez(file.with_name("linear.npz"), **linear)  # Heads of width 64 would not even divide it.
    with pytest.raises(ValueError, match=message):
        checkpoints.load(file.with_name("linear.npz"))
    read = checkpoints.load(file, heads=(4, 64), norm_groups=16)
    assert read.unet.network == FOUR and read.text is None
    why = "it is unknown how many attention heads a CLIP of width 24 has"
    assert read.report[1] == f"text: arrays left out ({len(text())}): {why}"


@pytest.mark.parametrize(
    "unet", [UNet(), UNet(num_heads=8, linear_projections=False, in_channels=9), UNet(norm_groups=16)]
)
def test_unets_of_published_sizes_are_recognized(unet):
    assert formats.is_published(unet)
    assert not formats.is_published(unet.clone(width=640)) and not formats.is_published(FOUR)


def test_ldms_yaml_gives_heads_scale_size_and_prediction(file, tmp_path):
    params = {"target": "UNetModel", "params": FIELDS}
    fields = {"parameterization": "v", "image_size": 32, "scale_factor": 0.5, "timesteps": 1000}
    path = written(tmp_path / "v.yaml", of_model(unet_config=params, **fields))
    read = checkpoints.load(file, norm_groups=16, config=path)
    assert read.unet.network == FOUR
    assert (read.predicts, read.latent_size, read.scale) == ("v", 32, 0.5)


@pytest.mark.parametrize("name", ["b.safetensors", "b.npz"])
@pytest.mark.parametrize("dialect", ["ldm", "nemo"])
def test_a_file_that_we_wrote_needs_no_config(file, tmp_path, name, dialect):
    config = of_model(unet_config={"params": FIELDS}, cond_stage_config={"params": {"num_attention_heads": 3}})
    path = written(tmp_path / "v.yaml", config)
    read = checkpoints.load(file, norm_groups=16, config=path)
    read = read._replace(predicts="v", latent_size=96, scale=0.3)
    assert (read.unet.network, read.text.tower.num_heads) == (FOUR, 3)
    checkpoints.save_file(read, tmp_path / name, dialect)
    again = checkpoints.load(tmp_path / name)
    assert checkpoints.equal(read, again)
    assert (again.predicts, again.latent_size, again.scale) == ("v", 96, 0.3)


def test_nemos_config_gives_heads_prediction_and_size(tmp_path):
    torch_writer.save(tmp_path / "w.ckpt", {f"model.{name}": w for name, w in state().items()})
    fields = {"_target_": "UNetModel", **FIELDS, "resblock_gn_groups": 16}
    config = {"unet_config": fields, "parameterization": "v", "image_size": 32}
    members = {
        "model_config.yaml": yaml.safe_dump(config).encode(),
        "model_weights.ckpt": (tmp_path / "w.ckpt").read_bytes(),
    }
    with tarfile.open(tmp_path / "m.nemo", "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    read = checkpoints.load(tmp_path / "m.nemo")
    assert (read.unet.network, read.predicts, read.latent_size) == (FOUR, "v", 32)


def test_training_from_a_file_takes_attention_heads_from_the_config(file):
    params = opened.read_unet(file, FOUR, TEXT_WIDTH)
    kernel = params["params"]["init_conv"]["kernel"]
    expected = state()["model.diffusion_model.input_blocks.0.0.weight"].transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(kernel, expected)


@pytest.mark.parametrize("channels", [9, 8])
def test_training_an_inpainting_model_starts_from_one_that_reads_only_latents(file, channels):
    """The network then ignores the mask and the picture, as RunwayML initialised its model."""
    plain = opened.read_unet(file, FOUR, TEXT_WIDTH)
    wider = opened.read_unet(file, FOUR.clone(in_channels=channels), TEXT_WIDTH)
    kernel, first = (p["params"]["init_conv"]["kernel"] for p in (plain, wider))
    np.testing.assert_array_equal(first[:, :, :4], kernel)
    assert first.shape[2] == channels and not first[:, :, 4:].any()
    drop = lambda p: {k: v for k, v in p["params"].items() if k != "init_conv"}
    jax.tree.map(np.testing.assert_array_equal, drop(wider), drop(plain))
    with pytest.raises(ValueError, match="in_channels is 4 in the file, but 7 in the config"):
        opened.read_unet(file, FOUR.clone(in_channels=7), TEXT_WIDTH)


def test_only_the_requested_parts_are_loaded(file):
    # The UNet is not loaded, so its heads may be unknown.
    read = checkpoints.load(file, parts=("text",))
    assert read.unet is None and read.report[0].startswith("text: ")


def test_written_configs_are_read_back_unchanged():
    text = {"num_attention_heads": 12, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
    for unet in (FOUR, UNet(), UNet(num_res_blocks=(2, 1), channel_mult=(2, 3), attention_levels=())):
        facts = LdmSettings(unet, "eps", 96, 0.3, text)
        assert ldm_config.read(json.loads(ldm_config.write(facts, 768))) == facts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "v.yaml is not yaml: while parsing"),
        ("- 1", "v.yaml is not an LDM config, because it has no model.params.unet_config"),
        (of_model(first_stage_config={}), "it has no model.params.unet_config"),
        (of_model(unet_config={"params": FIELDS}, linear_end=0.02), "linear_end is 0.02, but only"),
        (of_model(unet_config={"params": FIELDS}, parameterization="x0"), "is 'x0', but only eps and v"),
        (of_model(unet_config={"params": {"a": 1}}), "lacks model_channels, attention_resolutions"),
    ],
)
def test_wrong_config_files_are_errors(file, tmp_path, content, message):
    path = tmp_path / "v.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(ValueError, match=re.escape(message)):
        checkpoints.load(file, config=path)


def test_a_config_that_is_missing_or_not_needed_is_an_error(file, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--config=.*nowhere\.yaml does not exist: name"):
        checkpoints.load(file, config="nowhere.yaml")
    with pytest.raises(ValueError, match="is a directory, which has its own configs"):
        checkpoints.load(tmp_path, config="v.yaml")


def test_unets_are_compared_by_the_setting_that_determines_their_heads():
    wide, other = FOUR.clone(num_heads=0, head_dim=16), FOUR.clone(head_dim=16)
    message = r"\(head_dim is 16 in the file, but num_heads is 4 in the config\)"
    with pytest.raises(ValueError, match=message):
        opened._checked(checkpoints.UNetPart(wide, TEXT_WIDTH, {}), FOUR, "a", "UNet")
    opened._checked(checkpoints.UNetPart(other, TEXT_WIDTH, {}), FOUR, "a", "UNet")  # Its head_dim has no effect.
