"""Open Stable Diffusion models to draw with, trained with this library or elsewhere.

    import sd_jax

    model = sd_jax.load("runs/sd_quickstart")
    model.draw(["a red seven on gray paper"], guidance=3, steps=20, sampler="dpmpp_2m")

`load` opens training runs, diffusers directories, and single checkpoint files of CompVis,
Stability, MLPerf and NeMo.
"""

import os
from collections.abc import Sequence
from typing import Annotated, Any

from absl import logging

from diffusion_jax import files
from diffusion_jax.config import ranges
from diffusion_jax.draw import options, program
from diffusion_jax.draw.kind import Kind
from diffusion_jax.draw.model import Model
from diffusion_jax.draw.options import Option, Options, Values
from diffusion_jax.draw.stage import Stage
from diffusion_jax.task import Texts
from diffusion_jax.text import prompt_weights
from diffusion_jax.weights import pretrained
from sd_jax import sampling, settings
from sd_jax.unet import PIX2PIX
from sd_jax.weights import embedding_files, published, trained
from sd_jax.weights.published import NO_FACTS, File

FILE_OPTIONS: Options = {
    "prediction": Option(
        "What the UNet of a model trained elsewhere predicts, eps or v, if its files do not state it.",
        Annotated[str, ("eps", "v")],
        at_load=True,
    ),
    "tokenizer": Option(
        "Folder with CLIP's tokenizer, if the model is a single file.", str, at_load=True, is_text=True
    ),
    "norm_groups": Option(
        "Number of groups in the norms of residual blocks, if the model is a single file; 16 for MLPerf's models.",
        ranges.Count,
        at_load=True,
    ),
    "dtype": Option(
        "Dtype in which a model trained elsewhere computes: bfloat16 (the default) or float32 (the default on CPUs).",
        Annotated[str, ("bfloat16", "float32")],
        at_load=True,
    ),
    "config": Option(
        "LDM's yaml config, if the model is a single file that does not state the number of attention heads.",
        str,
        at_load=True,
        is_text=True,
    ),
    "lora": Option(
        "A LoRA to merge into a model trained elsewhere, as FILE or FILE:STRENGTH. Repeat it, or "
        "write commas, for several files.",
        str,
        at_load=True,
        joins=True,
    ),
}
"""The options of models that were trained elsewhere, in the order of the fields of File."""
OPTIONS: Options = {
    **options.SHARED,
    **FILE_OPTIONS,
    "vae_weights": Option(
        "A VAE to use instead of the model's own: a file, a diffusers directory or a workdir.",
        str,
        field="vae.weights",
        at_load=True,
    ),
    "embedding": Option(
        "A file of textual inversion, whose word the prompts may contain. Repeat it, or write "
        "commas, for several files.",
        str,
        at_load=True,
        joins=True,
    ),
    **options.of_group("sampler", settings.Sampler),
}
"""The options for drawing, keyed by name; flags and keyword arguments have the same names."""


class StableDiffusion(Model):
    """A Stable Diffusion model that is ready to draw."""

    options = OPTIONS
    any_shape = True
    file: File = NO_FACTS
    """The settings with which a model that was trained elsewhere was opened."""

    def tokenize(self, stage: Stage, prompts: Sequence[Any]) -> Texts:
        """Return the tokens of prompts, and those of the negative prompt in the settings."""
        s = stage.settings.sampler
        if not s.prompt_weights and (marked := prompt_weights.marked(prompts)):
            logging.log_first_n(
                logging.WARNING,
                "%d of %d prompts contain weights or BREAK, such as %r, which are read as words: "
                "set --prompt_weights to weight the words",
                1,
                len(marked),
                len(prompts),
                marked[0],
            )
        return sampling.tokenizer(s)(stage.encoder, prompts, s.negative_prompt)

    def check(self, low_res: Sequence[tuple[int, ...]], batch_sizes: Sequence[int]) -> None:
        """Raise ValueError if the model cannot use the pictures, or a batch does not fit."""
        if low_res:
            raise ValueError(
                "low_res is given, but Stable Diffusion has no stage that enlarges pictures: leave "
                "it out, and draw over the picture (image=...) at a larger height and width"
            )
        if self.stages[0].settings.sees == PIX2PIX and self.strengths is None:
            raise ValueError(
                f"{self.stages[0].workdir} is InstructPix2Pix, which edits a picture: give it with "
                "--image=FILE (image=... in Python)"
            )
        vae = self.stages[0].settings.vae
        program.check_fits(*self.shapes[0], vae.width * vae.channel_mult[0], batch_sizes[0])

    def card(self) -> dict[str, Any]:
        """Return the metadata to save with each image: the model, its weights and its settings."""
        (stage,) = self.stages
        p, (height, width) = stage.settings, self.shapes[0]
        card: dict[str, Any] = {"model": stage.workdir, "checkpoint": stage.step, "ema": stage.ema}
        card |= {"height": height, "width": width, "predicts": p.diffusion.predicts}
        card |= {"sampler": p.sampler.name, "steps": p.sampler.steps, "eta": p.sampler.eta}
        card |= describe_grid(p.sampler) | describe_guidance(stage)
        card |= {"guidance": p.sampler.guidance, "negative_prompt": p.sampler.negative_prompt}
        if self.strengths and self.strengths[0] < 1:
            p = p._replace(strength=self.strengths[0])
            card |= {"strength": p.strength, "steps_taken": p.steps_taken}
        return card | self._additions()

    def describe(self, stage: Stage) -> dict[str, Any]:
        """Return a run's training seed and VAE, and the settings that change its pictures."""
        s, described = stage.settings.sampler, {}
        if stage.step:
            run = trained.read_run(stage.workdir, options.fields(OPTIONS, self.values[0]))
            described = {"training_seed": run.run.seed, "vae": run.vae_weights}
        described |= self._additions() | {"workdir": stage.workdir, "eta": s.eta}
        described |= {"negative_prompt": s.negative_prompt}
        return described | describe_grid(s) | describe_guidance(stage)

    def _additions(self) -> dict[str, list[str]]:
        """Return the LoRA files and embeddings that are added to the model, if any."""
        files_of = embedding_files.split(self.values[0].get("embedding", ""))
        paths = {"lora": self.file.lora, "embedding": files_of}
        return {name: list(of_kind) for name, of_kind in paths.items() if of_kind}


def load(path: str | os.PathLike[str], **values: Any) -> StableDiffusion:
    """Open a training run, a diffusers directory or a single checkpoint file, to draw with it.

    Args:
        path: The run's workdir, the directory or the file.
        **values: Options for drawing, such as steps=20: the keys of OPTIONS, which are also the
            flags of sd_jax.sample. A list gives several files, as in lora=["a.pt", "b.pt:0.7"].

    Raises:
        FileNotFoundError: The path, or a file that the model or an option names, does not exist.
        ValueError: A part of the model or the chosen average is missing, a value is invalid, or
            the run `guide` cannot guide this model.
    """
    typed = options.read(OPTIONS, values)
    fields = options.fields(OPTIONS, typed)
    file = File(*map(typed.get, FILE_OPTIONS))
    if file.lora:
        file = file._replace(lora=embedding_files.split(typed["lora"]))
    path = pretrained.snapshot(files.path(path))
    if path.is_file() or (path / "model_index.json").is_file() or (path / "unet").is_dir():
        if guide := typed.get("guide"):
            raise ValueError(
                f"--guide={guide} works only for runs (--workdir), but {path} is a model trained "
                "elsewhere: leave --guide out"
            )
        stage = published.load_stage(
            files.local(path), fields, typed.get("ema", "ema"), file, typed.get("embedding", "")
        )
    elif path.is_dir():
        if any(value is not None for value in file):
            *first, last = (f"--{name}" for name in FILE_OPTIONS)
            raise ValueError(f"{', '.join(first)} and {last} need --model: leave them out for a --workdir")
        stage = trained.load_stage(path, trained.read_run(path, fields), typed)
    else:
        raise FileNotFoundError(f"{path} does not exist: name the workdir of a run, a diffusers directory or a file")
    model = StableDiffusion([stage], [typed])
    model.file = file
    return model


def open_alone(paths: Sequence[str], values: Sequence[Values]) -> StableDiffusion:
    """Open the model at paths[0] with the options values[0], as `load` does.

    Raises:
        ValueError: There are several paths, but Stable Diffusion has no cascades.
    """
    if len(paths) > 1:
        raise ValueError(
            f"--workdir={','.join(paths)} does not exist, and Stable Diffusion has no cascades of "
            "several models: repeat --workdir for each model"
        )
    return load(paths[0], **values[0])


KIND = Kind("sd_jax", OPTIONS, (1.5, 2, 3, 4, 5, 6, 7, 8), open_alone, FILE_OPTIONS)


def describe_guidance(stage: Stage) -> dict[str, Any]:
    """Return metadata of a model: its LoRA, its guiding model, its guidance and its fields.

    Values that equal the defaults are left out.
    """
    s: settings.Sampler = stage.settings.sampler
    is_changed = {"guiding": s.guiding != "cfg", "guidance_low": s.guidance_low > 0}
    is_changed |= {"fields": s.fields != "", "prompt_weights": s.prompt_weights}
    is_changed |= {"guidance_high": s.guidance_high < float("inf")}
    fields = {name: getattr(s, name) for name, changed in is_changed.items() if changed}
    return fields | ({"guide": stage.guide} if stage.guide else {}) | dict(stage.lora)


def describe_grid(sampler: settings.Sampler) -> dict[str, Any]:
    """Return metadata of a sampler: the settings that determine its noise levels, and its churn.

    Settings with default values are left out, with one exception: if `sampler.grid` or
    `sampler.end` is set, all settings of the noise levels are included.
    """
    names = ("grid", "end", "offset", "sigma_min", "sigma_max", "rho", "unit_start")
    has_grid, defaults = sampler.grid or sampler.end, sampler._field_defaults
    fields = {name: getattr(sampler, name) for name in (*names, "churn")}
    shown = lambda name: (has_grid and name in names) or fields[name] != defaults[name]
    return {name: value for name, value in fields.items() if shown(name)}
