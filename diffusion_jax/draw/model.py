"""Models that stay loaded and draw with any settings, for notebooks and the web page.

    model = imagen_jax.load("runs/quickstart")
    model.draw(["a red seven on gray paper"], guidance=3, steps=20, sampler="ddim")

The command `sample` draws the same pictures if it is given the same settings. They are equal byte
for byte if the batch size is the same too, and otherwise up to rounding.
"""

import collections
import copy
import dataclasses
import itertools
import json
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Array, ArrayLike, Float, UInt8

from diffusion_jax import files, runs
from diffusion_jax.config import ranges
from diffusion_jax.diffusion import guidance as guidance_module
from diffusion_jax.diffusion.guidance import Preview
from diffusion_jax.draw import input_pictures, options, png_text, program
from diffusion_jax.draw import stage as stage_module
from diffusion_jax.draw.input_pictures import InputPictures, Picture
from diffusion_jax.draw.options import Options, Values
from diffusion_jax.draw.program import Images
from diffusion_jax.draw.seeds import halves, keys_of
from diffusion_jax.draw.stage import Stage
from diffusion_jax.files import sheets
from diffusion_jax.files.sheets import png
from diffusion_jax.task import Texts
from diffusion_jax.text import vocabulary
from diffusion_jax.text.vocabulary import Vocabulary
from diffusion_jax.weights import power_averages, restore

Progress = Callable[[UInt8[np.ndarray, "B h w 3"], float], None]
"""A function of (predicted images, noise level). It is called on the host at each evaluation of the
network."""
_STRETCHED = 0.05  # Pictures to draw over that are stretched by a larger share are named.


class Cancelled(Exception):
    """The error that cancels a drawing. Raise it in `progress`; `draw` then raises it too.

    On one device, the drawing ends at once. On several devices, it ends after the current batch.
    """


class Enlarger(NamedTuple):
    """The first stage of a cascade that enlarges images."""

    stage: int
    """The index of the stage in the cascade, from 0."""
    side: int
    """The height and width of the pictures that the stage enlarges, in pixels."""


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
        return png(sheets.contact_sheet(self.images, sheets.labels(self.prompts)))

    def png(self, n: int) -> bytes:
        """Return picture n as the PNG file that `sample` would write."""
        return png(self[n], png_text.parameters(self._line(n), *self[n].shape[:2]))

    def _line(self, n: int) -> dict[str, Any]:
        return {"text": self.prompts[n], "seed": self.seeds[n], **self.card}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the PNG files, sheet.png and metadata.jsonl, as the command `sample` does.

        Raises ValueError if the folder holds a drawing already.
        """
        out = files.path(folder)
        if (out / "metadata.jsonl").exists():
            raise ValueError(f"{out} holds a drawing already: choose another folder")
        out.mkdir(parents=True, exist_ok=True)
        lines = []
        for n, seed in enumerate(self.seeds):
            number = f"_{n}" if self.seeds.count(seed) > 1 else ""
            lines.append({"file_name": f"seed_{seed:06}{number}.png", **self._line(n)})
            files.write_whole(out / lines[n]["file_name"], self.png(n))
        index = "".join(json.dumps(line) + "\n" for line in lines)
        files.write_whole(out / "metadata.jsonl", index)
        files.write_whole(out / sheets.NAME, self._repr_png_())


class Model:
    """A run, or the runs of a cascade, whose weights and compiled programs stay in memory.

    A subclass adds what differs between systems: `options`, `tokenize`, `check`, `card` and
    `describe`.
    """

    options: ClassVar[Options] = {}
    """The options that users may choose, by name."""
    any_shape = False
    """Whether a drawing has the height and width of the picture that it draws over."""
    vocabulary: Vocabulary | None = None
    """The words of the first stage's training captions; None if the run has no vocabulary."""
    strengths: Sequence[float] | None = None
    """For each stage, the share of its steps that draw over a picture; None without a picture."""
    sets_of_weights = 4
    """The number of sets of weights per stage that stay in memory, including the first set."""

    def __init__(self, stages: Sequence[Stage], values: Sequence[Values]) -> None:
        """Store opened stages. `values` are the option values with which each stage was opened."""
        self.stages = self._first = tuple(stages)
        self.values = [options.read(self.options, of_stage) for of_stage in values]
        self.vocabulary = vocabulary.read(self.stages[0].workdir)
        self._progress: Progress | None = None
        self._cancelled = False
        self._averages: dict[tuple[int, int], list[str]] = {}
        self._first_keys = [self._key(n, of_stage) for n, of_stage in enumerate(self.values)]
        self._weights: collections.OrderedDict[Any, Stage] = collections.OrderedDict()

    def __repr__(self) -> str:
        return " -> ".join(map(_in_words, self.stages))

    def draw(
        self,
        prompts: str | Sequence[str],
        *,
        seeds: Sequence[int] | ArrayLike | None = None,
        seed: int | None = None,
        num_images: int = 1,
        progress: Progress | None = None,
        image: Picture | None = None,
        mask: Picture | None = None,
        low_res: Picture | None = None,
        strength: float | Sequence[float] | None = None,
        **values: Any,
    ) -> Drawing:
        """Draw `num_images` pictures per prompt, or, for a single prompt, one picture per seed.

        Args:
            prompts: One text or several.
            seeds: One seed per picture, or the first of consecutive seeds. By default they start at
                0, as in the command `sample`.
            seed: The first of consecutive seeds, like the command's flag.
            num_images: The number of pictures of each prompt, which follow one another.
            progress: Called at each evaluation of the network with the predicted images and their
                noise level.
            image: The picture that all prompts draw over (image-to-image): a Pillow image, an array
                uint8 [H, W, 3] such as `drawing[0]`, or a path. `mask` and `low_res` take the same.
            mask: A picture that is white at the part of `image` to redraw (inpainting).
            low_res: The picture that all prompts enlarge. A cascade skips the stages before the
                first one that enlarges.
            strength: The share of the steps to run when drawing over `image`, from 0 to 1: one
                value for the first stage, or one per stage. Default: 0.8.
            **values: Drawing options. They have the names of the flags of `sample`. A list holds
                one value per stage. `checkpoint=None` draws with the loaded checkpoint.

        Raises:
            ValueError: A value is wrong, a picture does not fit, or the numbers of prompts and
                seeds differ.
            OSError: A picture's file is missing or not an image.
            Cancelled: `progress` raised it.
        """
        prompts, seeds = _paired(prompts, seeds, seed, num_images)
        over = input_pictures.opened(image, mask, strength)
        small = None
        if low_res is not None:
            small = input_pictures.upright(low_res, "RGB", "low_res")
        for name in values:
            if name in self.options and self.options[name].at_load:
                raise ValueError(f"{name} cannot change after loading: pass it to load()")
        share = 0.8 if strength is None else strength
        model = self.over(over, share, values, self._show if progress else None)
        model.warn_of_words(prompts)
        if small is not None and model.enlarger is not None:
            model.stages = model.stages[model.enlarger.stage :]
        self._progress, self._cancelled, batches = progress, False, []
        try:
            for batch in model.batches(
                prompts, range(len(prompts)), seeds, pictures=over, low_res=[np.asarray(small)] if small else ()
            ):
                batches.append(batch)
                if self._cancelled:
                    raise Cancelled
        except jax.errors.JaxRuntimeError as error:
            if "Cancelled" in str(error):
                raise Cancelled from None
            raise
        finally:
            self._progress = None
        *smaller, images = (sheets.to_uint8(np.concatenate(sizes)) for sizes in zip(*batches, strict=True))
        return Drawing(images, prompts, seeds, model.card(), smaller)

    def warn_of_words(self, prompts: Sequence[str]) -> None:
        """Log words of prompts that no training caption contains, and texts that have no effect."""
        if line := vocabulary.warning(self.vocabulary, prompts, self.stages[0].encoder.name):
            logging.warning("%s", line)
        for s in (stage.settings.sampler for stage in self.stages):
            if s.negative_prompt and guidance_module.scale_per_image(s, s.guidance, 1) is None:
                logging.warning(
                    "the negative prompt %r has no effect at guidance 1: choose a larger guidance", s.negative_prompt
                )
        self.warn_of_unused(prompts)

    def warn_of_unused(self, prompts: Sequence[str]) -> None:
        """Log each word of an embedding file that neither a prompt nor a negative prompt uses."""
        if (stage := self.stages[0]).encoder.added:
            stage.encoder.warn_of_unused(dict(self.tokenize(stage, prompts)))

    def batches(
        self,
        prompts: Sequence[Any],
        rows: Sequence[int],
        seeds: Sequence[int],
        *,
        pictures: InputPictures | None = None,
        low_res: Sequence[UInt8[np.ndarray, "h w 3"]] = (),
        guidance: float | None = None,
        batch_sizes: Sequence[int | None] = (),
        numbers: Sequence[Mapping[str, Float[np.ndarray, "_"]]] = (),
    ) -> Iterator[list[Images]]:
        """Check the arguments, then draw in batches. Image n draws prompts[rows[n]] with seeds[n].

        Each batch is a list with one array of images per stage, in about [-1, 1]. The arrays show
        the same images at the sizes of the stages.

        Args:
            prompts: Texts. Models opened with `embedded` need embeddings [tokens, width] instead.
            rows: For each image, the index of its prompt.
            seeds: One seed per image.
            pictures: The pictures that all stages draw over: one for all prompts, or one for each.
            low_res: The pictures that the first stage enlarges: one for all prompts, or one for
                each.
            guidance: The guidance scale of all stages. By default, each stage uses its own.
            batch_sizes: The batch size of each stage. None, or a missing value, means a default,
                which is smaller for larger images.
            numbers: For each stage, one number per prompt for each field, keyed by Field.key.

        Raises:
            ValueError: A picture does not fit, or the model cannot draw images of this size.
        """
        index, shapes = np.asarray(rows), self.shapes
        sizes = [
            min(size or program.default_batch_size(*shape), len(rows))
            for shape, size in itertools.zip_longest(shapes, batch_sizes)
        ]
        self.check([image.shape[:2] for image in low_res], sizes)
        texts = [dict(self.tokenize(stage, prompts)) for stage in self.stages]
        if pictures is not None:
            _check_aspect(pictures, *shapes[0], self.any_shape)
            for of_stage, (height, width) in zip(texts, shapes, strict=True):
                of_stage |= pictures.at((width, height), len(prompts))
        if low_res:
            small = np.stack(low_res).astype(np.float32) / 127.5 - 1
            texts[0]["low_res"] = small[np.arange(len(prompts)) % len(small)]
        for of_stage, columns in zip(texts, numbers, strict=False):
            of_stage |= columns
        texts = [{name: array[index] for name, array in of_stage.items()} for of_stage in texts]
        return draw_stages(self.stages, texts, seeds, sizes, guidance)

    def denoiser(self, prompts: str | Sequence[str], **values: Any) -> "PromptedDenoiser":
        """Return the guided denoiser D(x, sigma) for these prompts, for use in custom samplers.

        `values` are drawing options, as in `draw`. Raises ValueError for a cascade.
        """
        if len(self.stages) > 1:
            raise ValueError(
                f"a denoiser needs a single model, but {self!r} is a cascade of "
                f"{len(self.stages)} models: load one of them alone"
            )
        (stage,) = self.changed([values]).stages
        texts, _ = _paired(prompts, None)
        return PromptedDenoiser(stage, self.tokenize(stage, texts))

    def changed(
        self, values: Sequence[Values], preview: Preview | None = None, strengths: Sequence[float] | None = None
    ) -> "Model":
        """Return the model with other weights and settings. Compiled programs are reused.

        Args:
            values: New option values for each stage.
            preview: Called on the host at each evaluation of the network, with the predicted images
                and their noise level.
            strengths: For each stage, the share of its steps to run when drawing over a picture;
                None if there is no picture.
        """
        model = copy.copy(self)
        model.values, model.strengths = self._merged(values), strengths
        model.stages = tuple(
            self._with_weights(n, of_stage).changed(self._fields(of_stage), preview, strengths[n] if strengths else 1.0)
            for n, of_stage in enumerate(model.values)
        )
        return model

    def over(
        self, pictures: InputPictures | None, strength: float | Sequence[float], values: Values, preview: Preview | None
    ) -> "Model":
        """Return the model as `changed` does, with the size and strength for drawing over pictures.

        `strength` is one value for the first stage, or one per stage. In `values`, a list holds one
        value per stage.

        Raises:
            ValueError: A value is invalid, or the pictures differ in size although the model's
                drawings have the size of the picture.
        """
        values = {**values, **self._size_of(pictures, values)}
        strengths = self.each_strength(strength) if pictures else None
        return self.changed(options.by_stage(values, len(self.stages)), preview, strengths)

    def check_values(self, values: Sequence[Values]) -> None:
        """Raise ValueError if `changed` cannot use these values. No weights are loaded."""
        for stage, of_stage in zip(self.stages, self._merged(values), strict=True):
            stage.changed(self._fields(of_stage))

    def averages(self, n: int, step: int) -> list[str]:
        """Return the names of the averages in a checkpoint of stage n.

        The names are cached, because training may remove the checkpoint later.
        """
        if not self._averages.get((n, step)):
            folder = restore.absolute(self._first[n].workdir) / runs.CHECKPOINTS
            self._averages[n, step] = restore.stored(folder / str(step))
        return self._averages[n, step]

    @property
    def enlarger(self) -> Enlarger | None:
        """The first stage that enlarges images, or None if no stage enlarges images."""
        return None

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The height and width in pixels of the images that each stage draws."""
        return [stage.settings.output_shape for stage in self.stages]

    def tokenize(self, stage: Stage, prompts: Sequence[Any]) -> Texts:
        """Return the tokens of prompts, for the text encoder of a stage."""
        raise NotImplementedError

    def check(self, low_res: Sequence[tuple[int, ...]], batch_sizes: Sequence[int]) -> None:
        """Raise ValueError if the model cannot draw from these pictures, or so many at once.

        `low_res` holds the height and width of each picture to enlarge, and `batch_sizes` the batch
        size of each stage.
        """
        raise NotImplementedError

    def card(self) -> dict[str, Any]:
        """Return the models and their settings, for a line of `sample`'s metadata.jsonl."""
        raise NotImplementedError

    def describe(self, stage: Stage) -> dict[str, Any]:
        """Return the entry of a stage in the list "models" of a score's card."""
        raise NotImplementedError

    def _size_of(self, pictures: InputPictures | None, values: Values) -> Values:
        """Return option values that set the height and width to those of the pictures.

        A side that the user has chosen is left out. The result is {} if there is no picture, or if
        `any_shape` is False.
        """
        if pictures is None or not self.any_shape:
            return {}
        chosen = {name for name, value in {**self.values[0], **values}.items() if value is not None}
        sides = [side for side in ("height", "width") if side not in chosen]
        first, *others = pictures.images
        if sides and any(image.size != first.size for image in others):
            raise ValueError("the pictures of --image differ in size: give --height and --width, to resize them all")
        return {side: getattr(first, side) for side in sides}

    def each_strength(self, strength: float | Sequence[float]) -> list[float]:
        """Return the strength of each stage. A single value is for the first stage; others get 1.

        Raises:
            ValueError: A value is not in [0, 1], or a list does not have one value per stage.
        """
        later = [1.0] * (len(self.stages) - 1)
        one = not isinstance(strength, list | tuple)
        values = [strength, *later] if one else list(strength)
        for value in values:
            ranges.check_value("strength", value, ranges.Share)
        return [of["strength"] for of in options.by_stage({"strength": values}, len(self.stages))]

    def _merged(self, values: Sequence[Values]) -> list[dict[str, Any]]:
        both = zip(self.values, values, strict=True)
        return [options.read(self.options, {**old, **new}) for old, new in both]

    def _fields(self, values: Values) -> dict[str, Any]:
        return options.fields(options.changeable(self.options), values)

    def _with_weights(self, n: int, values: Values) -> Stage:
        """Return stage n with the chosen weights. The most recently used weights stay in memory."""
        first, key = self._first[n], self._key(n, values)
        if key == self._first_keys[n]:
            stage = first
        elif key in self._weights:
            self._weights.move_to_end(key)
            stage = self._weights[key]
        else:
            while len(self._weights) >= (self.sets_of_weights - 1) * len(self._first):
                self._weights.popitem(last=False)
            stage = stage_module.with_weights(first, values.get("ema", "ema"), key[2])
            self._weights[key] = stage
        ema = power_averages.canonical(values.get("ema", "ema"), self.averages(n, key[2]))
        return stage._replace(ema=ema) if first.step else stage

    def _key(self, n: int, values: Values) -> tuple[int, str, int]:
        """Return (n, average, step), which identifies the chosen weights of stage n.

        The average "ema" is replaced by the name of the average with the largest decay.
        """
        step = values.get("checkpoint", self._first[n].step)
        stored = self.averages(n, step)
        largest = stored[-1] if stored else "raw"
        name = power_averages.canonical(values.get("ema", "ema"), stored)
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

    def __init__(self, stage: Stage, texts: Texts) -> None:
        """Prepare a stage to draw prompts that are already tokenized."""
        self._sampler_inputs = stage.inputs_of(stage.settings, None, 1.0)
        self.num_prompts = len(next(iter(texts.values())))
        s = stage.settings.sampler
        guidance = guidance_module.scale_per_image(s, s.guidance, self.num_prompts)
        self._arguments = stage.params, stage.frozen, dict(texts), guidance
        zeros = halves([0] * self.num_prompts)
        inputs = self._inputs
        self._first = jax.jit(lambda *arguments: inputs(*arguments).x)
        self._denoise = jax.jit(
            lambda x, sigma, *arguments: inputs(*arguments, zeros).denoise(x, jnp.full(len(x), sigma))
        )
        self._finish = jax.jit(lambda x, *arguments: inputs(*arguments, zeros).finish(x))
        self.sigmas = np.asarray(jax.jit(lambda *a: inputs(*a, zeros).sigmas)(*self._arguments))

    def __call__(self, x: Float[Array, "B H W C"], sigma: Float[ArrayLike, ""]) -> Float[Array, "B H W C"]:
        """Return the guided model's prediction of x0 at noise level `sigma`."""
        return self._denoise(x, jnp.asarray(sigma, jnp.float32), *self._arguments)

    def start(self, seeds: int | Sequence[int] = 0) -> Float[Array, "B H W C"]:
        """Return the initial noise that the command `sample` uses with these seeds.

        `seeds` is one seed per prompt, or the first of consecutive seeds.
        """
        _, numbers = _paired([""] * self.num_prompts, seeds)
        return self._first(*self._arguments, halves(numbers))

    def pictures(self, x: Float[Array, "B H W C"]) -> UInt8[np.ndarray, "B H W 3"]:
        """Convert x at the last noise level to RGB images."""
        return sheets.to_uint8(np.asarray(self._finish(x, *self._arguments)))

    def _inputs(self, *arguments: Any) -> Any:
        params, frozen, texts, guidance, seeds = arguments
        return self._sampler_inputs(params, frozen, texts, keys_of(seeds), guidance)


def draw_stages(
    stages: Sequence[Stage],
    texts: Sequence[Texts],
    seeds: Sequence[int],
    sizes: Sequence[int],
    guidance: float | None = None,
) -> Iterator[list[Images]]:
    """Draw in batches: the first stage draws small images, and the others enlarge them.

    Images pass from a stage to the next one without being clipped or rounded. For each batch, yield
    a list with one array of images per stage, in about [-1, 1].

    Args:
        stages: The stages, from the first to the last.
        texts: The inputs of each stage, with one row per image.
        seeds: One seed per image.
        sizes: The batch size of each stage.
        guidance: The guidance scale of all stages. By default, each stage uses its own.
    """
    stage, s = stages[0], stages[0].settings.sampler
    scale = s.guidance if guidance is None else guidance
    scales = guidance_module.scale_per_image(s, scale, len(seeds))
    first = 0
    for images in program.in_batches(stage.draw, stage.params, texts[0], seeds, scales, sizes[0]):
        rows = slice(first, first + len(images))
        first = rows.stop
        if len(stages) == 1:
            yield [images]
            continue
        later = [{name: array[rows] for name, array in t.items()} for t in texts[1:]]
        later[0]["low_res"] = images
        done = 0
        for larger in draw_stages(stages[1:], later, seeds[rows], sizes[1:], guidance):
            yield [images[done : done + len(larger[0])], *larger]
            done += len(larger[0])


def _check_aspect(pictures: InputPictures, height: int, width: int, stretch: bool) -> None:
    for image in pictures.images:
        if stretch and abs(image.width * height / (image.height * width) - 1) > _STRETCHED:
            logging.warning(
                "the picture is %dx%d, and is stretched to %dx%d: crop it first to keep its shapes",
                image.width,
                image.height,
                width,
                height,
            )
        elif not stretch and image.width * height != image.height * width:
            wanted = "a square" if height == width else f"the shape {width}x{height}"
            raise ValueError(f"the picture is {image.width}x{image.height}: crop it to {wanted}")


def _paired(
    prompts: str | Sequence[str], seeds: Sequence[int] | ArrayLike | None, seed: int | None = None, num_images: int = 1
) -> tuple[list[str], list[int]]:
    """Return lists of prompts and seeds of equal length, as described in `Model.draw`.

    Raises ValueError if a value is wrong, or if the numbers of prompts and seeds differ.
    """
    if seed is not None and seeds is not None:
        raise ValueError(f"seed={seed} and seeds={seeds} exclude each other: leave one out")
    ranges.check_value("num_images", num_images, ranges.Count)
    first: Any = seed or 0 if seeds is None else seeds
    texts: list[Any] = list(prompts) if _is_list(prompts) else [prompts]
    numbers = list(first) if _is_list(first) else [first]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise ValueError(f"the prompt {wrong[0]!r} is not a text: give a string, or a list of them")
    if wrong := [n for n in numbers if isinstance(n, bool) or not hasattr(n, "__index__")]:
        raise ValueError(f"the seed {wrong[0]!r} is not a whole number: give one, or a list of them")
    texts = [text for text in texts for _ in range(num_images)]
    numbers = [operator.index(number) for number in numbers]
    if not _is_list(first):
        numbers = [numbers[0] + n for n in range(len(texts))]
    texts = texts * len(numbers) if len(texts) == 1 else texts
    if not texts or len(texts) != len(numbers):
        raise ValueError(
            f"{len(texts)} prompts and {len(numbers)} seeds: give at least one prompt, and one seed per prompt"
        )
    halves(numbers)  # Checks them.
    return texts, numbers


def _is_list(value: Any) -> bool:
    is_scalar = isinstance(value, str | bytes) or getattr(value, "ndim", 1) == 0
    return isinstance(value, Iterable) and not is_scalar


def _in_words(stage: Stage) -> str:
    s = stage.settings.sampler
    parts = [f"step {stage.step}, {stage.ema}"] if stage.step else []
    return ", ".join([stage.workdir, *parts, f"{s.name}, {s.steps} steps, guidance {s.guidance:g}"])
