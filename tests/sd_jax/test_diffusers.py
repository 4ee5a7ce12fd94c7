"""Compare with diffusers, if it is installed: it reads our files and samples the same images.

pip install torch diffusers transformers
"""

import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sd_jax import drawing
from sd_jax.unet import UNet
from sd_jax.weights import checkpoints
from tests.sd_jax import written_models

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Warnings of diffusers.

VERSIONS = {
    "1.x": UNet(32, (1, 2), 1, (0, 1), num_heads=8, linear_projections=False),
    "2.x": UNet(64, (1, 2), 2, (1,), num_heads=0, head_dim=64),
}
PREDICTS = {"1.x": "eps", "2.x": "v"}


@pytest.fixture(scope="module", params=VERSIONS)
def version(request):
    return request.param


@pytest.fixture(scope="module")
def folder(version, published, tmp_path_factory):
    path = tmp_path_factory.mktemp(version) / "d"
    unet, predicts = VERSIONS[version], PREDICTS[version]
    return written_models.write(path, unet, predicts, published, text=version)


@pytest.fixture(scope="module")
def pipeline(folder, version):
    loaded = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    # The tiny tokenizer has no config with these values.
    loaded.tokenizer.model_max_length = 16
    if version == "2.x":
        loaded.tokenizer.pad_token = loaded.tokenizer.convert_ids_to_tokens(0)
    return loaded


def close(ours, theirs):
    theirs = theirs.detach().numpy()
    theirs = theirs.transpose(0, 2, 3, 1) if theirs.ndim == 4 else theirs
    error = np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max()
    print(f"relative error {error:.2e}")
    assert error < 1e-5  # Measured: up to 2e-6.


def test_networks_match_the_outputs_of_diffusers(folder, pipeline):
    read, rng = checkpoints.load(folder), np.random.default_rng(0)
    of = lambda part: jax.tree.map(jnp.asarray, part.params)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    to_torch = lambda x: torch.from_numpy(np.array(x.transpose(0, 3, 1, 2)))
    x, text, pixels = draw(2, 8, 12, 4), draw(2, 16, 24), draw(1, 24, 40, 3)
    z, ids = draw(1, 6, 10, 4), jnp.asarray(rng.integers(0, 40, (2, 16)))
    time = jnp.array([3.0, 981.0])
    with torch.no_grad():
        theirs = pipeline.unet(to_torch(x), torch.tensor([3.0, 981.0]), torch.from_numpy(np.array(text))).sample
        close(read.unet.network.apply(of(read.unet), x, time, text), theirs)
        encoded = pipeline.vae.encode(to_torch(pixels)).latent_dist.parameters
        close(read.vae.network.apply(of(read.vae), pixels, method="encode"), encoded)
        decoded = pipeline.vae.decode(to_torch(z)).sample
        close(read.vae.network.apply(of(read.vae), z, method="decode"), decoded)
        states = pipeline.text_encoder(torch.from_numpy(np.array(ids))).last_hidden_state
        close(read.text.tower.apply(of(read.text), ids).last, states)


def test_a_directory_saved_by_diffusers_is_read_and_written_without_changes(folder, pipeline, tmp_path):
    pipeline.save_pretrained(tmp_path / "theirs")
    read = checkpoints.load(tmp_path / "theirs")
    assert checkpoints.equal(read, checkpoints.load(folder))
    source = tmp_path / "theirs"
    checkpoints.save_diffusers(read, tmp_path / "ours", tokenizer=source)
    again = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "ours")
    for part in ("unet", "vae", "text_encoder"):
        before, after = (getattr(p, part).state_dict() for p in (pipeline, again))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    configs = [dict(p.scheduler.config) for p in (pipeline, again)]
    assert all(config.pop("_use_default_values", True) for config in configs)
    assert configs[0] == configs[1]


COMMON = {"negative_prompt": "b", "height": 32, "width": 48}
VALUES = {"guidance": 3.0, **COMMON}


def difference(ours, pipeline, prompt, noise, steps):
    """Return the largest difference to a picture of the pipeline from the same noise."""
    values = {"num_inference_steps": steps, "guidance_scale": 3.0, **COMMON}
    latents = torch.from_numpy(noise.transpose(0, 3, 1, 2).copy())
    theirs = pipeline(prompt, latents=latents, output_type="np", **values).images
    return np.abs(np.clip((ours + 1) / 2, 0, 1) - theirs).max()


OFFSET = {"timestep_spacing": "leading", "steps_offset": 1}
KARRAS = {"use_karras_sigmas": True}
SCHEDULERS = {
    "DDIM": ("ddim", OFFSET),
    "PNDM": ("plms", {"skip_prk_steps": True}),
    "EulerDiscrete": ("euler", {"timestep_spacing": "linspace"}),
    "EulerDiscrete Karras": ("euler", OFFSET | KARRAS),
    "EulerAncestralDiscrete": ("euler_ancestral", {"timestep_spacing": "trailing"}),
    "HeunDiscrete": ("heun", OFFSET),
    "DPMSolverMultistep": ("dpmpp_2m", {"timestep_spacing": "linspace"}),
    "DPMSolverMultistep Karras": ("dpmpp_2m", KARRAS),
    "UniPCMultistep": ("unipc", {"timestep_spacing": "linspace"}),
    "UniPCMultistep Karras": ("unipc", KARRAS),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_scheduler_in_a_directory_chooses_our_sampler_with_equal_images(
    name, folder, version, pipeline, tmp_path, monkeypatch
):
    """From prompt to pixels with the same noise. The directory chooses the sampler and its grid."""
    sampler, changes = SCHEDULERS[name]
    kind = getattr(diffusers, f"{name.partition(' ')[0]}Scheduler")
    config = {"clip_sample": False, "prediction_type": pipeline.scheduler.config.prediction_type}
    scheduler = kind.from_config({**pipeline.scheduler.config, **config, **changes})
    shutil.copytree(folder, tmp_path / "d")
    scheduler.save_pretrained(tmp_path / "d" / "scheduler")
    rng = np.random.default_rng(1)
    noise, draws = rng.standard_normal((2, 8, 1, 8, 12, 4), np.float32)
    written_models.start_from(noise[0], monkeypatch)
    rows = lambda keys, shape: lambda i: jnp.asarray(draws)[i].repeat(len(keys), 0)
    monkeypatch.setattr("diffusion_jax.diffusion.samplers.gaussian_noise", rows)
    model = drawing.load(tmp_path / "d", steps=5, **VALUES)
    assert model.stages[0].settings.sampler.name == sampler + "_v" * (sampler == "plms" and version == "2.x")
    ((ours,),) = model.batches(["a c d"], [0], [0])
    left = iter(draws.transpose(0, 1, 4, 2, 3).copy())
    monkeypatch.setattr(
        sys.modules[kind.__module__], "randn_tensor", lambda *_, **__: torch.from_numpy(next(left)), raising=False
    )
    monkeypatch.setattr(pipeline, "scheduler", kind.from_pretrained(tmp_path / "d" / "scheduler"))
    error = difference(ours, pipeline, "a c d", noise[0], 5)
    print(f"{name}: {error:.2e}")
    assert error < 1e-4  # For pixels between 0 and 1.


SAVED = {
    "shards": {"max_shard_size": "300KB"},
    "bin": {"safe_serialization": False},
    "shards of bin": {"safe_serialization": False, "max_shard_size": "300KB"},
    "fp16": {"variant": "fp16"},
    "shards of fp16": {"variant": "fp16", "max_shard_size": "150KB"},
    "shards of fp16 bin": {"variant": "fp16", "max_shard_size": "150KB", "safe_serialization": False},
}


@pytest.mark.parametrize("how", SAVED)
def test_every_format_that_diffusers_saves_can_be_loaded(folder, pipeline, tmp_path, how):
    half = "fp16" in how
    saved = diffusers.StableDiffusionPipeline.from_pretrained(
        folder, torch_dtype=torch.float16 if half else torch.float32
    )
    saved.save_pretrained(tmp_path / "d", **SAVED[how])
    shards = [path for path in (tmp_path / "d" / "unet").iterdir() if "-of-" in path.name]
    assert (len(shards) > 1) is ("shards" in how)
    read, whole = checkpoints.load(tmp_path / "d"), checkpoints.load(folder)
    cast = lambda w: w.astype(np.float16).astype(np.float32) if half else w
    for ours, theirs in ((read.unet, whole.unet), (read.vae, whole.vae), (read.text, whole.text)):
        assert ours[0] == theirs[0]
        expected = jax.tree.map(cast, theirs.params)
        jax.tree.map(np.testing.assert_array_equal, ours.params, expected)


@pytest.mark.parametrize("sampler", ["ddim", "plms"])
def test_text_to_image_matches_the_pipeline_of_diffusers(folder, pipeline, sampler, monkeypatch):
    """Takes five steps from the same noise, at guidance 3, with a negative prompt."""
    # PLMS of diffusers averages v of several times, which is not a prediction of one time. So
    # the models are compared as predictors of eps.
    predicts = "eps" if sampler == "plms" else None
    model = drawing.load(folder, prediction=predicts, sampler=sampler, steps=5, **VALUES)
    noise = np.random.default_rng(1).standard_normal((1, 8, 12, 4), np.float32)
    written_models.start_from(noise, monkeypatch)
    ((ours,),) = model.batches(["a c d"], [0], [0])
    scheduler = {"ddim": diffusers.DDIMScheduler, "plms": diffusers.PNDMScheduler}[sampler]
    changes = {"skip_prk_steps": True} | ({"prediction_type": "epsilon"} if predicts else {})
    monkeypatch.setattr(pipeline, "scheduler", scheduler.from_config(pipeline.scheduler.config, **changes))
    error = difference(ours, pipeline, "a c d", noise, 5)
    print(f"{sampler}: {error:.2e}")
    assert error < 1e-4  # For pixels between 0 and 1.


@pytest.mark.parametrize("pad", ["a</w>", "<|endoftext|>"])
@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_the_tokenizers_files_in_a_directory_decide_its_padding(folder, tmp_path, pad, file, monkeypatch):
    """The first token is the padding of Stable Diffusion 2, where it is "!"."""
    shutil.copytree(folder, tmp_path / "d")
    names = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": pad}
    (tmp_path / "d" / "tokenizer" / f"{file}.json").write_text(json.dumps(names))
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "d")
    pipeline.tokenizer.model_max_length = 16
    assert pipeline.tokenizer.pad_token == pad
    noise = np.random.default_rng(1).standard_normal((1, 8, 12, 4), np.float32)
    written_models.start_from(noise, monkeypatch)
    model = drawing.load(tmp_path / "d", sampler="ddim", steps=3, **VALUES)
    ((ours,),) = model.batches(["a &amp; d"], [0], [0])
    scheduler = diffusers.DDIMScheduler.from_config(pipeline.scheduler.config)
    monkeypatch.setattr(pipeline, "scheduler", scheduler)
    error = difference(ours, pipeline, "a &amp; d", noise, 3)
    print(f"{pad}: {error:.2e}")
    assert error < 1e-4  # For pixels between 0 and 1. With the other padding: 0.4.
