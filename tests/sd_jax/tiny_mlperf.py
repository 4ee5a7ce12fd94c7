"""The benchmark's command with tiny extractors, which can kill itself at a chosen point.

    python -m tests.sd_jax.tiny_mlperf --config=tests/sd_jax/tiny_benchmark.py:FOLDER --workdir=...

tiny_benchmark.write wrote FOLDER. --toy also replaces the networks.
"""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from diffusion_jax import cli
from diffusion_jax.data import pipeline
from diffusion_jax.devices import sharding
from diffusion_jax.evaluate import drawn_features
from diffusion_jax.metrics import clip_towers, extractors, weights
from diffusion_jax.metrics.clip_towers import ClipExtractors
from diffusion_jax.model import loss_by_noise_level
from diffusion_jax.task import Task
from diffusion_jax.train import checkpoint
from sd_jax.mlperf import __main__ as mlperf
from sd_jax.mlperf import run
from tests.diffusion_jax.metrics import toy
from tests.sd_jax.tiny_benchmark import INTERVAL

_TOY = flags.DEFINE_bool("toy", False, "Grey images, darker by a step of Adam after each step.")
_KILL = flags.DEFINE_enum("kill", "", ["", "training", "stop", "saving", "evaluation"], "When.")


def main():
    """Run the command with the real command's arguments."""
    extractors.inception_extractor = lambda weights, mode, level: inception()
    weights.load = lambda path: None
    clip_towers.load = lambda path: clip()
    if _TOY.value:
        run.make_task, run.read_vae = make_task, lambda path, vae: None
    if _KILL.value:
        _KILLS[_KILL.value]()
    mlperf.main()


def inception():
    """Return an extractor of the mean colour of images between 0 and 255."""
    return toy.extractor(width=3, prepare=lambda x: x, apply=lambda params, x: x.mean((1, 2)))


def clip():
    """Return towers: the score is the cosine of (1, image's colour) and (1, text's length)."""
    one = lambda x: jnp.concatenate([jnp.ones((len(x), 1)), x], 1)
    image = toy.extractor(width=4, prepare=lambda x: x / 255, apply=lambda params, x: one(x.mean((1, 2))))
    text = toy.extractor(width=4, prepare=lambda ids: ids, apply=lambda params, ids: one(jnp.repeat(ids, 3, 1) / 10))
    return ClipExtractors(image, text, lambda texts: np.array([[len(text)] for text in texts]))


def make_task(s, encoder, vae_params):
    """Replaces the task. Its gradient is about 1, so that Adam's steps equal the learning rate."""
    del vae_params

    def init(key):
        return {"bias": jnp.zeros(3)}

    def loss(params, frozen, batch, keys):
        noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)
        slope = 1 + 0.1 * (batch["moments"].mean((1, 2, 3))[:, None] + noise)
        per_image = (slope * params["bias"]).sum(1)
        return per_image.mean(), loss_by_noise_level(per_image, jnp.ones(len(per_image)))

    def sample(params, frozen, batch, keys, guidance):
        noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)
        text = encoder.encode(frozen["text"], batch)[0].mean((1, 2))
        colour = params["bias"] + 0.02 * (noise + text[:, None])
        size = s.latents.image_size
        return jnp.broadcast_to(colour[:, None, None], (len(keys), size, size, 3))

    return Task(init, loss, sample, {"text": encoder.frozen}, sharding.RULES)


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _at_batch(number, act):
    take, taken = pipeline.Batches.__next__, []

    def counting(self):
        taken.append(1)
        if len(taken) == number:
            act()
        return take(self)

    pipeline.Batches.__next__ = counting


def _in_saving():
    """Kill the process while it writes its first checkpoint."""
    save = checkpoint.Checkpointer.save

    def dying(self, *arguments, **options):
        save(self, *arguments, **options)
        _die()

    checkpoint.Checkpointer.save = dying


def _in_evaluation():
    """Kill the process after the features of the second batch."""
    write, written = drawn_features.files.write_whole, []

    def dying(path, content):
        write(path, content)
        written.append(path)
        if len([path for path in written if path.suffix == ".npz"]) == 2:
            _die()

    drawn_features.files.write_whole = dying


_KILLS = {
    "training": lambda: _at_batch(INTERVAL + 1, _die),  # The first batch of the second interval.
    "stop": lambda: _at_batch(1, lambda: os.kill(os.getpid(), signal.SIGTERM)),
    "saving": _in_saving,
    "evaluation": _in_evaluation,
}

if __name__ == "__main__":
    cli.run(main)
