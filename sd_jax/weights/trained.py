"""Open a Stable Diffusion run as a model that draws, or write its LoRA factors."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax.devices import sharding
from diffusion_jax.draw import program
from diffusion_jax.draw import stage as stage_module
from diffusion_jax.draw.options import Values
from diffusion_jax.draw.stage import Stage
from diffusion_jax.text.encoder import LEARNED_WORD, read_learned
from diffusion_jax.weights import finetune, lora
from sd_jax import task, textual_inversion
from sd_jax.sampling import make_sampler_inputs
from sd_jax.settings import Settings, check_pipeline
from sd_jax.weights import embedding_files, lora_files, names
from sd_jax.weights.opened import read_unet, read_vae


def load_stage(workdir: str | os.PathLike[str], s: Settings, values: Values) -> Stage:
    """Open the model of a training run. The settings of the stage are a Pipeline.

    Args:
        workdir: The workdir of the run.
        s: The settings to draw with.
        values: The chosen values of options, which `s` contains already. They name the checkpoint,
            the average, the guide and files of textual inversion.

    Raises:
        FileNotFoundError: If there is no such checkpoint or guide.
        ValueError: If the checkpoint is damaged or has no such average, the config names no VAE, or
            the guide cannot guide this run.
    """
    if not s.vae_weights:
        raise ValueError(
            f"the config of {workdir} names no VAE, because it was trained on moments, but drawing "
            "needs the VAE: give it with --vae_weights=PATH"
        )
    p = s.pipeline
    check_pipeline(p)
    program.check_fits(*p.output_shape, p.vae.width * p.vae.channel_mult[0])
    mesh = sharding.make_mesh()  # Training may have used other devices.

    # The frozen networks.
    encoder, text_params = stage_module.open_encoder(s.text, mesh, sharding.RULES)
    vae_params = sharding.place_all(read_vae(s.vae_weights, s.vae), mesh, sharding.RULES)
    frozen, guide_settings = {"text": text_params, "vae": vae_params}, None
    if guide := values.get("guide"):
        init_of = lambda settings: task.make_task(settings, encoder, None).init
        guide_settings, frozen["guide"] = stage_module.load_guide(guide, s, read_run, init_of, mesh, sharding.RULES)

    # The UNet, to which a LoRA run adds its factors. A learned word changes only the text.
    trained = task.make_task(s, encoder, None)._replace(frozen=frozen)
    read_base = lambda: read_unet(s.unet_weights, s.unet, s.text.width)
    learns = bool(s.text.learned_tokens)
    adapt = textual_inversion.adapt if learns else None
    trained = finetune.adapted(trained, workdir, s.lora, read_base, mesh, adapt)
    # The words of files come after a learned word, whose saved vectors are the first.
    if embedding := values.get("embedding"):
        encoder, text_params = embedding_files.apply(embedding, encoder, text_params)
        frozen["text"] = sharding.place_all(text_params, mesh, sharding.RULES)

    def inputs_of(p, preview, strength):
        p = p._replace(strength=strength)
        check_pipeline(p)
        sampler_inputs = make_sampler_inputs(p, encoder, preview, guide_settings)
        if learns:
            return textual_inversion.with_word(sampler_inputs)
        return lora.drawn(sampler_inputs, s.lora) if s.lora.rank else sampler_inputs

    return stage_module.load_stage(workdir, p, encoder, trained, mesh, inputs_of, values, s.lora.scale)


read_run = functools.partial(stage_module.read_run, system="sd_jax")
"""(workdir, fields) -> the Settings of a run, as in stage.read_run."""


def write_lora(workdir: str | os.PathLike[str], path: str | os.PathLike[str], dialect: str, ema: str = "ema") -> None:
    """Write the factors of a LoRA run to a file with diffusers' or kohya's parameter names.

    For a run that learned a word, write its embedding as diffusers does. `dialect` is "diffusers"
    or "kohya". `ema` is "raw", the name of an average such as "0.9999", or "ema" for the average
    with the largest decay. Raises ValueError for other runs.
    """
    s = read_run(workdir)
    if s.text.learned_tokens:
        word, _, count = read_learned(s.text.learned_tokens)
        word_shape = {LEARNED_WORD: jax.ShapeDtypeStruct((count, s.text.width), jnp.float32)}
        shapes = jax.eval_shape(s.diffusion.objective.with_learned, word_shape)
        vectors = np.asarray(finetune.factors(workdir, s.lora, shapes, ema)[LEARNED_WORD])
        embedding_files.write(path, embedding_files.Embedding(word, vectors))
        return
    if not s.lora.rank:
        raise ValueError(f"{workdir} is not a LoRA run, so it has no factors to write: use --names=ldm or --names=nemo")
    shapes = jax.eval_shape(s.diffusion.objective.with_learned, names.abstract_unet(s.unet, s.text.width))
    params = finetune.factors(workdir, s.lora, shapes, ema)
    lora_files.write(path, params, s.lora, s.unet, dialect)
