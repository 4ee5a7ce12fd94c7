"""Whole checkpoints are read from and written to files and folders."""

import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from diffusion_jax.text import tokenize
from sd_jax.unet import UNet
from sd_jax.vae import VAE
from sd_jax.weights import checkpoints, file_parts, names, schedulers, text
from tests.diffusion_jax.text.tiny_weights import case, state
from tests.diffusion_jax.weights import torch_writer
from tests.sd_jax.cases import unet_weights, vae_weights

WIDE = UNet(width=64, channel_mult=(1,), num_res_blocks=1, attention_levels=(0,))
SMALL_VAE = VAE(width=32, channel_mult=(1, 2), num_res_blocks=1)
FINAL = "text_model.final_layer_norm.bias"
BUFFERS = {
    name: np.zeros(1)
    for name in (
        "betas",
        "alphas_cumprod_prev",
        "sqrt_one_minus_alphas_cumprod",
        "posterior_mean_coef1",
        "logvar",
        "model_ema.decay",
        "model_ema.num_updates",
        "first_stage_model.loss.logvar",
    )
}


@functools.cache
def unet_state():
    """Return the weights of WIDE in LDM's names."""
    return unet_weights(WIDE)


@functools.cache
def vae_state():
    """Return the weights of SMALL_VAE in LDM's names."""
    return vae_weights(SMALL_VAE)


@functools.cache
def text_state(version):
    """Return the weights of a text encoder in the names of Stable Diffusion 1.x or 2.x."""
    kind, prefix, first = {"1.x": ("clip", "transformer.", "text_model."), "2.x": ("open_clip", "model.", "")}[version]
    weights = state(case(kind)).items()
    weights = {n: w for n, w in weights if not n.startswith(("vis", "logit_scale"))}
    return {f"{prefix}{n}": w for n, w in weights.items() if n.startswith(first)}


# No yaml of LDM states the heads of a text tower, so they are only defined here.
YAML = """
model:
  target: ldm.models.diffusion.ddpm.LatentDiffusion
  params:
    linear_start: 0.00085
    timesteps: 1000
    scale_factor: 0.18215
    image_size: 64
    unet_config:
      target: ldm.modules.diffusionmodules.openaimodel.UNetModel
      params: {model_channels: 64, channel_mult: [1], num_res_blocks: 1, num_head_channels: 64,
               attention_resolutions: [1], use_linear_in_transformer: true, legacy: false}
    cond_stage_config: {params: {num_attention_heads: 3}}
"""


def compvis(version="1.x"):
    """Return a state dict like CompVis': raw weights, doubled averages, buffers, a text encoder."""
    unet = unet_state()
    averages = {"diffusion_model" + name.replace(".", ""): 2 * w for name, w in unet.items()}
    return {
        **BUFFERS,
        **{f"model.diffusion_model.{name}": w for name, w in unet.items()},
        **{f"model_ema.{name}": w for name, w in averages.items()},
        **{f"first_stage_model.{name}": w for name, w in vae_state().items()},
        **{f"cond_stage_model.{name}": w for name, w in text_state(version).items()},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("compvis")
    for name, version in (("a", "1.x"), ("b", "2.x")):
        written(path / f"{name}.npz", compvis(version))
    checkpoints.save_diffusers(load(path / "a.npz"), path / "d", "v")
    return path


def written(path, state):
    """Write a file of weights and the ldm.yaml beside it, and return the file's path."""
    np.savez(path, **state)
    path.with_name("ldm.yaml").write_text(YAML)
    return path


def load(path, *arguments):
    """Load a file with the ldm.yaml in its folder."""
    return checkpoints.load(path, *arguments, config=path.with_name("ldm.yaml"))


def test_ema_selects_averages_or_raw_weights_of_a_file(folder):
    averaged, raw = (load(folder / "a.npz", ema).unet for ema in ("ema", "raw"))
    assert averaged.network == WIDE and averaged.text_width == 24
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, 2 * b), averaged.params, raw.params)
    report, arrays = load(folder / "a.npz").report, unet_state().values()
    count = sum(array.size for array in arrays)
    assert report[0] == f"unet: {len(arrays)} arrays (ldm, averages), {count:,} parameters, each used once"
    assert [line.partition(",")[0] for line in report[1:]] == ["vae: 124 arrays (ldm)", "text: 36 arrays"]


def test_a_folder_with_flax_weights_is_read_back_bit_for_bit(folder, tmp_path):
    read = load(folder / "a.npz")
    checkpoints.save_diffusers(read, tmp_path / "flax", flax=True)
    weights = sorted(path.name for path in (tmp_path / "flax").glob("*/*.*") if path.suffix != ".json")
    assert weights == ["diffusion_flax_model.msgpack"] * 2 + ["flax_model.msgpack"]
    for path in (tmp_path / "flax").glob("*/config.json"):  # Flax pipelines name their own classes.
        path.write_text(path.read_text().replace('"_class_name": "', '"_class_name": "Flax'))
    assert checkpoints.equal(read, checkpoints.load(tmp_path / "flax"))


def test_a_written_diffusers_folder_is_read_back_bit_for_bit(folder):
    read = load(folder / "a.npz")
    assert checkpoints.equal(read, checkpoints.load(folder / "d"))
    assert checkpoints.load(folder / "d" / "vae").vae.network == SMALL_VAE
    assert checkpoints.load(folder / "d").predicts == "v" and read.predicts is None
    raw = load(folder / "a.npz", "raw")
    assert not checkpoints.equal(read, raw) and not checkpoints.equal(read, read._replace(vae=None))
    padded = read._replace(text=read.text._replace(pads_with_0=True))
    assert not checkpoints.equal(read, padded)
    index = json.loads((folder / "d" / "model_index.json").read_text())
    assert index["unet"] == ["diffusers", "UNet2DConditionModel"]
    scheduler = json.loads((folder / "d" / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["prediction_type"] == "v_prediction"
    file = folder / "d" / "unet" / checkpoints.WEIGHTS
    with safetensors.safe_open(file, "np") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("dialect", ["ldm", "nemo"])
@pytest.mark.parametrize("version", ["a", "b"])
def test_a_written_file_is_read_back_bit_for_bit(folder, tmp_path, dialect, version):
    read = load(folder / f"{version}.npz")
    path = tmp_path / f"{dialect}.safetensors"
    checkpoints.save_file(read, path, dialect)
    assert checkpoints.equal(read, checkpoints.load(path))
    last = {"ldm": "model.diffusion_model.out.2", "nemo": "model.model.diffusion_model.out.1"}
    assert f"{last[dialect]}.bias" in safetensors.numpy.load_file(path)


def test_openclips_last_layer_is_not_loaded_and_is_written_as_zeros(folder, tmp_path):
    read = load(folder / "b.npz")
    assert (read.text.tower.num_layers, read.text.pads_with_0) == (1, True)
    assert read.report[2].startswith("text: 29 arrays, without OpenCLIP's last layer, ")
    checkpoints.save_file(read, tmp_path / "b.npz")
    written = np.load(tmp_path / "b.npz")
    for name, array in text_state("2.x").items():
        if name in ("model.text_projection", "model.logit_scale"):
            continue
        wanted = np.zeros_like(array) if ".resblocks.1." in name else array
        np.testing.assert_array_equal(written[f"cond_stage_model.{name}"], wanted)


@pytest.mark.parametrize("version", ["a", "b"])
def test_the_text_encoder_is_saved_with_names_of_transformers(folder, tmp_path, version):
    read = load(folder / f"{version}.npz")
    checkpoints.save_diffusers(read, tmp_path / "d")
    assert checkpoints.equal(read, checkpoints.load(tmp_path / "d"))
    config = json.loads((tmp_path / "d" / "text_encoder" / "config.json").read_text())
    assert config["hidden_act"] == {"a": "quick_gelu", "b": "gelu"}[version]
    assert config["pad_token_id"] == {"a": 39, "b": 0}[version]
    index = json.loads((tmp_path / "d" / "model_index.json").read_text())
    assert index["text_encoder"] == ["transformers", "CLIPTextModel"]


def test_the_report_of_a_vae_alone_says_that_its_scale_is_assumed(folder, tmp_path):
    np.savez(tmp_path / "vae.npz", **{f"first_stage_model.{n}": w for n, w in vae_state().items()})
    read = checkpoints.load(tmp_path / "vae.npz")
    assert read.scale == 0.18215
    assert "states no scale of the latents, so Stable Diffusion's 0.18215 is used" in read.report[1]
    checkpoints.save_file(read._replace(scale=0.5), tmp_path / "own.npz")
    own = checkpoints.load(tmp_path / "own.npz")
    assert own.scale == 0.5 and not any("scale" in line for line in own.report)
    whole = load(folder / "a.npz", "ema")
    assert not any("scale" in line for line in whole.report)


def test_a_text_encoder_other_than_clip_is_not_loaded(tmp_path):
    state = {n: w for n, w in compvis().items() if not n.startswith("cond_stage_model.")}
    read = load(written(tmp_path / "a.npz", state | {"cond_stage_model.bert.x": np.zeros(1)}))
    assert read.text is None
    assert read.report[2] == "text: arrays left out (1): they are not CLIP's"


def test_the_ids_of_a_saved_text_encoder_are_those_of_its_tokenizer(published, tmp_path):
    read = checkpoints.load(published / "d")
    tokenizer = tokenize.clip(published / "d" / "tokenizer")
    tokenizer.add_words({"cat": 2})  # Ids 40 and 41, after the end token.
    assert tokenizer.vocab_size == 42
    source = tmp_path / "source"
    shutil.copytree(published / "d", source)
    tokenizer._tokenizer.save(str(source / "tokenizer" / "tokenizer.json"))
    params = read.text.params["params"]
    longer = {**params, "token_embedding": np.ones((42, 24), np.float32)}
    longer = read.text._replace(tower=read.text.tower.clone(vocab_size=42), params={"params": longer})
    checkpoints.save_diffusers(read._replace(text=longer), tmp_path / "d", tokenizer=source)
    config = json.loads((tmp_path / "d" / "text_encoder" / "config.json").read_text())
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size")
    assert [config[name] for name in names] == [38, 39, 39, 42]
    clip = text.to_transformers(read.text._replace(tower=longer.tower.clone(vocab_size=49410)))[0]
    assert [clip[name] for name in names] == [49406, 49407, 49407, 49410]


def test_tokenizer_and_scheduler_are_copied(folder, published, tmp_path):
    source = tmp_path / "source"
    checkpoints.save_diffusers(checkpoints.load(folder / "d"), source)
    shutil.copytree(published / "d" / "tokenizer", source / "tokenizer")
    index = json.loads((source / "model_index.json").read_text())
    pndm = {"_class_name": "PNDMScheduler", "prediction_type": "epsilon", "steps_offset": 1}
    index |= {"tokenizer": ["transformers", "CLIPTokenizer"]}
    index |= {"scheduler": ["diffusers", "PNDMScheduler"]}
    (source / "model_index.json").write_text(json.dumps(index))
    (source / "scheduler" / "scheduler_config.json").write_text(json.dumps(pndm))
    read = checkpoints.load(source)
    checkpoints.save_diffusers(read, tmp_path / "to", tokenizer=source)
    assert (tmp_path / "to" / "tokenizer" / "merges.txt").read_text() == "#version: 0.2\n"
    assert checkpoints.load(tmp_path / "to").predicts == read.predicts == "eps"
    assert json.loads((tmp_path / "to" / "model_index.json").read_text()) == index
    assert checkpoints.load(tmp_path / "to").scheduler == pndm


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"beta_schedule": "linear"}, "beta_schedule is 'linear', but only Stable Diffusion's"),
        ({"trained_betas": [0.1]}, r"trained_betas is \[0.1\], but only Stable"),
        ({"prediction_type": "sample"}, "type is 'sample', but only epsilon and v_prediction"),
    ],
)
def test_an_unsupported_noise_schedule_is_an_error(folder, tmp_path, config, message):
    checkpoints.save_diffusers(checkpoints.load(folder / "d"), tmp_path / "d")
    (tmp_path / "d" / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        checkpoints.load(tmp_path / "d")


def test_a_folder_of_another_pipeline_is_an_error(folder, tmp_path):
    index = json.loads((folder / "d" / "model_index.json").read_text())
    index |= {"_class_name": "StableDiffusionXLPipeline"}
    index |= {"text_encoder_2": ["transformers", "CLIPTextModelWithProjection"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    message = "a StableDiffusionXLPipeline with the part text_encoder_2: only Stable Diffusion 1.x"
    with pytest.raises(ValueError, match=message):
        checkpoints.load(tmp_path)


def test_a_folder_with_shards_or_pickles_loads_the_same_weights(folder, tmp_path):
    """diffusers writes shards, and old versions of transformers wrote pickles."""
    shutil.copytree(folder / "d", tmp_path / "d")
    stems = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "text_encoder": "pytorch_model"}
    for part, stem in stems.items():
        (file,) = (tmp_path / "d" / part).glob("*.safetensors")
        arrays = list(safetensors.numpy.load_file(file).items())
        file.unlink()
        where, half = {}, len(arrays) // 2
        for i, shard in enumerate((arrays[:half], arrays[half:]) if part == "unet" else (arrays,)):
            name = f"{stem}-{i + 1:05}-of-00002.bin" if part == "unet" else f"{stem}.bin"
            torch_writer.save(file.with_name(name), dict(shard))
            where |= {key: name for key, _ in shard}
        if part == "unet":
            index = file.with_name(f"{stem}.bin.index.json")
            index.write_text(json.dumps({"weight_map": where}))
    assert checkpoints.equal(checkpoints.load(tmp_path / "d"), checkpoints.load(folder / "d"))


def test_the_user_can_set_the_number_of_norm_groups_of_a_loaded_file(folder):
    assert load(folder / "a.npz", "ema", 16).unet.network.norm_groups == 16


def test_a_file_without_prefixes_holds_a_single_network(folder, tmp_path):
    np.savez(tmp_path / "unet.npz", **unet_state())
    np.savez(tmp_path / "vae.npz", **vae_state())
    unet = checkpoints.load(tmp_path / "unet.npz", config=folder / "ldm.yaml")
    vae = checkpoints.load(tmp_path / "vae.npz")
    assert unet.unet.network == WIDE and unet.vae is None
    assert vae.vae.network == SMALL_VAE and vae.unet is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.diffusion_model.stray": np.zeros(1)}, "do not match the weights: missing stray; "),
        ({"first_stage_model.quant_conv.bias": None}, "missing keys (1): quant_conv.bias"),
        ({f"cond_stage_model.transformer.{FINAL}": None}, f"missing keys (1): {FINAL}"),
        ({"cond_stage_model.transformer.text_model.stray": np.zeros(1)}, "keys left over (1): text_model.stray"),
        ({"model_ema.diffusion_modelout2bias": None}, "missing out.2.bias; unknown none. Read"),
        ({"diffusion_model.out.2.bias": np.zeros(4)}, "the key 'out.2.bias' occurs twice: keep"),
        ({f"cond_stage_model.{FINAL}": np.zeros(24)}, f"the key '{FINAL}' occurs twice: keep one"),
    ],
)
def test_missing_and_extra_arrays_are_errors_that_list_them(tmp_path, change, message):
    state = {name: w for name, w in (compvis() | change).items() if w is not None}
    path = written(tmp_path / "a.npz", state)
    with pytest.raises(ValueError, match=re.escape(message)):
        load(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.weight", "these weights are not those of a Stable Diffusion UNet"),
        ("control_model.out.2.weight", "it holds a ControlNet instead of Stable Diffusion 1 or 2"),
        ("out.2.weight", "the UNet does not attend to text (it has no array attn2.to_k"),
    ],
)
def test_weights_of_another_network_are_an_error_also_with_a_config(tmp_path, name, message):
    path = written(tmp_path / "a.npz", {name: np.zeros((4, 4))})
    with pytest.raises(ValueError, match=re.escape(message)):
        load(path)


def test_the_markers_v_pred_and_ztsnr_are_obeyed_and_unused_arrays_are_counted(folder, tmp_path):
    strays = [
        "denoiser.sigmas",
        "safety_checker.a",
        "safety_checker.b",
        "cond_stage_model_ema.x",
        "embedding_manager.y",
    ]
    state = compvis() | dict.fromkeys(strays, np.ones(1)) | dict.fromkeys(("v_pred", "ztsnr"), np.zeros(0))
    read = load(written(tmp_path / "a.npz", state))
    assert checkpoints.equal(read, load(folder / "a.npz"))
    assert read.predicts == "v" and read.scheduler == checkpoints.ddim(zero_snr=True)
    assert read.report[3:] == [
        "the file is marked v_pred",
        "the file is marked ztsnr",
        "arrays of other networks, not used: cond_stage_model_ema (1), denoiser (1), "
        "embedding_manager (1), safety_checker (2)",
    ]
    checkpoints.save_diffusers(read, tmp_path / "d")
    from_folder = checkpoints.load(tmp_path / "d")
    assert schedulers.read_diffusion(from_folder.scheduler) == ("v", "zero_terminal_snr")
    checkpoints.save_file(from_folder, tmp_path / "b.safetensors")
    again = checkpoints.load(tmp_path / "b.safetensors")
    eps = YAML.replace("timesteps: 1000", "timesteps: 1000\n    parameterization: eps")
    (tmp_path / "ldm.yaml").write_text(eps)  # The marker takes precedence over the config.
    assert load(tmp_path / "a.npz").predicts == "v" and load(folder / "a.npz").predicts is None
    assert again.predicts == "v" and again.scheduler == read.scheduler


def test_a_file_with_only_averages_can_be_loaded(folder, tmp_path):
    state = {n: w for n, w in compvis().items() if not n.startswith("model.diffusion_model.")}
    path = written(tmp_path / "a.npz", state)
    assert checkpoints.equal(load(path), load(folder / "a.npz"))
    with pytest.raises(ValueError, match="holds only averages of the UNet: leave --ema=raw out"):
        load(path, "raw")


@pytest.mark.parametrize("unet", [UNet(), UNet(num_heads=8, linear_projections=False)])
def test_dots_are_restored_in_names_of_averages(unet):
    abstract = names.abstract_unet(unet, 768)
    for entry in names.unet_table(abstract, unet, "ldm"):
        assert file_parts._dotted(entry.torch.replace(".", "")) == entry.torch


def test_text_encoder_names_without_prefix_can_be_loaded(folder, tmp_path):
    state = {n.replace("transformer.text_model.", "transformer."): w for n, w in compvis().items()}
    assert checkpoints.equal(load(written(tmp_path / "a.npz", state)), load(folder / "a.npz"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_16_bit_and_8_bit_floats_are_loaded_as_float32(folder, tmp_path, dtype):
    short = {n: w.astype(jnp.dtype(dtype)) for n, w in compvis().items()}
    safetensors.numpy.save_file(short, tmp_path / "a.ckpt")  # The file is also renamed.
    (tmp_path / "ldm.yaml").write_text(YAML)
    read, whole = load(tmp_path / "a.ckpt"), load(folder / "a.npz")
    rounded = jax.tree.map(lambda w: w.astype(dtype).astype("float32"), whole.vae.params)
    jax.tree.map(np.testing.assert_array_equal, read.vae.params, rounded)


def test_a_folder_of_the_hugging_face_cache_can_be_loaded(folder, tmp_path):
    cache = tmp_path / "models--a--b"
    shutil.copytree(folder / "d", cache / "snapshots" / "12ab")
    assert checkpoints.equal(checkpoints.load(cache), checkpoints.load(folder / "d"))
    unet = cache / "snapshots" / "12ab" / "unet"
    raw = {n: 2 * w for n, w in safetensors.numpy.load_file(unet / checkpoints.WEIGHTS).items()}
    safetensors.numpy.save_file(raw, unet / "diffusion_pytorch_model.non_ema.safetensors")
    averaged, raw = (checkpoints.load(cache, ema).unet.params for ema in ("ema", "raw"))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(2 * a, b), averaged, raw)
    (cache / "snapshots" / "34cd").mkdir()
    with pytest.raises(ValueError, match="cache of the Hugging Face Hub with 2 versions: name one"):
        checkpoints.load(cache)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("12ab")
    checkpoints.load(cache)


def test_saving_to_an_invalid_target_or_with_invalid_options_is_an_error_and_writes_nothing(folder, tmp_path):
    read = checkpoints.load(folder / "d")
    with pytest.raises(ValueError, match="is not empty: choose a new folder"):
        checkpoints.save_diffusers(read, folder)
    with pytest.raises(ValueError, match="--predicts=x0: choose from eps, v"):
        checkpoints.save_diffusers(read, tmp_path / "x", "x0")
    assert not list(tmp_path.iterdir())  # No incomplete file remains.
    with pytest.raises(ValueError, match=r"--names=diffusers: for a file .* choose ldm or nemo"):
        checkpoints.save_file(read, tmp_path / "a.npz", "diffusers")
    with pytest.raises(ValueError, match=r"must end in \.safetensors or \.npz"):
        checkpoints.save_file(read, tmp_path / "a.bin")
    with pytest.raises(ValueError, match=r"ema is '0\.9': choose 'ema' or 'raw'"):
        checkpoints.load(folder / "d", "0.9")
