"""Draws with a Stable Diffusion model, trained here or elsewhere: in a notebook, or for a command.

    from sd_jax import drawing

    model = drawing.load("runs/sd_quickstart")
    images = drawing.draw(model, ["a red seven on gray paper"], seeds=[0])

`load` also opens diffusers directories and single files of CompVis, Stability, MLPerf and NeMo.
"""

import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.typing import DTypeLike
from jaxtyping import UInt8

from diffusion_jax import drawing, pretrained, sharding, sheets
from diffusion_jax.drawing import Images
from diffusion_jax.text import TextEncoder, clip
from diffusion_jax.trained import Model
from sd_jax import checkpoints, sampling, task, trained
from sd_jax import settings as settings_module
from sd_jax import text as text_module
from sd_jax import vae as vae_module
from sd_jax.checkpoints import Checkpoint, VAEPart
from sd_jax.pretrained import read_vae
from sd_jax.settings import Conditioning, Diffusion, Latents, Pipeline, Sampler
from sd_jax.trained import Choice
from sd_jax.vae import VAE

DEFAULTS = Sampler("plms", steps=50, eta=0.0, guidance=7.5, negative_prompt="", height=0, width=0)
"""For models from elsewhere; as NeMo draws."""


class File(NamedTuple):
    """What a checkpoint from elsewhere may not say; None where it does, or is as most are."""

    predicts: str | None = None
    """"eps" or "v"; else what the scheduler's config says, or eps for 1.x."""
    tokenizer: str | None = None
    """A folder with CLIP's tokenizer, which single files lack."""
    norm_groups: int | None = None
    """16 for MLPerf's files."""
    dtype: DTypeLike | None = None
    """That the networks compute in; bfloat16, but float32 on CPUs."""


def load(
    path: str | os.PathLike[str], choice: Choice | None = None, file: File | None = None
) -> Model:
    """The model of a training run's workdir, a diffusers directory or a single file.

    `file` is for the last two. FileNotFoundError, or ValueError that says what is missing or wrong.
    """
    choice = choice or Choice()
    path = pathlib.Path(path)
    if path.is_file() or (path / "model_index.json").is_file() or (path / "unet").is_dir():
        return _open_checkpoint(path, choice, file or File())
    if not path.is_dir():
        raise FileNotFoundError(f"there is no {path}: name a run, a diffusers directory or a file")
    model = trained.load_model(path, choice)
    return Model(**{**model._asdict(), "settings": trained.pipeline(model.settings, choice)})


def draw(
    model: Model,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    negative_prompt: str | None = None,
    guidance: float | None = None,
    images: UInt8[np.ndarray, "N H W 3"] | None = None,
) -> UInt8[np.ndarray, "N H W 3"]:
    """One image for each prompt and seed (as many of both); None stands for the model's settings.

    Image n depends on its prompt, its seed and what it starts from, images[n], alone. ValueError if
    the numbers or sizes do not fit.
    """
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts and {len(seeds)} seeds: give one seed a prompt")
    if images is not None:
        if len(images) != len(seeds):
            raise ValueError(f"{len(images)} images and {len(seeds)} seeds: give one for each")
        settings_module.check_size(model.settings, "the images' height", images.shape[1])
        settings_module.check_size(model.settings, "the images' width", images.shape[2])
    batches = draw_batches(model, prompts, seeds, negative_prompt, guidance, images)
    return np.concatenate([sheets.to_uint8(some) for some in batches])


def draw_batches(
    model: Model,
    prompts: Sequence[str],
    seeds: Sequence[int],
    negative_prompt: str | None = None,
    guidance: float | None = None,
    images: UInt8[np.ndarray, "N H W 3"] | None = None,
    batch_size: int | None = None,
) -> Iterator[Images]:
    """As `draw`, `batch_size` images at a time as soon as they are there, about in [-1, 1].

    At guidance 1 the negative prompt is not even encoded.
    """
    sampler = model.settings.sampler
    negative = sampler.negative_prompt if negative_prompt is None else negative_prompt
    scale = sampler.guidance if guidance is None else guidance
    scales = None if scale == 1 else np.full(len(seeds), scale, np.float32)
    batch = dict(sampling.prompts(model.encoder, prompts, negative))
    if images is not None:
        batch[sampling.IMAGE] = images
    size = min(batch_size or default_batch_size(model), len(seeds))
    yield from drawing.in_batches(model.draw, model.params, batch, seeds, scales, size)


def default_batch_size(model: Model) -> int:
    """How many images are drawn at once by default: fewer where they are larger."""
    return drawing.default_batch_size(*model.settings.output_shape)


def _open_checkpoint(path: pathlib.Path, choice: Choice, file: File) -> Model:
    sampler = trained.chosen_sampler(DEFAULTS, choice)
    settings_module.check_sampler(sampler)  # Before anything is read.
    opened = checkpoints.load(path, choice.ema, file.norm_groups)
    p = _pipeline(path, opened, choice, file, sampler)
    settings_module.check_pipeline(p)
    unet, vae = _part(path, opened.unet, "UNet"), p.vae
    vae_params = opened.vae and opened.vae.params
    if choice.vae_weights:
        vae_params = read_vae(choice.vae_weights, vae)
    encoder = _encoder(path, opened, choice, file, unet.text_width, p.unet.dtype)
    logging.info(
        "%s: predicts %s, computes in %s, attention by %s",
        path, p.diffusion.predicts, jnp.dtype(p.unet.dtype).name, p.unet.attention_impl,
    )  # fmt: skip
    mesh = sharding.make_mesh()
    frozen = {"text": encoder.frozen, "vae": _for_drawing(vae_params, vae.dtype)}
    frozen = sharding.place_all(frozen, mesh, task.RULES)
    params = sharding.place_all(_for_drawing(unet.params, p.unet.dtype), mesh, task.RULES)
    sample = drawing.make_draw(sampling.make_sample(p, encoder, choice.preview), frozen, mesh)
    return Model(str(path), p, encoder, sample, params, choice.ema, 0)


def _pipeline(
    path: pathlib.Path, opened: Checkpoint, choice: Choice, file: File, sampler: Sampler
) -> Pipeline:
    """The checkpoint's own settings, and those that were chosen; ValueError if one is missing."""
    on = {"dtype": file.dtype or (jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)}
    cudnn = jax.default_backend() == "gpu" and jnp.dtype(on["dtype"]).itemsize == 2
    unet = _part(path, opened.unet, "UNet").network
    unet = unet.clone(**on, attention_impl="cudnn" if cudnn else "xla")
    published = VAEPart(VAE(), None) if choice.vae_weights else None  # The VAE of all versions.
    vae = _part(path, opened.vae or published, "VAE").network.clone(**on)
    predicts = file.predicts or opened.predicts or ("" if unet.linear_projections else "eps")
    if not predicts:
        raise ValueError(
            f"{path} does not say what its UNet predicts, and models like 2.x are of both kinds: "
            "give --prediction=eps (512 pixels) or --prediction=v (768 pixels, MLPerf's)"
        )
    size = opened.latent_size * vae_module.factor(vae)
    latents = Latents(image_size=size, scale=opened.scale, pixels="symmetric")
    diffusion = Diffusion(predicts, offset_noise=0.0, min_snr=0.0)
    conditioning = Conditioning(drop_to="empty", pad_to=0)
    return Pipeline(unet, vae, conditioning, latents, diffusion, sampler, choice.strength)


def _part(path: pathlib.Path, part: Any, kind: str) -> Any:
    if part is None:
        raise ValueError(f"{path} holds no {kind}, which drawing needs: name a whole model")
    return part


def _encoder(
    path: pathlib.Path,
    opened: Checkpoint,
    choice: Choice,
    file: File,
    width: int,
    dtype: DTypeLike,
) -> TextEncoder:
    """The checkpoint's text encoder, or that of choice.text_weights, and its tokenizer."""
    part, folder = opened.text, path / "tokenizer"
    if choice.text_weights:
        folder = pretrained.locate(choice.text_weights)
        part = text_module.from_folder(folder)
    part = _part(path, part, "text encoder (else say where one is with --text_weights=FOLDER)")
    if file.tokenizer:
        folder = pathlib.Path(file.tokenizer)
    if not folder.is_dir():
        raise ValueError(
            f"{path} holds no tokenizer, as single files never do: name a folder that has CLIP's "
            "(vocab.json and merges.txt) with --tokenizer=FOLDER"
        )
    tokenizer = clip.open_tokenizer(folder, part.pads_with_0)
    if part.tower.width != width:
        raise ValueError(
            f"the UNet in {path} attends to text {width} wide, and the text encoder is "
            f"{part.tower.width} wide: they are of different models"
        )
    frozen = _for_drawing(part.params, dtype)
    return clip.of_tower(part.tower.clone(dtype=dtype), frozen, tokenizer, part.tower.max_tokens)


def _for_drawing(params: Any, dtype: DTypeLike) -> Any:
    """Kernels in the type that they are used in: the same numbers, from less memory."""

    def turned(path, leaf):
        return leaf.astype(dtype) if path[-1].key == "kernel" else leaf

    return jax.tree.map_with_path(turned, params)
