"""Trained models, one or several in a row: a base model draws small, the others enlarge.

    from imagen_jax import cascade

    stages = cascade.load(["runs/base64", "runs/sr256"])
    images = cascade.draw(stages, ["a red seven on gray paper"], seeds=[0])[-1]

Each stage has its own checkpoint, sampler and guidance. What a stage draws reaches the next one as
it is, neither clipped nor rounded.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from diffusion_jax import finetune, lora
from diffusion_jax.diffusion.guidance import scales as scales_of
from diffusion_jax.draw import model
from diffusion_jax.draw.model import Encoders, Model, replaces
from diffusion_jax.draw.pictures import Given
from diffusion_jax.draw.program import Images, default_batch_size, in_batches, previewed
from diffusion_jax.machine import sharding, sheets
from diffusion_jax.precache import lookup
from diffusion_jax.task import Texts
from diffusion_jax.text import registry
from imagen_jax import task
from imagen_jax.settings import Sampler, Settings, check
from imagen_jax.weights.initial import read_unet


@model.with_fields_of("sampler", Sampler)
@dataclasses.dataclass(frozen=True)
class Choice(model.Choice):
    """Which weights a stage draws with, and how; None stands for what the run's config says."""

    aug_sigma: float | None = replaces(
        "super_resolution.aug_sigma", "Noise put on the small images."
    )
    strength: float = 1.0
    """The share of the steps that draw over a given picture: see diffusion.editing."""


def load(
    workdirs: Sequence[str | os.PathLike[str]],
    choices: Sequence[Choice] = (),
    embedded: bool = False,
) -> tuple[Model, ...]:
    """The models of these runs, in the order in which they draw, as `choices` say.

    Their text encoders are opened; if `embedded`, none is, and they draw from embeddings that
    others made. ValueError if a stage does not draw what the next enlarges, or has no encoder.
    """
    named = list(zip(workdirs, choices or [Choice()] * len(workdirs), strict=True))
    check_chain([(str(workdir), read_run(workdir, choice)) for workdir, choice in named])
    encoders: Encoders = {}
    return tuple(load_model(workdir, choice, encoders, embedded) for workdir, choice in named)


def load_model(
    workdir: str | os.PathLike[str],
    choice: Choice | None = None,
    encoders: Encoders | None = None,
    embedded: bool = False,
) -> Model:
    """The model of a training run; ValueError or FileNotFoundError if there is no such one.

    Models that are loaded with the same `encoders` (a dict, empty at first) share the weights of
    their text encoders. `embedded` as for `load`.
    """
    choice = choice or Choice()
    s = read_run(workdir, choice)
    if not 0 <= choice.strength <= 1:
        raise ValueError(f"strength {choice.strength} is no share of the steps, from 0 to 1")
    mesh = sharding.make_mesh()  # Of the devices here, which need not be those of the training.
    if embedded and not registry.ENCODERS[s.text.encoder].pretrained:
        raise ValueError(
            f"the text encoder {s.text.encoder!r} needs --prompt=TEXT or --prompts=FILE: nobody "
            "makes embeddings of it before they are drawn from"
        )
    if embedded:
        encoder, frozen = lookup.open_encoder(s.text, embedded), ()
    else:
        encoder, frozen = model.open_encoder(s.text, mesh, task.RULES, encoders)
    init_of = lambda run: task.make_task(run, encoder).init
    guide = model.load_guide(choice, "imagen_jax", s, init_of, mesh, task.RULES)
    if guide:
        frozen = {"text": frozen, "guide": guide[1]}

    def begin_of(changed, preview):
        check(changed)
        begin = task.make_task(changed, encoder, guide and guide[0], choice.strength).begin
        assert begin
        return previewed(lora.drawn(begin, s.lora) if s.lora.rank else begin, preview)

    imagen = task.make_task(s, encoder)._replace(frozen=frozen)
    base = lambda: read_unet(s.unet_weights, s.unet, s.text.width)
    imagen = finetune.adapted(imagen, workdir, s.lora, base, mesh)
    return model.load_model(workdir, choice, s, encoder, imagen, mesh, begin_of)


def read_run(workdir: str | os.PathLike[str], choice: Choice) -> Settings:
    """The settings of a run, with what was chosen in place of the config's; errors as of a load."""
    return model.read_run(workdir, choice, "imagen_jax")


def check_chain(stages: Sequence[tuple[str, Settings]]) -> None:
    """ValueError unless each stage, given as workdir and settings, enlarges what the last draws."""
    for (before, a), (after, b) in itertools.pairwise(stages):
        if b.super_resolution.factor == 1:
            raise ValueError(
                f"{after} is a base model, which enlarges nothing: it can only be the first stage"
            )
        if b.input_size != a.output_size:
            raise ValueError(
                f"{before} draws {a.output_size} pixels and {after} enlarges {b.input_size} to "
                f"{b.output_size}: name a stage in between, or one that fits"
            )


def draw(
    stages: Sequence[Model],
    prompts: Sequence[str] | Sequence[Float[np.ndarray, "_ _"]],
    seeds: Sequence[int],
    low_res: UInt8[np.ndarray, "N h w 3"] | None = None,
    given: Given | None = None,
) -> list[UInt8[np.ndarray, "N H W 3"]]:
    """One image for each prompt and seed (as many of both), as every stage drew it.

    Models that were loaded for them take embeddings, [tokens, width] each, as `prompts`. `low_res`
    is what the first stage enlarges if it is a super-resolution model; `given` are pictures that
    all draw over. Image n depends on its prompt, seed and these alone. ValueError if the numbers or
    sizes do not fit.
    """
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts and {len(seeds)} seeds: give one seed a prompt")
    texts = [stage.encoder.tokenize(list(prompts)) for stage in stages]
    texts = over(stages, texts, given, len(prompts))
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
    """Yields the images of a few rows at a time, as every stage drew them, in the rows' order.

    `texts` holds each stage's tokens, `sizes` how many images each stage draws at once; `low_res`
    is what the first stage enlarges. `guidance` is one scale for all stages; without it each stage
    takes its own. Where the scale is 1, half of the work is skipped.
    """
    stage, batch = stages[0], dict(texts[0])
    if low_res is not None:
        batch["low_res"] = low_res
    scale = stage.settings.sampler.guidance if guidance is None else guidance
    scales = scales_of(stage.settings.sampler, scale, len(seeds))
    first = 0
    for images in in_batches(stage.draw, stage.params, batch, seeds, scales, sizes[0]):
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


def over(
    stages: Sequence[Model], texts: Sequence[Texts], given: Given | None, num_texts: int
) -> list[Texts]:
    """Each stage's texts, with the pictures that it draws over, in its size, if any are given."""
    if given is None:
        return list(texts)
    for image in given.images:
        if image.width != image.height:
            raise ValueError(f"the picture is {image.width}x{image.height}: cut a square out of it")
    sides = [stage.settings.output_size for stage in stages]
    return [
        {**text, **given.at((side, side), num_texts)}
        for text, side in zip(texts, sides, strict=True)
    ]


def describe(stage: Model) -> dict[str, Any]:
    """What a stage's pictures depend on; a bound that is infinite is left out: JSON has none."""
    s = stage.settings
    sampler = {k: v for k, v in s.sampler._asdict().items() if v != float("inf")}
    if not (s.sampler.grid or s.sampler.end):  # Then cards are as before there were grids.
        sampler = {k: v for k, v in sampler.items() if k not in ("grid", "end", "offset")}
    described = {"workdir": stage.workdir, "checkpoint": stage.step, "ema": stage.ema}
    described |= {"guide": stage.guide} if stage.guide else {}
    described |= stage.lora
    described |= {"size": s.output_size, "training_seed": s.run.seed, "sampler": sampler}
    if s.super_resolution.factor > 1:
        described["aug_sigma"] = s.super_resolution.aug_sigma
    return described


def card(stages: Sequence[Model]) -> dict[str, Any]:
    """Runs with their samplers' settings, as the command writes them beside each picture."""
    each = []
    for stage in stages:
        s, described = stage.settings, describe(stage)
        sampler = described.pop("sampler")
        described |= {"sampler": sampler.pop("name"), **sampler}
        each.append(
            described | ({"low_res": s.input_size} if s.super_resolution.factor > 1 else {})
        )
    return {"guidance": stages[0].settings.sampler.guidance, "stages": each}


def batch_sizes(stages: Sequence[Model], num_images: int) -> list[int]:
    """How many images each stage draws at once by default: fewer where they are larger."""
    sides = [stage.settings.output_size for stage in stages]
    return [min(default_batch_size(side, side), num_images) for side in sides]


def check_low_res(first: Model, size: tuple[int, ...] | None) -> None:
    """ValueError unless images of this (height, width) are what the first stage starts from."""
    s, workdir = first.settings, first.workdir
    if s.super_resolution.factor == 1:
        if size is not None:
            raise ValueError(f"{workdir} is a base model, which starts from no image: give none")
        return
    enlarges = f"{workdir} enlarges images of {s.input_size}x{s.input_size}"
    if size is None:
        raise ValueError(
            f"{enlarges}: name a model that draws such before it, or give images to start from"
        )
    if size != (s.input_size, s.input_size):
        raise ValueError(f"{enlarges} and got {size[0]}x{size[1]}: resize it first")
