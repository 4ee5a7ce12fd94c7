"""Open trained models to draw with: one model, or a cascade whose later models enlarge.

    import imagen_jax

    model = imagen_jax.load("runs/base64", "runs/sr256", guidance=[7.5, 8])
    model.draw(["a red seven on gray paper"], steps=20, sampler="ddim")

Each stage of a cascade has its own checkpoint, sampler and guidance. A notebook shows the result of
`draw` as a contact sheet.
"""

import functools
import itertools
import os
from collections.abc import Sequence
from typing import Any

from diffusion_jax.devices import sharding
from diffusion_jax.draw import options
from diffusion_jax.draw import stage as stage_module
from diffusion_jax.draw.kind import Kind
from diffusion_jax.draw.model import Enlarger, Model
from diffusion_jax.draw.options import Options, Values
from diffusion_jax.draw.program import previewed
from diffusion_jax.draw.stage import Encoders, Stage
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


class Cascade(Model):
    """An Imagen model, or a cascade of several, that is ready to draw."""

    options = OPTIONS

    @property
    def enlarger(self) -> Enlarger | None:
        """The first stage that enlarges images, or None if no stage enlarges images."""
        settings = [stage.settings for stage in self.stages]
        larger = [(n, s) for n, s in enumerate(settings) if s.super_resolution.factor > 1]
        return Enlarger(larger[0][0], larger[0][1].input_size) if larger else None

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The height and width in pixels of the images that each stage draws."""
        return output_shapes([stage.settings for stage in self.stages])

    def tokenize(self, stage: Stage, prompts: Sequence[Any]) -> Texts:
        """Return the tokens of prompts, or the arrays of embeddings, for the encoder of a stage."""
        return stage.encoder.tokenize(list(prompts))

    def check(self, low_res: Sequence[tuple[int, ...]], batch_sizes: Sequence[int]) -> None:
        """Raise ValueError if the first stage cannot start from pictures of these sizes."""
        for size in low_res or [None]:
            check_low_res(self.stages[0], size)

    def card(self) -> dict[str, Any]:
        """Return the metadata saved with each picture.

        It holds the guidance scale of the first stage, and a dict for each stage (see `describe`).
        """
        stage_cards = []
        for stage in self.stages:
            s, described = stage.settings, describe(stage)
            sampler = described.pop("sampler")
            described |= {"sampler": sampler.pop("name"), **sampler}
            stage_cards.append(described | ({"low_res": s.input_size} if s.super_resolution.factor > 1 else {}))
        card = {"guidance": self.stages[0].settings.sampler.guidance, "stages": stage_cards}
        return card if self.strengths is None else {**card, "strength": list(self.strengths)}

    def describe(self, stage: Stage) -> dict[str, Any]:
        """Describe a stage without its guidance, which a score's card holds anyway."""
        described = describe(stage)
        del described["sampler"]["guidance"]
        return described


def load(*workdirs: str | os.PathLike[str], **values: Any) -> Cascade:
    """Open the model of a run, or a cascade of several models, to draw with it.

    Args:
        *workdirs: The workdirs of the runs. The models of a cascade draw in this order.
        **values: Options for drawing, such as steps=20: the keys of OPTIONS, which are also the
            flags of imagen_jax.sample. For a cascade, a list gives one value per stage.

    Raises:
        FileNotFoundError: If a workdir holds no run.
        ValueError: If no workdir is given, a value is invalid, or a stage does not draw images of
            the size that the next stage enlarges.
    """
    if not workdirs:
        raise ValueError('load() needs the workdir of a run: load("runs/quickstart")')
    return open_stages(workdirs, options.by_stage(values, len(workdirs)))


def open_stages(
    workdirs: Sequence[str | os.PathLike[str]], values: Sequence[Values], *, embedded: bool = False
) -> Cascade:
    """Open the models of `workdirs`, with the option values of each. Raises the errors of `load`.

    If `embedded`, the models will draw from text embeddings computed elsewhere, and their text
    encoders are not opened.
    """
    typed = [options.read(OPTIONS, of_stage) for of_stage in values]
    fields = [options.fields(OPTIONS, of_stage) for of_stage in typed]
    settings = [read_run(*run) for run in zip(workdirs, fields, strict=True)]
    # Each stage must draw images of the size that the next one enlarges.
    runs = list(zip(map(str, workdirs), settings, strict=True))
    for (before, a), (after, b) in itertools.pairwise(runs):
        if b.super_resolution.factor == 1:
            raise ValueError(f"{after} is a base model, which enlarges nothing: name it first, or leave it out")
        if b.input_size != a.output_size:
            raise ValueError(
                f"{before} draws images of {a.output_size} pixels, but {after} enlarges images of "
                f"{b.input_size} pixels to {b.output_size}: add a stage between them, or choose a "
                f"stage that enlarges images of {a.output_size} pixels"
            )
    encoders: Encoders = {}
    stages = [
        load_stage(*run, embedded=embedded, encoders=encoders) for run in zip(workdirs, settings, typed, strict=True)
    ]
    return Cascade(stages, typed)


KIND = Kind("imagen_jax", OPTIONS, (1, 1.5, 2, 3, 4, 5, 6), open_stages)


def load_stage(
    workdir: str | os.PathLike[str], s: Settings, values: Values, *, embedded: bool, encoders: Encoders
) -> Stage:
    """Open the model of a training run.

    Args:
        workdir: The workdir of the run.
        s: The settings to draw with.
        values: The chosen values of options, which `s` contains already. They name the checkpoint,
            the average and the guide.
        embedded: Whether the text encoder is not opened.
        encoders: A cache, empty at first. Stages that are opened with the same cache share the
            weights of their text encoders.

    Raises:
        FileNotFoundError: If there is no such checkpoint or guide.
        ValueError: If a value is invalid for the run.
    """
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
        encoder, text_params = stage_module.open_encoder(s.text, mesh, sharding.RULES, encoders)
    frozen, guide_settings = {"text": text_params}, None
    if guide := values.get("guide"):
        init_of = lambda settings: task.make_task(settings, encoder).init
        guide_settings, frozen["guide"] = stage_module.load_guide(guide, s, read_run, init_of, mesh, sharding.RULES)

    # The UNet, to which a LoRA run adds its factors.
    imagen = task.make_task(s, encoder)._replace(frozen=frozen)
    read_base = lambda: read_unet(s.unet_weights, s.unet, s.text.width)
    imagen = finetune.adapted(imagen, workdir, s.lora, read_base, mesh)

    def inputs_of(s, preview, strength):
        check(s)
        sampler_inputs = task.make_sampler_inputs(s, encoder, guide_settings, strength)
        return previewed(lora.drawn(sampler_inputs, s.lora) if s.lora.rank else sampler_inputs, preview)

    return stage_module.load_stage(workdir, s, encoder, imagen, mesh, inputs_of, values, s.lora.scale)


read_run = functools.partial(stage_module.read_run, system="imagen_jax")
"""(workdir, fields) -> the Settings of a run, as in stage.read_run."""


def output_shapes(settings: Sequence[Settings]) -> list[tuple[int, int]]:
    """Return the (height, width) in pixels of the images that each stage of a cascade draws."""
    sizes, first = [s.output_size for s in settings], settings[0]
    if first.super_resolution.factor > 1:
        return [(size, size) for size in sizes]
    height, width = first.output_shape
    return [(height * size // sizes[0], width * size // sizes[0]) for size in sizes]


def describe(stage: Stage) -> dict[str, Any]:
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


def check_low_res(first: Stage, size: tuple[int, ...] | None) -> None:
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
            f"{enlarges}: name a model that draws such images before it, or give the images to enlarge as low_res"
        )
    if size != (s.input_size, s.input_size):
        raise ValueError(f"{enlarges}, but low_res has an image of {size[1]}x{size[0]}: resize this image")
