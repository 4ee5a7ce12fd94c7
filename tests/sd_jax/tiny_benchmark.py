"""The benchmark in miniature: its data, extractors of a few numbers, and the command's process."""

import json
import os
import signal
import socket

import jax
import jax.numpy as jnp
import numpy as np

from configs import sd2_mlperf
from diffusion_jax.data import moments, webdataset
from diffusion_jax.metrics import stats_files
from diffusion_jax.metrics.features import Gaussian, gaussian
from diffusion_jax.task import Task, loss_by_noise_level
from sd_jax import coco, task
from tests.imagen_jax import commands
from tests.sd_jax import tiny

BATCH, INTERVAL, CAPTIONS = 8, 2, 10
WIDTH = 6


def config(folder):
    """MLPerf's own with networks, data and numbers in miniature."""
    c, small = sd2_mlperf.get_config(), tiny.config(folder / "vae.safetensors")
    for group in ("unet", "vae", "text", "latents"):
        c[group] = small[group]
    c.unet.norm_groups, c.latents.pixels, c.text.drop_prob = 16, "unit", 0.0
    c.optimizer.update(lr=0.02, warmup=1)
    c.sampler.steps = 2
    c.data.update(path=str(folder / "moments"), threads=0)
    c.evaluation.update(
        every=BATCH * INTERVAL, num_prompts=CAPTIONS, prompts=str(folder / "captions.tsv"),
        reference=str(folder / "reference.npz"), inception="toy", clip="toy",
    )  # fmt: skip
    c.update(batch_size=BATCH, steps=2 * INTERVAL, log_every=1, prompts=("a",))
    return c


def write(folder, shape=(8, 4, 4)):
    """Everything that a run reads; `reference` is far from all that it draws."""
    rng = np.random.default_rng(0)
    tiny.write_vae(folder / "vae.safetensors")
    (folder / "moments").mkdir()
    records = [
        {webdataset.KEY: f"{i:09}".encode(), "txt": f"caption {i}".encode(),
         "npy": moments.write(rng.normal(size=shape).astype(np.float32).transpose(1, 2, 0))}
        for i in range(24)
    ]  # fmt: skip
    webdataset.write(folder / "moments" / "00000.tar", records)
    rows = [coco.Caption(i, i, f"picture {i}") for i in range(CAPTIONS)]
    (folder / "captions.tsv").write_text(coco.to_tsv(rows))
    write_reference(folder, np.full(WIDTH, 100.0), np.eye(WIDTH), 1.0)
    return folder


def write_reference(folder, mean, cov, scale):
    """Statistics of the toy extractor, whose features are multiplied by `scale`."""
    stats = stats_files.Stats(Gaussian(mean, cov, 30_000), None, None)
    stats_files.write(folder / "reference.npz", stats)
    (folder / "scale.json").write_text(json.dumps(scale))


def reach_at_the_second(folder, workdir):
    """Makes the reference the second evaluation's own, far from the first; the run is repeated."""
    first, second = (
        gaussian(np.concatenate([np.load(part)["inception"] for part in sorted(parts)]))
        for step in (INTERVAL, 2 * INTERVAL)
        for parts in [(workdir / f"evaluation/mlperf/step_{step:08}").glob("*.npz")]
    )
    scale = float(np.sqrt(200 / np.square(first.mean - second.mean).sum()))
    write_reference(folder, scale * second.mean, scale**2 * second.cov, scale)


def extractor(folder, name):
    """Means of an image's quarters; of texts, what has a cosine of about 0.9 with every image."""
    from tests.diffusion_jax.metrics import toy

    scale = json.loads((folder / "scale.json").read_text())
    if name == "inception":
        made = toy.extractor(apply=lambda params, x: scale * toy.apply(params, x))
        return made._replace(width=WIDTH)
    if name == "image":
        one = lambda params, x: jnp.concatenate([jnp.full((len(x), 1), 2.0), x.mean(1)], 1)
    else:
        one = lambda params, ids: jnp.stack([jnp.ones(len(ids)), *3 * [ids[:, 0] % 3 / 10]], 1)
    prepare = toy.prepare if name == "image" else (lambda ids: ids)
    return toy.extractor(name=name, width=4, prepare=prepare, apply=one)


def make_task(s, encoder, vae_params):
    """One product of matrices in place of all networks: it compiles at once."""
    del vae_params

    def init(key):
        return {"kernel": jax.random.normal(key, (8, 3)), "bias": jnp.zeros(3)}

    def predict(params, x):
        return jnp.tanh(x @ params["kernel"] + params["bias"])

    def loss(params, frozen, batch, key):
        noise = jax.random.normal(key, (len(batch["moments"]), 3))
        error = predict(params, batch["moments"].mean((1, 2))) - noise
        per_image = jnp.square(error).mean(1)
        return per_image.mean(), loss_by_noise_level(per_image, jnp.ones(len(per_image)))

    def sample(params, frozen, batch, keys, guidance):
        noise = jax.vmap(lambda key: jax.random.normal(key, (8,)))(keys)
        text = encoder.encode(frozen["text"], batch)[0].mean((1, 2))
        colour = predict(params, noise + text[:, None])
        size = s.latents.image_size
        return jnp.broadcast_to(colour[:, None, None], (len(keys), size, size, 3))

    return Task(init, loss, sample, {"text": encoder.frozen}, task.RULES)


def run(folder, workdir, *arguments, kill="", nets="toy", devices=2, processes=1):
    """The ended processes of the command; each kills itself where `kill` says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outputs = [(folder / f"out_{i}", folder / f"err_{i}") for i in range(processes)]
    c = folder / "config.py"
    c.write_text(
        "import pathlib\nfrom tests.sd_jax import tiny_benchmark\n"
        f"def get_config():\n    return tiny_benchmark.config(pathlib.Path({str(folder)!r}))\n"
    )
    given = (f"--config={c}", f"--workdir={workdir}", "--seed=7", "--eval_batch=2", *arguments)
    started = [
        commands.fork(_command, folder, given, kill, nets, devices, outputs[i], port, i, processes)
        for i in range(processes)
    ]
    for process in started:
        process.join(150)
    return [
        commands.Ended(process.exitcode, *(path.read_text() for path in of_one))
        for process, of_one in zip(started, outputs, strict=True)
    ]


def _command(folder, arguments, kill, nets, devices, outputs, port, process, processes):
    from diffusion_jax.metrics import clip_score, extractors, weights
    from diffusion_jax.metrics.clip_score import Clip

    extractors.inception_extractor = lambda weights, mode: extractor(folder, "inception")
    weights.load = lambda path: None
    tokenize = lambda texts: np.array([[len(text)] for text in texts])
    towers = [extractor(folder, name) for name in ("image", "text")]
    clip_score.load = lambda path: Clip(*towers, tokenize)
    if nets == "toy":
        task.make_task = make_task
    if kill:
        _KILLS[kill]()
    if processes > 1:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    commands._command("sd_jax.mlperf", arguments, devices, outputs, None)


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _in_training():
    """At the third batch, the first of the second interval."""
    from diffusion_jax.data import pipeline

    take, taken = pipeline.Batches.__next__, []

    def dying(self):
        taken.append(1)
        if len(taken) > INTERVAL:
            _die()
        return take(self)

    pipeline.Batches.__next__ = dying


def _in_saving():
    """While the first checkpoint of this process is written."""
    from diffusion_jax import checkpoint

    save = checkpoint.Checkpointer.save

    def dying(self, *arguments):
        save(self, *arguments)
        _die()

    checkpoint.Checkpointer.save = dying


def _in_evaluation():
    """After the second batch's features."""
    from diffusion_jax import files, sweep

    write, written = files.write_whole, []

    def dying(path, content):
        write(path, content)
        written.append(path)
        if len([path for path in written if path.suffix == ".npz"]) == 2:
            _die()

    sweep.files.write_whole = dying


_KILLS = {"training": _in_training, "saving": _in_saving, "evaluation": _in_evaluation}
