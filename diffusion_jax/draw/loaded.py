"""Runs, loaded once and drawn from with any choices: in a notebook, or behind a page.

    model = imagen_jax.load("runs/quickstart")
    model.draw(["a red seven on gray paper"], guidance=3, steps=20, sampler="ddim")

The pictures are those of the command `sample` with the same choices, byte for byte where it draws
as many at once; alone or among others they are rounded differently.
"""

import collections
import dataclasses
import difflib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, UInt8
from PIL import Image

from diffusion_jax import runs
from diffusion_jax.diffusion import guidance as guidance_module
from diffusion_jax.draw import model as models
from diffusion_jax.draw.model import Choice, Model
from diffusion_jax.draw.program import Images
from diffusion_jax.machine import sheets
from diffusion_jax.task import Texts
from diffusion_jax.weights import averages, restore

_WEIGHTS = 4  # Checkpoints and averages of a run that stay loaded, with the first.
Progress = Callable[[UInt8[np.ndarray, "B h w 3"], float], None]
"""(what the images being drawn look like, the noise level), on the host, at each evaluation."""


class Cancelled(Exception):
    """What `progress` raises to end a drawing, and what the drawing then raises.

    On one device it ends at once, on several with the batch.
    """


class System(NamedTuple):
    """How a system draws and tokenizes."""

    draw: Callable[[Sequence[Model], Sequence[str], Sequence[int]], Iterator[Sequence[Images]]]
    """(models in a row, prompts, seeds) to batches of images, as each of the models drew them."""
    tokenize: Callable[[Model, Sequence[str]], Texts]
    """What a model draws from."""
    describe: Callable[[Sequence[Model]], dict[str, Any]]
    """What the command `sample` writes of the models beside each picture."""


@dataclasses.dataclass(frozen=True, repr=False)
class Pictures:
    """Images with their prompts and seeds; a notebook shows them as a sheet."""

    images: UInt8[np.ndarray, "N H W 3"]
    prompts: Sequence[str]
    seeds: Sequence[int]
    card: Mapping[str, Any]
    """Which models drew, with which settings: the end of each line of `sample`'s metadata."""
    smaller: Sequence[UInt8[np.ndarray, "N h w 3"]] = ()
    """What the earlier models of a cascade drew."""

    def __len__(self) -> int:
        """How many they are."""
        return len(self.images)

    def __getitem__(self, n: int) -> UInt8[np.ndarray, "H W 3"]:
        """The pixels of one."""
        return self.images[n]

    def __repr__(self) -> str:
        """Their number and size."""
        return f"{len(self)} pictures of {self.images.shape[2]}x{self.images.shape[1]}"

    def _repr_png_(self) -> bytes:
        return png(sheets.contact_sheet(self.images, list(self.prompts)))


def png(image: UInt8[np.ndarray, "H W 3"]) -> bytes:
    """A PNG file, with the bytes that `sample` writes."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()


class Loaded:
    """A run, or several in a row as a cascade, whose weights and programs stay in memory."""

    def __init__(self, stages: Sequence[Model], choices: Sequence[Choice], system: System) -> None:
        """`choices` are those that the stages were loaded with."""
        self.stages, self.choice = tuple(stages), choices[0]
        self._choices, self._system = tuple(choices), system
        self._progress: Progress | None = None
        self._cancelled = False
        self._names: dict[tuple[int, int], list[str]] = {}
        self._first = [self._key(n, choice) for n, choice in enumerate(choices)]
        self._weights: collections.OrderedDict[Any, Model] = collections.OrderedDict()

    def __repr__(self) -> str:
        """Run, weights and sampler of each stage, in a line."""
        return " -> ".join(map(_in_words, self.stages))

    def draw(
        self,
        prompts: str | Sequence[str],
        *,
        seeds: int | Sequence[int] | None = None,
        progress: Progress | None = None,
        **choices: Any,
    ) -> Pictures:
        """One picture a prompt; of one prompt, one a seed.

        `seeds` has one a prompt; a number counts on from it and None from 0, as the command does.
        `choices` are the command's flags; of a cascade a list holds one value a stage, and the
        checkpoint None is the one that was loaded. ValueError for what cannot be.
        """
        prompts, seeds = _paired(prompts, seeds)
        row = self._models(choices, progress is not None)
        self._progress, self._cancelled, batches = progress, False, []
        try:
            for batch in self._system.draw(row, prompts, seeds):
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
        return Pictures(images, prompts, seeds, self._system.describe(row), smaller)

    def denoiser(
        self, prompts: str | Sequence[str], *, guidance: float | None = None, **choices: Any
    ) -> "PromptedDenoiser":
        """D(x, sigma) of these prompts, guided, for a sampler of one's own; of a single model."""
        if len(self.stages) > 1:
            raise ValueError(f"{self!r} are {len(self.stages)} models: load one of them alone")
        scale = {} if guidance is None else {"guidance": guidance}
        (model,) = self._models({**choices, **scale}, watched=False)
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        return PromptedDenoiser(model, self._system.tokenize(model, texts))

    def averages(self, n: int, step: int) -> list[str]:
        """The names of the averages in a stage's checkpoint, also when it is gone since."""
        if not self._names.get((n, step)):
            folder = restore.absolute(self.stages[n].workdir) / runs.CHECKPOINTS
            self._names[n, step] = restore.stored(folder / str(step))
        return self._names[n, step]

    def _models(self, choices: Mapping[str, Any], watched: bool) -> list[Model]:
        """The stages as chosen, whose programs are kept."""
        self._check(choices)
        one = lambda value, n: value[n] if isinstance(value, list | tuple) else value
        row = []
        for n, choice in enumerate(self._choices):
            choice = dataclasses.replace(choice, **{k: one(v, n) for k, v in choices.items()})
            weights = self._with_weights(n, choice)
            row.append(models.with_choice(weights, choice, self._show if watched else None))
        return row

    def _with_weights(self, n: int, choice: Choice) -> Model:
        """A stage with these weights, of which no two copies are kept."""
        first, key = self.stages[n], self._key(n, choice)
        if key == self._first[n]:
            model = first
        elif key in self._weights:
            self._weights.move_to_end(key)
            model = self._weights[key]
        else:
            while len(self._weights) >= (_WEIGHTS - 1) * len(self.stages):
                self._weights.popitem(last=False)
            model = self._weights[key] = models.with_weights(first, choice.ema, key[2])
        called = averages.canonical(choice.ema, self.averages(n, key[2]))
        return model._replace(ema=called) if first.step else model

    def _key(self, n: int, choice: Choice) -> tuple[int, str, int]:
        """A stage's number, and which weights are chosen: "ema" by the name that it stands for."""
        step = self.stages[n].step if choice.checkpoint is None else choice.checkpoint
        stored = self.averages(n, step)
        largest = stored[-1] if stored else "raw"
        name = averages.canonical(choice.ema, stored)
        return n, largest if name == "ema" else name, step

    def _check(self, choices: Mapping[str, Any]) -> None:
        """ValueError for what cannot be chosen of models that are loaded."""
        fields = {f.name: f for f in dataclasses.fields(self._choices[0]) if "help" in f.metadata}
        for name, value in choices.items():
            if name not in fields:
                close = difflib.get_close_matches(name, list(fields), n=1)
                hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(fields)}"
                raise ValueError(f"there is no choice {name}: {hint}")
            if name not in ("ema", "checkpoint") and fields[name].metadata["loads"]:
                raise ValueError(f"{name} says what is loaded: give it to load()")
            if isinstance(value, list | tuple) and len(value) != len(self.stages):
                raise ValueError(
                    f"{name} has {len(value)} values for {len(self.stages)} stages: give one for "
                    "all, or one for each"
                )

    def _show(self, images: ArrayLike, sigma: ArrayLike) -> None:
        if not self._progress or self._cancelled:
            return
        try:
            self._progress(sheets.to_uint8(np.asarray(images)), float(np.asarray(sigma)))
        except Cancelled:
            self._cancelled = True
            if jax.device_count() == 1:  # Several would wait for the one that ended here.
                raise


class PromptedDenoiser:
    """D(x, sigma) of a model under its prompts: x = x0 + sigma * eps, [B, H, W, C], to x0.

    `sigmas` are the levels that the model's settings step down; `start` is x at the first of them,
    `pictures` what becomes of x at the last. Euler's method with all of it:

        x = D.start(seeds)
        for sigma, low in zip(D.sigmas, D.sigmas[1:]):
            x = x + (low - sigma) * (x - D(x, sigma)) / sigma
        D.pictures(x)
    """

    def __init__(self, model: Model, texts: Texts) -> None:
        """Of a model with its settings, and what its encoder tokenized."""
        assert model.programs
        self._begin, frozen = model.programs.begin(model.settings)
        self.prompts = len(next(iter(texts.values())))
        sampler = model.settings.sampler
        scale = guidance_module.scales(sampler, sampler.guidance, self.prompts)
        self._arguments = model.params, frozen, dict(texts), scale
        zeros = np.zeros(self.prompts, np.uint32)
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
        """x0 as the guided model finds it at a level."""
        return self._denoise(x, jnp.asarray(sigma, jnp.float32), *self._arguments)

    def start(self, seeds: int | Sequence[int] = 0) -> Float[Array, "B H W C"]:
        """The noise that the command draws with these seeds, one a prompt or the first."""
        numbers = range(seeds, seeds + self.prompts) if isinstance(seeds, int) else seeds
        return self._first(*self._arguments, np.asarray(numbers, np.uint32))

    def pictures(self, x: Float[Array, "B H W C"]) -> UInt8[np.ndarray, "B H W 3"]:
        """What a sampler made of the start, as images."""
        return sheets.to_uint8(np.asarray(self._finish(x, *self._arguments)))

    def _start(self, *arguments: Any) -> Any:
        params, frozen, texts, scale, seeds = arguments
        return self._begin(params, frozen, texts, jax.vmap(jax.random.key)(seeds), scale)


def _paired(
    prompts: str | Sequence[str], seeds: int | Sequence[int] | None
) -> tuple[list[str], list[int]]:
    """As many prompts as seeds; ValueError where the numbers do not fit."""
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if seeds is None or isinstance(seeds, int):
        seeds = [(seeds or 0) + n for n in range(len(texts))]
    seeds = list(seeds)
    texts = texts * len(seeds) if len(texts) == 1 else texts
    if not texts or len(texts) != len(seeds):
        raise ValueError(f"{len(texts)} prompts and {len(seeds)} seeds: give one seed a prompt")
    return texts, seeds


def _in_words(stage: Model) -> str:
    s = stage.settings.sampler
    parts = [f"step {stage.step}, {stage.ema}"] if stage.step else []
    return ", ".join([stage.workdir, *parts, f"{s.name}, {s.steps} steps, guidance {s.guidance:g}"])
