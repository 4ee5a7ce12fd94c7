"""Every AutoencoderKL that diffusers builds is read, and encodes and decodes as in diffusers.

`diffusers_vaes.npz` was written by torch and diffusers 0.34, with tiny networks of the structure of
SD 3's, FLUX.1's, SDXL's and VA-VAE's autoencoders. It holds configs as in config.json, inputs and
outputs. The weights are those of `cases.random_weights`.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.weights import torch_weights
from sd_jax import vae as vae_module
from sd_jax.settings import Latents
from sd_jax.weights import checkpoints, formats, names
from tests.sd_jax.cases import vae_weights

SAVED = np.load(pathlib.Path(__file__).parents[2] / "fixtures" / "diffusers_vaes.npz")
CONFIGS = json.loads(SAVED["info"].item())


def write(name, folder):
    """Write the files that diffusers saves for an autoencoder."""
    folder.mkdir(parents=True)
    vae = formats.vae_from_diffusers(CONFIGS[name])
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    torch_weights.write(folder / checkpoints.WEIGHTS, vae_weights(vae, "diffusers"))
    return folder


def close(ours, theirs):
    theirs = theirs.transpose(0, 2, 3, 1)
    error = np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max()
    print(f"relative error {error:.1e}")
    assert error < 3e-6  # Both compute in float32. Measured: up to 1.4e-6.


@pytest.mark.parametrize("name", CONFIGS)
def test_an_autoencoder_of_diffusers_computes_the_same_moments_latents_and_images(name, tmp_path):
    read = checkpoints.load(write(name, tmp_path / "vae"), parts=("vae",))
    vae, params = read.vae.network, jax.tree.map(jnp.asarray, read.vae.params)
    latents = Latents(64, scale=read.scale, shift=read.shift)
    x, z, eps = (SAVED[f"{name}/{key}"].transpose(0, 2, 3, 1) for key in ("x", "z", "eps"))
    moments = jax.jit(lambda x: vae.apply(params, x, method="encode"))(x)
    images = jax.jit(lambda z: vae.apply(params, latents.to_vae(z), method="decode"))(z)
    close(moments, SAVED[f"{name}/moments"])
    close(latents.to_unet(vae_module.sample(moments, jnp.asarray(eps))), SAVED[f"{name}/latents"])
    close(images, SAVED[f"{name}/decode"])


@pytest.mark.parametrize("target", ["vae.safetensors", "folder"])
@pytest.mark.parametrize("name", CONFIGS)
def test_an_autoencoder_converts_to_each_format_and_back_bit_for_bit(name, target, tmp_path):
    read = checkpoints.load(write(name, tmp_path / "vae"), parts=("vae",))
    if target == "folder":
        checkpoints.save_diffusers(read, tmp_path / target)
        config = json.loads((tmp_path / target / "vae" / "config.json").read_text())
        assert {key: CONFIGS[name][key] for key in config if key != "sample_size"} == {
            key: value for key, value in config.items() if key != "sample_size"
        }
    else:
        checkpoints.save_file(read, tmp_path / target)
    again = checkpoints.load(tmp_path / target, parts=("vae",))
    assert checkpoints.equal(again, read)
    assert (again.scale, again.shift) == (read.scale, read.shift)


def test_a_single_file_with_only_an_autoencoder_shows_its_structure(tmp_path):
    """FLUX.1's ae.safetensors has LDM's names without a prefix."""
    vae = formats.vae_from_diffusers(CONFIGS["flux"])
    torch_weights.write(tmp_path / "ae.safetensors", vae_weights(vae, "ldm"))
    read = checkpoints.load(tmp_path / "ae.safetensors", parts=("vae",))
    assert read.vae.network == vae and vae.latent_channels == 16 and not vae.quant_conv


@pytest.mark.parametrize("name", CONFIGS)
def test_an_autoencoder_of_diffusers_is_read_without_its_config(name, tmp_path):
    folder = write(name, tmp_path / "vae")
    of_folder = checkpoints.load(folder, parts=("vae",))
    of_file = checkpoints.load(folder / checkpoints.WEIGHTS, parts=("vae",))
    assert checkpoints.equal(of_file, of_folder)
    assert "the file states no scale" in of_file.report[-1]


def test_the_autoencoder_of_a_pipeline_with_other_networks_can_be_read(tmp_path):
    write("sd3", tmp_path / "vae")
    index = {"_class_name": "StableDiffusion3Pipeline", "transformer": ["diffusers", "SD3"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert checkpoints.load(tmp_path, parts=("vae",)).shift == 0.0609
    with pytest.raises(ValueError, match="StableDiffusion3Pipeline with the part transformer"):
        checkpoints.load(tmp_path)


def test_attention_inside_levels_has_ldms_names():
    vae = formats.vae_from_diffusers(CONFIGS["vavae"])
    abstract = names.abstract_vae(vae)
    found = {entry.torch for entry in names.vae_table(abstract, vae, "ldm")}
    assert {"encoder.down.1.attn.0.q.weight", "decoder.up.1.attn.1.proj_out.bias"} < found
    assert not any("up.0.attn" in name for name in found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_post_quant_conv": False}, "use_post_quant_conv is False, but only True is support"),
        ({"latents_mean": [0.0] * 4}, "latents_mean is [0.0, 0.0, 0.0, 0.0], but only None is"),
        ({"up_block_types": ["UpDecoderBlock2D", "AttnUpDecoderBlock2D"]}, "the config's up_block"),
        ({"_class_name": "AutoencoderKLFlux2"}, "is 'AutoencoderKLFlux2', but only 'Autoencoder"),
    ],
)
def test_unsupported_autoencoder_configs_are_errors_that_name_the_field(change, message):
    with pytest.raises(ValueError) as error:
        formats.vae_from_diffusers(CONFIGS["sdxl"] | change)
    assert message in str(error.value)


def test_a_level_that_does_not_exist_cannot_have_attention():
    vae = formats.vae_from_diffusers(CONFIGS["sd3"]).clone(attention_levels=(2,))
    with pytest.raises(ValueError, match=r"attention_levels is \(2,\), but .* the levels 0 to 1"):
        vae_module.check(vae)
