"""Train configs/emoji64.py for a given time on one accelerator, and pack the model.

    python -m benchmarks.emoji_training --minutes=5 --out=measured

The command measures the speed of a training step, trains for as many steps as fit into the time
(at most the config's), packs the model, and draws the config's prompts. It writes emoji64.tar (the
packed model and the metrics of its training) and emoji64.png to the folder --out, and prints a line
of JSON. Prepare data/emoji first, as configs/emoji32.py describes.
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time

from absl import app, flags

from benchmarks import measure
from configs import emoji64
from diffusion_jax import cli
from diffusion_jax.logs import run_log

_MINUTES = flags.DEFINE_float("minutes", 5.0, "Minutes until the command must have ended.")
_OUT = flags.DEFINE_string("out", None, "Folder for the results.", required=True)
_REHEARSE = flags.DEFINE_bool("rehearse", False, "Train a tiny model on digits for three steps.")
_RESERVE_S = 60  # Kept for starting and compiling the training, packing and drawing.
_SHARE = 0.85  # Of the remaining time, for training at the speed that was measured.
_TINY = (
    "--config.unet.image_size=16",
    "--config.unet.embed_dim=32",
    "--config.unet.channel_mult=(1,)",
    "--config.unet.num_res_blocks=1",
    "--config.unet.attention_resolutions=()",
    "--config.batch_size=4",
)
_DIGITS = (
    "--config.data.source=diffusion_jax.examples.digits",
    "--config.data.path=",
    "--config.data.text=txt",
    "--config.prompts=('a red seven on gray paper',)",
)


def main(argv: list[str]) -> None:
    """Measure, train, pack and draw."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}: write flags as --NAME=VALUE", 2)
    end, out = time.monotonic() + 60 * _MINUTES.value, pathlib.Path(_OUT.value)
    tiny, config = _REHEARSE.value, "--config=configs/emoji64.py"
    if not tiny and not pathlib.Path(emoji64.get_config().data.path).exists():
        sys.exit("data/emoji does not exist: prepare it as configs/emoji32.py describes")
    model = _TINY if tiny else ()
    steps = ["--steps=1", "--warmup=0"] if tiny else ["--steps=20"]
    measured = json.loads(_run("benchmarks.train_step", config, *model, *steps).splitlines()[-1])
    seconds = end - time.monotonic() - _RESERVE_S
    rate = measured["samples_per_second"] / measured["batch"]
    count = 3 if tiny else min(emoji64.get_config().steps, int(seconds * rate * _SHARE))
    if count < 1:
        sys.exit(f"{_MINUTES.value:.1f} minutes do not suffice: {rate:.2f} steps/s were measured")
    with tempfile.TemporaryDirectory() as name:
        run, packed, drawn = (pathlib.Path(name) / each for each in ("run", "emoji64", "drawn"))
        data = _DIGITS if tiny else ()
        start = time.monotonic()
        _run(
            "imagen_jax.train",
            config,
            *model,
            *data,
            f"--workdir={run}",
            f"--config.steps={count}",
            f"--config.optimizer.warmup={min(500, count // 3)}",
            "--config.sample_every=0",
            f"--config.save_every={count}",
        )
        seconds = time.monotonic() - start
        _run("diffusion_jax.pack", f"--workdir={run}", f"--out={packed}")
        shutil.copy(run / run_log.METRICS, packed)
        prompts = emoji64.get_config().prompts
        chosen = ["--prompt=a red seven on gray paper"] if tiny else [f"--prompt={prompt}" for prompt in prompts]
        _run("imagen_jax.sample", f"--workdir={packed}", *chosen, f"--out={drawn}")
        out.mkdir(parents=True, exist_ok=True)
        shutil.copy(drawn / "sheet.png", out / "emoji64.png")
        with tarfile.open(out / "emoji64.tar", "w") as tar:
            tar.add(packed, "emoji64")
        rows = run_log.read_metrics(run / run_log.METRICS)
    images = count * measured["batch"]
    measure.say(
        {
            "steps": count,
            "images": images,
            "training_seconds": seconds,
            "images_per_second": images / seconds,
            "loss": rows[-1].get("loss"),
            "planned_step_images_per_second": measured["samples_per_second"],
        }
    )


def _run(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    cli.run_with_arguments(main)
