"""What MLPerf measures a model by: FID and CLIP score of 30,000 captions' images.

Each image is drawn, resized and put through both networks inside one program, so that FID sees what
was drawn, not rounded to 8 bits, and no image leaves the devices.
"""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from diffusion_jax import sharding, sweep
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.metrics import clip_score, extractors, frechet, stats_files, weights
from diffusion_jax.metrics.clip_score import Clip
from diffusion_jax.metrics.extractors import Extractor
from diffusion_jax.metrics.features import gaussian
from diffusion_jax.settings import Evaluation
from diffusion_jax.task import Task
from diffusion_jax.text import TextEncoder
from diffusion_jax.train_state import Params
from sd_jax import coco, sampling

Scores = dict[str, float]
Evaluate = Callable[[Params, int], Scores]
_WHOLE: sharding.Rules = [(".*", sharding.FSDP)]


class Diverged(ValueError):
    """An image is not finite."""


class Judge(NamedTuple):
    """What images are drawn of and compared with."""

    captions: list[str]
    real: frechet.Reference
    inception: Extractor
    clip: Clip

    @property
    def card(self) -> dict[str, Any]:
        """What scores are worth only together with."""
        return {
            "prompts": prompt_files.fingerprint(self.captions),
            "images": len(self.captions),
            "inception": self.inception.weights,
            "official_inception": self.inception.official,
            "clip": self.clip.image.weights,
        }


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
    made: Task, encoder: TextEncoder, judge: Judge, mesh: Mesh, workdir: pathlib.Path, *,
    seed: int, guidance: float, negative_prompt: str, batch_size: int,
) -> Evaluate:  # fmt: skip
    """Returns evaluate(params, step) -> {"FID", "CLIP"}, the same in every process.

    Features are kept below `workdir` batch by batch, so that a kill loses no more than one. Noise
    is a function of (seed, step, number of the caption): neither the number of devices nor
    `batch_size` changes an image. Diverged if an image is not finite.
    """
    texts = {
        **sampling.prompts(encoder, judge.captions, negative_prompt),
        _SCORED: judge.clip.tokenize(judge.captions),
    }
    features = _features(made, judge, mesh, seed, guidance)
    where = sharding.batch_sharding(mesh)
    ways = mesh.shape["replica"] * mesh.shape["fsdp"]
    size = -(-batch_size // ways) * ways

    def evaluate(params: Params, step: int) -> Scores:
        networks = _placed(made, judge, mesh)

        def compute(rows):
            filled = rows[np.arange(size) % len(rows)]  # One program for all batches.
            batch = {name: sharding.place(array[filled], where) for name, array in texts.items()}
            places = sharding.place(filled.astype(np.uint32), where)
            found = features(params, networks, batch, places, np.uint32(step))
            return _kept({name: np.asarray(f)[: len(rows)] for name, f in found.items()})

        card = judge.card | {"step": step, "seed": seed, "guidance": guidance}
        folder = workdir / sweep.EVALUATION / "mlperf" / f"step_{step:08}"
        sweep.claim(folder, {"mlperf": card})
        collected = sweep.collect(folder, len(judge.captions), size, compute)
        return _scores(judge, collected, step)

    return evaluate


def to_8_bits(pixels: Float[Array, "B H W 3"]) -> Float[Array, "B H W 3"]:
    """0 ... 255 as the reference's pictures for CLIP: cut off, not rounded."""
    return jnp.floor(pixels)


_SCORED = "scored_ids"


def _features(made: Task, judge: Judge, mesh: Mesh, seed: int, guidance: float) -> Callable:
    """The jitted program: prompts to features of Inception, and both of CLIP's."""

    def features(params, networks, batch, places, step):
        ids, texts = batch[_SCORED], {k: v for k, v in batch.items() if k != _SCORED}
        noise = jax.random.fold_in(jax.random.key(seed), step)
        keys = jax.vmap(lambda i: jax.random.fold_in(noise, i))(places)
        scale = jnp.full(len(places), guidance)
        images = made.sample(params, networks["frozen"], texts, keys, scale)
        pixels = jnp.clip((images.astype(jnp.float32) + 1) / 2, 0, 1) * 255
        seen = judge.clip.image.prepare(to_8_bits(pixels))
        return {
            "inception": judge.inception.apply(
                networks["inception"], judge.inception.prepare(pixels)
            ),
            "image": judge.clip.image.apply(networks["image"], seen),
            "text": judge.clip.text.apply(networks["text"], ids),
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
        raise Diverged(
            f"{broken} of {len(judge.captions)} images of step {step} are not finite: the model "
            "has diverged, and there is no score of it"
        )
    # Moments in float64, never the few-images formula: the rules know covariances alone.
    fid = frechet.distance(gaussian(collected["inception"]), judge.real)
    return {"FID": fid, "CLIP": float(collected["clip"].mean())}
