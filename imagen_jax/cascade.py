"""Draw with a cascade of trained models: the first draws small images, and the others enlarge them.

    from imagen_jax import cascade

    stages = cascade.load(["runs/base64", "runs/sr256"])
    images = cascade.draw(stages, ["a red seven on gray paper"], seeds=[0])[-1]

Each stage has its own checkpoint, sampler and guidance. Images pass from a stage to the next one
without being clipped or rounded.
"""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from diffusion_jax.config import ranges
from diffusion_jax.config.ranges import Share
from diffusion_jax.devices import sharding
from diffusion_jax.diffusion import guidance as guidance_module
from diffusion_jax.draw import model, options
from diffusion_jax.draw.input_pictures import Pictures
from diffusion_jax.draw.model import Encoders, Model
from diffusion_jax.draw.options import NEWEST, Choice, Options, Weights
from diffusion_jax.draw.program import Images, default_batch_size, in_batches, previewed
from diffusion_jax.files import sheets
from diffusion_jax.precache import lookup
from diffusion_jax.task import Texts
from diffusion_jax.text import registry
from diffusion_jax.weights import finetune, lora
from imagen_jax import task
from imagen_jax.settings import Sampler, Settings, SuperResolution, check
from imagen_jax.weights.initial import read_unet

OPTIONS: Options = {
    **options.SHARED,
    "aug_sigma": options.of_group("super_resolution", SuperResolution)["aug_sigma"],
    **options.of_group("sampler", Sampler),
}
"""The options for drawing with a stage, keyed by name. The flags of imagen_jax.sample have the same
names."""


def choose(**values: Any) -> Choice:
    """Convert option values, such as steps=20, to a Choice, with which `load` opens a stage.

    Raises ValueError for an unknown name, a value of the wrong type, or a value out of range.
    """
    return options.choose(OPTIONS, values)


def load(
    workdirs: Sequence[str | os.PathLike[str]],
    choices: Sequence[Choice] = (),
    *,
    embedded: bool = False,
    strengths: Sequence[float] = (),
) -> tuple[Model, ...]:
    """Open the models of a cascade, and return them in the order of `workdirs`.

    Args:
        workdirs: The workdirs of the runs, in the order in which their models draw.
        choices: A Choice for each run, from `choose`. By default, the runs' own settings and newest
            checkpoints.
        embedded: Whether the models will draw from text embeddings computed elsewhere. If so,
            their text encoders are not opened.
        strengths: For each run, the share of the sampling steps that its model runs when it draws
            over a picture; by default, 1.

    Raises:
        FileNotFoundError: If a workdir holds no run.
        ValueError: If a stage does not draw images of the size that the next stage enlarges, or a
            choice is invalid for its run.
    """
    choices = choices or [Choice()] * len(workdirs)
    strengths = strengths or [1.0] * len(workdirs)
    stages = list(zip(workdirs, choices, strengths, strict=True))
    check_chain([(str(workdir), read_run(workdir, c.overrides)) for workdir, c, _ in stages])
    encoders: Encoders = {}
    return tuple(
        load_model(workdir, *choice, embedded=embedded, strength=strength, encoders=encoders)
        for workdir, choice, strength in stages
    )


def load_model(
    workdir: str | os.PathLike[str],
    overrides: Mapping[str, Any] = {},
    weights: Weights = NEWEST,
    guide: str = "",
    *,
    embedded: bool = False,
    strength: float = 1.0,
    encoders: Encoders | None = None,
) -> Model:
    """Open the model of a training run.

    Args:
        workdir: The workdir of the run.
        overrides: Values that replace those of the config, such as {"sampler.steps": 20}.
        weights: The saved weights to draw with.
        guide: The run whose model guides this one, as WORKDIR or WORKDIR@STEP; "" for none.
        embedded: Whether the model will draw from text embeddings computed elsewhere. If so,
            its text encoder is not opened.
        strength: The share of the sampling steps that the model runs when it draws over a picture.
        encoders: A cache, empty at first. Models that are opened with the same cache share the
            weights of their text encoders.

    Raises:
        FileNotFoundError: If there is no such run, checkpoint or guide.
        ValueError: If an argument is invalid for the run.
    """
    s = read_run(workdir, overrides)
    ranges.check_value("strength", strength, Share)
    mesh = sharding.make_mesh()  # Training may have used other devices.

    # The text encoder and the guide.
    if embedded and not registry.ENCODERS[s.text.encoder].pretrained:
        raise ValueError(
            f"{workdir} has the text encoder {s.text.encoder!r}, which cannot use embeddings from "
            "files: give --prompt=TEXT or --prompts=FILE instead"
        )
    if embedded:
        encoder, text_params = lookup.open_encoder(s.text, embedded), ()
    else:
        encoder, text_params = model.open_encoder(s.text, mesh, task.RULES, encoders)
    frozen = {"text": text_params}
    init_of = lambda settings: task.make_task(settings, encoder).init
    guiding = model.load_guide(guide, "imagen_jax", s, init_of, mesh, task.RULES)
    guide_settings = guiding.settings if guiding else None
    if guiding:
        frozen["guide"] = guiding.params

    # The UNet, to which a LoRA run adds its factors.
    imagen = task.make_task(s, encoder)._replace(frozen=frozen)
    read_base = lambda: read_unet(s.unet_weights, s.unet, s.text.width)
    imagen = finetune.adapted(imagen, workdir, s.lora, read_base, mesh)

    def begin_of(s, preview, picture_strength):
        check(s)
        share = strength if picture_strength is None else picture_strength
        begin = task.make_begin(s, encoder, guide_settings, share)
        return previewed(lora.drawn(begin, s.lora) if s.lora.rank else begin, preview)

    return model.load_model(
        workdir, s, encoder, imagen, mesh, begin_of, weights, guide=guide, lora_scale=s.lora.scale
    )


def read_run(workdir: str | os.PathLike[str], overrides: Mapping[str, Any] = {}) -> Settings:
    """Return the settings of a run, after replacing the fields in `overrides`.

    Raises FileNotFoundError if there is no run, and ValueError if an override is invalid for it.
    """
    return model.read_run(workdir, overrides, "imagen_jax")


def check_chain(stages: Sequence[tuple[str, Settings]]) -> None:
    """Raise ValueError if a stage does not draw images of the size that the next stage enlarges.

    This is also the case if the next stage is a base model, which enlarges nothing. `stages` holds
    the workdir and the settings of each stage.
    """
    for (before, a), (after, b) in itertools.pairwise(stages):
        if b.super_resolution.factor == 1:
            raise ValueError(
                f"{after} is a base model, which enlarges nothing: name it first, or leave it out"
            )
        if b.input_size != a.output_size:
            raise ValueError(
                f"{before} draws images of {a.output_size} pixels, but {after} enlarges images of "
                f"{b.input_size} pixels to {b.output_size}: add a stage between them, or choose a "
                f"stage that enlarges images of {a.output_size} pixels"
            )


def draw(
    stages: Sequence[Model],
    prompts: Sequence[str] | Sequence[Float[np.ndarray, "_ _"]],
    seeds: Sequence[int],
    low_res: UInt8[np.ndarray, "N h w 3"] | None = None,
    pictures: Pictures | None = None,
) -> list[UInt8[np.ndarray, "N H W 3"]]:
    """Draw one image for each prompt, with the seed at the same position in `seeds`.

    Return one array of N images per stage. Each image depends only on its own prompt, seed, small
    image and picture.

    Args:
        stages: The models, from the first to the last.
        prompts: The texts. Models opened with `embedded` need one embedding [tokens, width] per
            text instead.
        seeds: One seed per prompt.
        low_res: The images to enlarge if the first stage is a super-resolution model.
        pictures: The pictures that all stages draw over.

    Raises:
        ValueError: If the numbers of prompts and seeds differ, the images in `low_res` are not of
            the size that the first stage enlarges, or a picture does not have the aspect ratio of
            the drawn images.
    """
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts and {len(seeds)} seeds: give one seed per prompt")
    texts = [stage.encoder.tokenize(list(prompts)) for stage in stages]
    texts = with_pictures(stages, texts, pictures, len(prompts))
    check_low_res(stages[0], None if low_res is None else low_res.shape[1:3])
    small = None if low_res is None else low_res.astype(np.float32) / 127.5 - 1
    batches = draw_batches(stages, texts, seeds, batch_sizes(stages, len(seeds)), small)
    return [sheets.to_uint8(np.concatenate(images)) for images in zip(*batches, strict=True)]


def draw_batches(
    stages: Sequence[Model],
    texts: Sequence[Texts],
    seeds: Sequence[int],
    sizes: Sequence[int],
    low_res: Images | None = None,
    guidance: float | None = None,
) -> Iterator[list[Images]]:
    """Draw in batches. For each batch, yield a list with one array of images per stage.

    The arrays of a batch show the same images at the sizes of the stages, in about [-1, 1].

    Args:
        stages: The models, from the first to the last.
        texts: The tokens or embeddings for each stage.
        seeds: One seed per image.
        sizes: The batch size of each stage.
        low_res: The images that the first stage enlarges, in about [-1, 1].
        guidance: The guidance scale of all stages. By default, each stage uses its own.
    """
    stage, batch = stages[0], dict(texts[0])
    if low_res is not None:
        batch["low_res"] = low_res
    s = stage.settings.sampler
    scale = s.guidance if guidance is None else guidance
    by_image = guidance_module.by_image(s, scale, len(seeds))
    first = 0
    for images in in_batches(stage.draw, stage.params, batch, seeds, by_image, sizes[0]):
        rows = slice(first, first + len(images))
        first = rows.stop
        if len(stages) == 1:
            yield [images]
            continue
        later = [{name: array[rows] for name, array in t.items()} for t in texts[1:]]
        done = 0
        for larger in draw_batches(stages[1:], later, seeds[rows], sizes[1:], images, guidance):
            yield [images[done : done + len(larger[0])], *larger]
            done += len(larger[0])


def with_pictures(
    stages: Sequence[Model], texts: Sequence[Texts], pictures: Pictures | None, num_texts: int
) -> list[Texts]:
    """Return the texts of each stage together with the pictures to draw over.

    The pictures are resized to the size of the images that the stage draws. If `pictures` is None,
    the texts are returned unchanged. Raises ValueError if a picture has another aspect ratio than
    these images.
    """
    if pictures is None:
        return list(texts)
    shapes = output_shapes(stages)
    height, width = shapes[0]
    for image in pictures.images:
        if image.width * height != image.height * width:
            wanted = "a square" if height == width else f"the shape {width}x{height}"
            raise ValueError(f"the picture is {image.width}x{image.height}: crop it to {wanted}")
    return [
        {**text, **pictures.at((width, height), num_texts)}
        for text, (height, width) in zip(texts, shapes, strict=True)
    ]


def output_shapes(stages: Sequence[Model]) -> list[tuple[int, int]]:
    """Return the (height, width) in pixels of the images that each stage of a cascade draws."""
    sizes, first = [stage.settings.output_size for stage in stages], stages[0].settings
    if first.super_resolution.factor > 1:
        return [(size, size) for size in sizes]
    height, width = first.output_shape
    return [(height * size // sizes[0], width * size // sizes[0]) for size in sizes]


def describe(stage: Model) -> dict[str, Any]:
    """Describe a stage's weights, image size and sampler, for the metadata saved with each picture.

    Sampler settings with the value infinity (guidance_high without a limit) are left out, because
    JSON has no infinity.
    """
    s = stage.settings
    sampler = {k: v for k, v in s.sampler._asdict().items() if v != float("inf")}
    if not s.sampler.fields:
        del sampler["fields"]
    if not (s.sampler.grid or s.sampler.end):  # Metadata without these fields mean the defaults.
        sampler = {k: v for k, v in sampler.items() if k not in ("grid", "end", "offset")}
    described = {"workdir": stage.workdir, "checkpoint": stage.step, "ema": stage.ema}
    described |= {"guide": stage.guide} if stage.guide else {}
    described |= stage.lora
    described |= {"size": s.output_size, "training_seed": s.run.seed, "sampler": sampler}
    if s.super_resolution.factor > 1:
        described["aug_sigma"] = s.super_resolution.aug_sigma
    return described


def card(stages: Sequence[Model]) -> dict[str, Any]:
    """Return the metadata saved with each picture.

    It holds the guidance scale of the first stage, and a dict for each stage (see `describe`).
    """
    stage_cards = []
    for stage in stages:
        s, described = stage.settings, describe(stage)
        sampler = described.pop("sampler")
        described |= {"sampler": sampler.pop("name"), **sampler}
        stage_cards.append(
            described | ({"low_res": s.input_size} if s.super_resolution.factor > 1 else {})
        )
    return {"guidance": stages[0].settings.sampler.guidance, "stages": stage_cards}


def batch_sizes(stages: Sequence[Model], num_images: int) -> list[int]:
    """Return the default batch size of each stage. Larger images use smaller batches."""
    return [min(default_batch_size(*shape), num_images) for shape in output_shapes(stages)]


def check_low_res(first: Model, size: tuple[int, ...] | None) -> None:
    """Raise ValueError unless the first stage can start from images of the given size.

    `size` is (height, width) in pixels, or None if there are no images to enlarge.
    """
    s, workdir = first.settings, first.workdir
    if s.super_resolution.factor == 1:
        if size is not None:
            raise ValueError(
                f"{workdir} is a base model, which draws from text alone and does not enlarge "
                "images: remove the low-resolution image"
            )
        return
    enlarges = f"{workdir} enlarges images of {s.input_size}x{s.input_size}"
    if size is None:
        raise ValueError(
            f"{enlarges}: name a model that draws such images before it, or give the images to "
            "enlarge as low_res"
        )
    if size != (s.input_size, s.input_size):
        raise ValueError(
            f"{enlarges}, but low_res has an image of {size[1]}x{size[0]}: resize this image"
        )
