"""Models that stay loaded and draw with any settings, for notebooks and the web page.

    model = imagen_jax.load("runs/quickstart")
    model.draw(["a red seven on gray paper"], guidance=3, steps=20, sampler="ddim")

The command `sample` draws the same pictures if it is given the same settings. They are equal byte
for byte if the batch size is the same too, and otherwise up to rounding.
"""

import collections
import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Array, ArrayLike, Float, UInt8
from PIL import Image

from diffusion_jax import runs
from diffusion_jax.config import ranges
from diffusion_jax.diffusion import guidance as guidance_module
from diffusion_jax.draw import input_pictures, options
from diffusion_jax.draw import model as models
from diffusion_jax.draw.input_pictures import Pictures
from diffusion_jax.draw.model import Model
from diffusion_jax.draw.options import Options, Values, Weights
from diffusion_jax.draw.program import Images
from diffusion_jax.draw.seeds import halves, keys_of
from diffusion_jax.files import sheets
from diffusion_jax.task import Texts
from diffusion_jax.text import vocabulary
from diffusion_jax.text.vocabulary import Vocabulary
from diffusion_jax.weights import power_averages, restore

_WEIGHTS = 4  # Sets of weights per stage that stay loaded, including the first set.
Progress = Callable[[UInt8[np.ndarray, "B h w 3"], float], None]
"""A function of (predicted images, noise level). It is called on the host at each evaluation of the
network."""


class Cancelled(Exception):
    """The error that cancels a drawing. Raise it in `progress`; `draw` then raises it too.

    On one device, the drawing ends at once. On several devices, it ends after the current batch.
    """


class Inputs(NamedTuple):
    """The pictures that a drawing starts from."""

    over: Pictures | None = None
    """The picture to draw over, and a mask of the part to redraw."""
    low_res: UInt8[np.ndarray, "h w 3"] | None = None
    """The picture to enlarge."""


class Enlarger(NamedTuple):
    """The first stage of a cascade that enlarges images."""

    stage: int
    """The index of the stage in the cascade, from 0."""
    side: int
    """The height and width of the pictures that the stage enlarges, in pixels."""


class System(NamedTuple):
    """The functions and options with which a system draws and tokenizes."""

    options: Options
    """The options that users may choose, by name."""
    draw: Callable[..., Iterator[Sequence[Images]]]
    """A function (stages, prompts, seeds, inputs) -> batches. A batch holds one array of images per
    stage. `inputs` is an Inputs."""
    tokenize: Callable[[Model, Sequence[str]], Texts]
    """A function (stage, prompts) -> the tokens of the prompts, for the stage's text encoder."""
    describe: Callable[[Sequence[Model]], dict[str, Any]]
    """A function stages -> the metadata that the command `sample` writes for each picture."""
    enlarger: Callable[[Sequence[Model]], Enlarger | None] = lambda stages: None
    """A function stages -> the first stage that enlarges images, or None."""
    any_shape: bool = False
    """Whether a drawing gets the height and width of the picture that it draws over."""


@dataclasses.dataclass(frozen=True, repr=False)
class Drawing:
    """Images with their prompts and seeds. A notebook shows them as a contact sheet."""

    images: UInt8[np.ndarray, "N H W 3"]
    prompts: Sequence[str]
    seeds: Sequence[int]
    card: Mapping[str, Any]
    """The models and their settings, as in a line of `sample`'s metadata.jsonl."""
    smaller: Sequence[UInt8[np.ndarray, "N h w 3"]] = ()
    """The images of the earlier stages of a cascade, one array per stage."""

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, n: int) -> UInt8[np.ndarray, "H W 3"]:
        return self.images[n]

    def __repr__(self) -> str:
        return f"{len(self)} pictures of {self.images.shape[2]}x{self.images.shape[1]}"

    def _repr_png_(self) -> bytes:
        return png(sheets.contact_sheet(self.images, list(self.prompts)))


def png(image: UInt8[np.ndarray, "H W 3"]) -> bytes:
    """Encode an image as the PNG file that `sample` would write."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()


class Loaded:
    """A run, or the runs of a cascade, whose weights and compiled programs stay in memory."""

    vocabulary: Vocabulary | None = None
    """The words of the first stage's training captions; None if the run has no vocabulary."""
    any_shape = False
    """Whether a drawing has the height and width of the picture that it draws over."""

    def __init__(self, stages: Sequence[Model], values: Sequence[Values], system: System) -> None:
        """Store opened stages. `values` are the option values with which each stage was opened."""
        self.stages, self.values, self.options = tuple(stages), tuple(values), system.options
        self.vocabulary = vocabulary.read(self.stages[0].workdir)
        self._system = system
        self.any_shape = system.any_shape
        self._progress: Progress | None = None
        self._cancelled = False
        self._averages: dict[tuple[int, int], list[str]] = {}
        chosen = [options.choose(system.options, of_stage) for of_stage in values]
        self._first = [self._key(n, choice.weights) for n, choice in enumerate(chosen)]
        self._weights: collections.OrderedDict[Any, Model] = collections.OrderedDict()

    def __repr__(self) -> str:
        return " -> ".join(map(_in_words, self.stages))

    def draw(
        self,
        prompts: str | Sequence[str],
        *,
        seeds: int | Sequence[int] | None = None,
        progress: Progress | None = None,
        image: Image.Image | None = None,
        mask: Image.Image | None = None,
        low_res: Image.Image | None = None,
        strength: float | Sequence[float] = 0.8,
        **values: Any,
    ) -> Drawing:
        """Draw one picture per prompt, or, for a single prompt, one picture per seed.

        Args:
            prompts: One text or several.
            seeds: One seed per prompt, or the first of consecutive seeds. By default they start at
                0, as in the command `sample`.
            progress: Called at each evaluation of the network with the predicted images and their
                noise level.
            image: The picture that all prompts draw over (image-to-image).
            mask: A picture that is white at the part of `image` to redraw (inpainting).
            low_res: The picture that all prompts enlarge. A cascade skips the stages before the
                first one that enlarges.
            strength: The share of the steps to run when drawing over `image`, from 0 to 1: one
                value for the first stage, or one per stage.
            **values: Drawing options. They have the names of the flags of `sample`. A list holds
                one value per stage. `checkpoint=None` draws with the loaded checkpoint.

        Raises:
            ValueError: A value is out of range, a picture does not fit, or the numbers of prompts
                and seeds differ.
            Cancelled: `progress` raised it.
        """
        prompts, seeds = _paired(prompts, seeds)
        if line := vocabulary.warning(self.vocabulary, prompts, self.stages[0].encoder.name):
            logging.warning("%s", line)
        over = input_pictures.opened(image, mask)
        small = low_res and input_pictures.upright(low_res, "RGB", "the picture to enlarge")
        inputs = Inputs(over, small and np.asarray(small))
        values = {**values, **self._size_of(over and over.images[0], values)}
        strengths = self._strengths(strength) if image else [None] * len(self.stages)
        stages = self._stages_with(values, progress is not None, strengths)
        if low_res is not None and (enlarger := self.enlarger) is not None:
            stages = stages[enlarger.stage :]
        self._progress, self._cancelled, batches = progress, False, []
        try:
            for batch in self._system.draw(stages, prompts, seeds, inputs):
                batches.append(list(batch))
                if self._cancelled:
                    raise Cancelled
        except jax.errors.JaxRuntimeError as error:
            if "Cancelled" in str(error):
                raise Cancelled from None
            raise
        finally:
            self._progress = None
        *smaller, images = (
            sheets.to_uint8(np.concatenate(sizes)) for sizes in zip(*batches, strict=True)
        )
        card = self._system.describe(stages) | ({"strength": strengths} if image else {})
        return Drawing(images, prompts, seeds, card, smaller)

    def denoiser(self, prompts: str | Sequence[str], **values: Any) -> "PromptedDenoiser":
        """Return the guided denoiser D(x, sigma) for these prompts, for use in custom samplers.

        `values` are drawing options, as in `draw`. Raises ValueError for a cascade.
        """
        if len(self.stages) > 1:
            raise ValueError(
                f"a denoiser needs a single model, but {self!r} is a cascade of "
                f"{len(self.stages)} models: load one of them alone"
            )
        (model,) = self._stages_with(values, False, [None])
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        return PromptedDenoiser(model, self._system.tokenize(model, texts))

    def averages(self, n: int, step: int) -> list[str]:
        """Return the names of the averages in a checkpoint of stage n.

        The names are cached, because training may remove the checkpoint later.
        """
        if not self._averages.get((n, step)):
            folder = restore.absolute(self.stages[n].workdir) / runs.CHECKPOINTS
            self._averages[n, step] = restore.stored(folder / str(step))
        return self._averages[n, step]

    @property
    def enlarger(self) -> Enlarger | None:
        """The first stage that enlarges images, or None if no stage enlarges images."""
        return self._system.enlarger(self.stages)

    def _size_of(self, image: Image.Image | None, values: Values) -> Values:
        """Return option values that set the height and width to those of the picture `image`.

        A side that the user has chosen is left out. The result is {} if there is no picture, or if
        `any_shape` is False.
        """
        if image is None or not self.any_shape:
            return {}
        chosen = {name for name, value in {**self.values[0], **values}.items() if value is not None}
        return {side: getattr(image, side) for side in ("height", "width") if side not in chosen}

    def _strengths(self, strength: float | Sequence[float]) -> list[float | None]:
        """Return the strength of each stage. A single value is for the first stage; others get 1.

        Raises:
            ValueError: A value is not in [0, 1], or a list does not have one value per stage.
        """
        later = [1.0] * (len(self.stages) - 1)
        values = [strength, *later] if isinstance(strength, float | int) else list(strength)
        for value in values:
            ranges.check_value("strength", value, ranges.Share)
        return [of["strength"] for of in options.by_stage({"strength": values}, len(self.stages))]

    def _stages_with(
        self, values: Values, watched: bool, strengths: Sequence[float | None]
    ) -> list[Model]:
        """Return the stages with the weights and settings in `values`.

        Compiled programs are reused. If `watched`, self._progress gets the images that each
        evaluation predicts. `strengths` holds one value per stage: the share of the sampler's
        steps used to draw over the picture, or None if there is no picture.
        """
        for name in values:
            if name in self.options and self.options[name].at_load:
                raise ValueError(f"{name} cannot change after loading: pass it to load()")
        stages = []
        for n, changed in enumerate(options.by_stage(values, len(self.stages))):
            of_stage = {**self.values[n], **changed}
            weights = options.choose(self.options, of_stage).weights
            overrides = options.changes(self.options, of_stage)
            model = self._with_weights(n, weights)
            preview = self._show if watched else None
            stages.append(models.with_overrides(model, overrides, preview, strengths[n]))
        return stages

    def _with_weights(self, n: int, weights: Weights) -> Model:
        """Return stage n with these weights. The most recently used weights stay in memory."""
        first, key = self.stages[n], self._key(n, weights)
        if key == self._first[n]:
            model = first
        elif key in self._weights:
            self._weights.move_to_end(key)
            model = self._weights[key]
        else:
            while len(self._weights) >= (_WEIGHTS - 1) * len(self.stages):
                self._weights.popitem(last=False)
            model = models.with_weights(first, weights._replace(step=key[2]))
            self._weights[key] = model
        ema = power_averages.canonical(weights.ema, self.averages(n, key[2]))
        return model._replace(ema=ema) if first.step else model

    def _key(self, n: int, weights: Weights) -> tuple[int, str, int]:
        """Return (n, average, step), which identifies the chosen weights of stage n.

        The average "ema" is replaced by the name of the average with the largest decay.
        """
        step = self.stages[n].step if weights.step is None else weights.step
        stored = self.averages(n, step)
        largest = stored[-1] if stored else "raw"
        name = power_averages.canonical(weights.ema, stored)
        return n, largest if name == "ema" else name, step

    def _show(self, images: ArrayLike, sigma: ArrayLike) -> None:
        if not self._progress or self._cancelled:
            return
        try:
            self._progress(sheets.to_uint8(np.asarray(images)), float(np.asarray(sigma)))
        except Cancelled:
            self._cancelled = True
            if jax.device_count() == 1:  # Otherwise the other devices would wait for this one.
                raise


class PromptedDenoiser:
    """D(x, sigma): a model's prediction of x0 from x = x0 + sigma * eps under fixed prompts.

    x and x0 have the shape [B, H, W, C]. `sigmas` are the levels of the model's sampling grid.
    `start` returns x at the first level, and `pictures` turns x at the last level into images. For
    example, Euler's method with D = model.denoiser(prompts):

        x = D.start(seeds)
        for sigma, low in zip(D.sigmas, D.sigmas[1:]):
            x = x + (low - sigma) * (x - D(x, sigma)) / sigma
        D.pictures(x)
    """

    def __init__(self, model: Model, texts: Texts) -> None:
        """Prepare a model to draw prompts that are already tokenized."""
        assert model.programs
        self._begin, frozen = model.programs.begin(model.settings)
        self.num_prompts = len(next(iter(texts.values())))
        s = model.settings.sampler
        guidance = guidance_module.by_image(s, s.guidance, self.num_prompts)
        self._arguments = model.params, frozen, dict(texts), guidance
        zeros = halves([0] * self.num_prompts)
        begin = self._start
        self._first = jax.jit(lambda *arguments: begin(*arguments).x)
        self._denoise = jax.jit(
            lambda x, sigma, *arguments: begin(*arguments, zeros).denoise(
                x, jnp.full(len(x), sigma)
            )
        )
        self._finish = jax.jit(lambda x, *arguments: begin(*arguments, zeros).finish(x))
        self.sigmas = np.asarray(jax.jit(lambda *a: begin(*a, zeros).sigmas)(*self._arguments))

    def __call__(
        self, x: Float[Array, "B H W C"], sigma: Float[ArrayLike, ""]
    ) -> Float[Array, "B H W C"]:
        """Return the guided model's prediction of x0 at noise level `sigma`."""
        return self._denoise(x, jnp.asarray(sigma, jnp.float32), *self._arguments)

    def start(self, seeds: int | Sequence[int] = 0) -> Float[Array, "B H W C"]:
        """Return the initial noise that the command `sample` uses with these seeds.

        `seeds` is one seed per prompt, or the first of consecutive seeds.
        """
        numbers = range(seeds, seeds + self.num_prompts) if isinstance(seeds, int) else seeds
        return self._first(*self._arguments, halves(numbers))

    def pictures(self, x: Float[Array, "B H W C"]) -> UInt8[np.ndarray, "B H W 3"]:
        """Convert x at the last noise level to RGB images."""
        return sheets.to_uint8(np.asarray(self._finish(x, *self._arguments)))

    def _start(self, *arguments: Any) -> Any:
        params, frozen, texts, guidance, seeds = arguments
        return self._begin(params, frozen, texts, keys_of(seeds), guidance)


def _paired(
    prompts: str | Sequence[str], seeds: int | Sequence[int] | None
) -> tuple[list[str], list[int]]:
    """Return lists of prompts and seeds of equal length, as described in `Loaded.draw`.

    Raises ValueError if the numbers of prompts and seeds differ, or if there are no prompts.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if seeds is None or isinstance(seeds, int):
        seeds = [(seeds or 0) + n for n in range(len(texts))]
    seeds = list(seeds)
    texts = texts * len(seeds) if len(texts) == 1 else texts
    if not texts or len(texts) != len(seeds):
        raise ValueError(
            f"{len(texts)} prompts and {len(seeds)} seeds: give at least one prompt, and one seed "
            "per prompt"
        )
    return texts, seeds


def _in_words(stage: Model) -> str:
    s = stage.settings.sampler
    parts = [f"step {stage.step}, {stage.ema}"] if stage.step else []
    return ", ".join([stage.workdir, *parts, f"{s.name}, {s.steps} steps, guidance {s.guidance:g}"])
