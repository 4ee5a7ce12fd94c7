"""What MLPerf measures a model by: FID and CLIP score of 30,000 captions' images.

Each image is drawn, resized and put through both networks inside one program, so that FID sees what
was drawn, not rounded to 8 bits, and no image leaves the devices.
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
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.evaluate import sweep
from diffusion_jax.machine import sharding
from diffusion_jax.metrics import clip_score, extractors, frechet, stats_files, weights
from diffusion_jax.metrics.clip_score import Clip
from diffusion_jax.metrics.extractors import Extractor
from diffusion_jax.metrics.features import gaussian
from diffusion_jax.settings import Evaluation
from diffusion_jax.task import Params, Task
from diffusion_jax.text import TextEncoder
from diffusion_jax.train.watchdog import Watchdog
from sd_jax import sampling
from sd_jax.mlperf import coco
from sd_jax.settings import Settings

Scores = dict[str, float]
Evaluate = Callable[[Params, int], Scores]
_WHOLE: sharding.Rules = [(".*", sharding.FSDP)]


class Judge(NamedTuple):
    """What images are drawn of and compared with."""

    captions: list[str]
    real: frechet.Reference
    inception: Extractor
    clip: Clip


def open_judge(asked: Evaluation) -> Judge:
    """Reads captions, statistics and weights; ValueError or FileNotFoundError if they cannot be.

    The first `num_prompts` rows of the table are drawn: all of MLPerf's.
    """
    for name in ("prompts", "reference", "inception", "clip"):
        if not getattr(asked, name):
            raise ValueError(
                f"evaluation.{name} is empty: the benchmark needs the table of captions (prompts), "
                "statistics of their images (reference), and the weights of inception and clip"
            )
    captions = [row.caption for row in coco.read_tsv(pathlib.Path(asked.prompts))]
    if not 2 <= asked.num_prompts <= len(captions):
        raise ValueError(
            f"evaluation.num_prompts is {asked.num_prompts}, and {asked.prompts} holds "
            f"{len(captions)}: take 2 or more, and no more than there are"
        )
    inception = extractors.inception_extractor(weights.load(asked.inception), "pytorch")
    stats = stats_files.read(asked.reference)
    stats_files.check(asked.reference, stats, inception)
    real = frechet.reference(stats.gaussian)
    return Judge(captions[: asked.num_prompts], real, inception, clip_score.load(asked.clip))


def make_evaluate(
    s: Settings, made: Task, encoder: TextEncoder, judge: Judge, mesh: Mesh,
    workdir: pathlib.Path, batch_size: int,
) -> Evaluate:  # fmt: skip
    """Returns evaluate(params, step) -> {"FID", "CLIP"}, the same in every process.

    Features are kept below `workdir` batch by batch, so that a kill loses no more than one;
    ValueError if there are such of other captions, networks, seed or sampler. Noise is a function
    of (seed, step, number of the caption): neither the number of devices nor `batch_size`, which
    must divide over them, changes an image. Both scores are NaN if an image is not finite.
    """
    tokens = sampling.prompts(encoder, judge.captions, s.sampler.negative_prompt)
    texts = {**tokens, _SCORED: judge.clip.tokenize(judge.captions)}
    features = _features(made, judge, mesh, s.run.seed, s.evaluation.guidance[0])
    where = sharding.batch_sharding(mesh)
    folder = workdir / runs.EVALUATION / "mlperf"
    sweep.claim(folder, {"mlperf": _card(s, judge)})

    def evaluate(params: Params, step: int) -> Scores:
        networks = _placed(made, judge, mesh)

        def compute(rows):
            watchdog.beat()
            filled = rows[np.arange(batch_size) % len(rows)]  # One program for all batches.
            batch = {name: sharding.place(array[filled], where) for name, array in texts.items()}
            places = sharding.place(filled.astype(np.uint32), where)
            found = features(params, networks, batch, places, np.uint32(step))
            return _kept({name: np.asarray(f)[: len(rows)] for name, f in found.items()})

        at = folder / f"step_{step:08}"
        at.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(Watchdog(s.run.step_timeout)) as watchdog:
            collected = sweep.collect(at, len(judge.captions), batch_size, compute)
        return _scores(judge, collected, step)

    return evaluate


_SCORED = "scored_ids"


def _card(s: Settings, judge: Judge) -> dict[str, Any]:
    """What features are worth only together with."""
    return {
        "prompts": prompt_files.fingerprint(judge.captions),
        "images": len(judge.captions),
        "inception": judge.inception.weights,
        "clip": judge.clip.image.weights,
        "seed": s.run.seed,
        "guidance": s.evaluation.guidance,
        "sampler": s.sampler._asdict(),
    }


def _features(made: Task, judge: Judge, mesh: Mesh, seed: int, guidance: float) -> Callable:
    """The jitted program: prompts to features of Inception, and both of CLIP's."""

    def features(params, networks, batch, places, step):
        ids, texts = batch[_SCORED], {k: v for k, v in batch.items() if k != _SCORED}
        noise = jax.random.fold_in(jax.random.key(seed), step)
        keys = jax.vmap(lambda i: jax.random.fold_in(noise, i))(places)
        scale = jnp.full(len(places), guidance)
        images = made.sample(params, networks["frozen"], texts, keys, scale)
        pixels = jnp.clip((images.astype(jnp.float32) + 1) / 2, 0, 1) * 255
        apply = lambda name, net, x: net.apply(networks[name], net.prepare(x))
        return {
            "inception": apply("inception", judge.inception, pixels),
            # The reference's pictures for CLIP are cut off to 8 bits, not rounded.
            "image": apply("image", judge.clip.image, jnp.floor(pixels)),
            "text": apply("text", judge.clip.text, ids),
            "fine": jnp.isfinite(images).all((1, 2, 3)),
        }

    return jax.jit(features, out_shardings=sharding.replicated(mesh))


def _placed(made: Task, judge: Judge, mesh: Mesh) -> dict[str, Any]:
    """The weights that are not trained, on the devices for as long as an evaluation takes."""
    spread = lambda params: sharding.place_all(params, mesh, _WHOLE)
    return {
        "frozen": sharding.place_all(made.frozen, mesh, made.rules),
        "inception": spread(judge.inception.params),
        "image": spread(judge.clip.image.params),
        "text": spread(judge.clip.text.params),
    }


def _kept(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What is written of a batch: an image's 2,048 numbers, its cosine, whether it is finite."""
    cosines = clip_score.cosines(found["image"], found["text"])
    return {"inception": found["inception"], "clip": cosines, "fine": found["fine"]}


def _scores(judge: Judge, collected: dict[str, np.ndarray], step: int) -> Scores:
    if broken := int((~collected["fine"]).sum()):
        total = len(judge.captions)
        logging.error("%d of %d images of step %d are not finite: no score", broken, total, step)
        return {"FID": math.nan, "CLIP": math.nan}
    # Moments in float64, never the few-images formula: the rules know covariances alone.
    fid = frechet.distance(gaussian(collected["inception"]), judge.real)
    return {"FID": fid, "CLIP": float(collected["clip"].mean())}
