"""Compute the scores of the MLPerf benchmark: FID and CLIP score of images of 30,000 captions.

Images go from the sampler to Inception and CLIP without leaving the devices. FID is computed from
float images, without rounding to 8 bits.
"""

import contextlib
import math
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh

from diffusion_jax import runs
from diffusion_jax.config.settings import Evaluation
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.devices import sharding
from diffusion_jax.draw.seeds import halves, keys_of
from diffusion_jax.evaluate import drawn_features
from diffusion_jax.metrics import clip_score, clip_towers, extractors, fid, stats_files
from diffusion_jax.metrics.clip_towers import ClipExtractors
from diffusion_jax.metrics.extractors import Extractor
from diffusion_jax.metrics.features import gaussian
from diffusion_jax.metrics.table import METRICS
from diffusion_jax.task import Params, Task
from diffusion_jax.text import TextEncoder
from diffusion_jax.train.watchdog import Watchdog
from sd_jax import sampling
from sd_jax.mlperf import coco
from sd_jax.settings import Settings

TargetScores = dict[str, float]
_WHOLE: sharding.ShardingRules = [(".*", sharding.FSDP)]


class Evaluate(NamedTuple):
    """A function that scores a model, and one that compiles it (see `make_evaluate`)."""

    score: Callable[[Params, int], TargetScores]
    """Maps the UNet's parameters and their training step to {"FID": ..., "CLIP": ...}."""
    warm_up: Callable[[Params], None]
    """Compiles the evaluation by running it on one batch, whose results are discarded. The
    argument is the UNet's parameters."""


class EvaluationInputs(NamedTuple):
    """Inputs of the evaluation: captions to draw, scoring networks and reference statistics."""

    captions: list[str]
    real: fid.ReferenceFeatures
    """Statistics of Inception's features of real images, with which FID compares drawn images."""
    inception: Extractor
    clip: ClipExtractors


def open_inputs(evaluation: Evaluation) -> EvaluationInputs:
    """Read the captions, reference statistics and network weights that a config names.

    Args:
        evaluation: The `evaluation` group of the config. Only the first `num_prompts` captions of
            the file `prompts` are used (all 30,000 in the benchmark).

    Raises:
        ValueError: If a path is empty, num_prompts is out of range, a file is malformed, or the
            reference statistics were computed with another Inception network.
        FileNotFoundError: If a file is missing.
    """
    for name in ("prompts", "reference", "inception", "clip"):
        if not getattr(evaluation, name):
            raise ValueError(
                f"evaluation.{name} is empty: the benchmark needs the paths of the table of "
                "captions (evaluation.prompts), of the statistics of real images "
                "(evaluation.reference), and of the weights of Inception (evaluation.inception) "
                "and CLIP (evaluation.clip)"
            )
    captions = [row.caption for row in coco.read_tsv(pathlib.Path(evaluation.prompts))]
    if not 2 <= evaluation.num_prompts <= len(captions):
        raise ValueError(
            f"evaluation.num_prompts is {evaluation.num_prompts}, but {evaluation.prompts} holds "
            f"{len(captions)} captions: choose from 2 to {len(captions)}"
        )
    inception = extractors.load_inception(evaluation.inception)
    stats = stats_files.read(evaluation.reference)
    stats_files.check(evaluation.reference, stats, inception)
    real = fid.reference(stats.gaussian)
    return EvaluationInputs(captions[: evaluation.num_prompts], real, inception, clip_towers.load(evaluation.clip))


def make_evaluate(
    s: Settings,
    task: Task,
    encoder: TextEncoder,
    inputs: EvaluationInputs,
    mesh: Mesh,
    workdir: pathlib.Path,
    batch_size: int,
) -> Evaluate:
    """Return functions that draw images from all captions and compute FID and CLIP score.

    Every process gets the same scores. Both are NaN if any image has a value that is not finite.
    The initial noise of an image depends only on the seed, the training step and the index of the
    caption, not on the batch size or the number of devices.

    Args:
        s: The settings of the run.
        task: The task that draws the images.
        encoder: The text encoder of the model.
        inputs: The captions, the scoring networks and the reference statistics.
        mesh: The devices.
        workdir: The workdir of the run. Features are saved in a subfolder after each batch, so that
            a restart loses at most one batch.
        batch_size: Number of images to draw at once on all devices together, a multiple of the
            number of devices.

    Raises:
        ValueError: If `workdir` already holds features that were computed with other captions,
            scoring networks, seed or sampler settings.
    """
    texts = sampling.prompts(encoder, inputs.captions, s.sampler.negative_prompt)
    ids = inputs.clip.tokenize(inputs.captions)
    draw = _drawer(task, mesh, s.run.seed, s.evaluation.guidance[0])
    networks = {"inception": inputs.inception, "image": inputs.clip.image, "text": inputs.clip.text}
    programs = {name: extractors.program(network, mesh) for name, network in networks.items()}
    split = sharding.batch_sharding(mesh)
    folder = workdir / runs.EVALUATION / "mlperf"
    drawn_features.claim(folder, {"mlperf": _card(s, inputs)})

    def computing(params: Params, step: int, beat: Callable[[], None]) -> Callable:
        # The frozen weights stay on the devices only during an evaluation.
        frozen = sharding.place_all(task.frozen, mesh, task.rules)
        placed = {k: sharding.place_all(v.params, mesh, _WHOLE) for k, v in networks.items()}

        def compute(rows):
            beat()
            numbers = drawn_features.filled(rows, batch_size)
            place = lambda array: sharding.place(array, split)
            batch = {name: place(array[numbers]) for name, array in texts.items()}
            places = place(numbers.astype(np.uint32))
            pixels, truncated, finite = draw(params, frozen, batch, places, np.uint32(step))
            images_and_ids = {"inception": pixels, "image": truncated, "text": place(ids[numbers])}
            arrays = {k: run(placed[k], images_and_ids[k]) for k, run in programs.items()}
            arrays["fine"] = finite
            arrays = {name: np.asarray(array)[: len(rows)] for name, array in arrays.items()}
            cosines = clip_score.cosines(arrays["image"], arrays["text"])[:, 0]
            return {"inception": arrays["inception"], "clip": cosines, "fine": arrays["fine"]}

        return compute

    def score(params: Params, step: int) -> TargetScores:
        name = f"step_{step:08}"
        (folder / name).mkdir(parents=True, exist_ok=True)
        with contextlib.closing(Watchdog(s.run.step_timeout)) as watchdog:
            compute = computing(params, step, watchdog.beat)
            features = drawn_features.collect(len(inputs.captions), batch_size, compute, name, folder / name)
        return _scores(inputs, features, step)

    def warm_up(params: Params) -> None:
        computing(params, 0, lambda: None)(np.arange(min(batch_size, len(inputs.captions))))

    return Evaluate(score, warm_up)


def _card(s: Settings, inputs: EvaluationInputs) -> dict[str, Any]:
    """Return the settings on which saved features depend, besides the weights of the UNet."""
    return {
        "prompts": prompt_files.fingerprint(inputs.captions),
        "images": len(inputs.captions),
        "inception": inputs.inception.weights,
        "clip": inputs.clip.image.weights,
        "seed": s.run.seed,
        "guidance": s.evaluation.guidance,
        "sampler": {k: v for k, v in s.sampler._asdict().items() if k != "fields"},
    }


def _drawer(task: Task, mesh: Mesh, seed: int, guidance: float) -> Callable:
    """Return a jitted function draw(params, frozen, texts, places, step).

    The noise of each image depends on `seed`, `step` and its index in `places`. The function
    returns the pixels as floats [B, H, W, 3] in [0, 255], the same pixels rounded down, and a bool
    array [B] that is True for images whose values are all finite.
    """
    split = sharding.batch_sharding(mesh)

    def draw(params, frozen, texts, places, step):
        noise = jax.random.fold_in(keys_of(halves([seed]))[0], step)
        keys = jax.vmap(lambda i: jax.random.fold_in(noise, i))(places)
        images = task.sample(params, frozen, texts, keys, jnp.full(len(places), guidance))
        pixels = jnp.clip((images.astype(jnp.float32) + 1) / 2, 0, 1) * 255
        # MLPerf's reference code truncates the images for CLIP to 8 bits instead of rounding.
        return pixels, jnp.floor(pixels), jnp.isfinite(images).all((1, 2, 3))

    draw = sharding.ambient(mesh, draw)
    return jax.jit(draw, out_shardings=(split, split, sharding.replicated(mesh)))


def _scores(inputs: EvaluationInputs, features: drawn_features.FeaturesByKind, step: int) -> TargetScores:
    if broken := int((~features["fine"]).sum()):
        total = len(inputs.captions)
        logging.error(
            "%d of %d images of step %d contain values that are not finite: this step gets no scores",
            broken,
            total,
            step,
        )
        return {"FID": math.nan, "CLIP": math.nan}
    # As in MLPerf's rules, FID uses full covariances even for few images. They are in float64.
    fid = METRICS["fid"].score(gaussian(features["inception"]), inputs.real)
    clip = METRICS["clip_score"].score(features["clip"][:, None])
    return {"FID": fid.value, "CLIP": clip.value}
