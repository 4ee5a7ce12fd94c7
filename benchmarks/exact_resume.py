"""Test on this device that a killed run ends with the same weights, and what this costs.

    python -m benchmarks.exact_resume --steps=300
    python -m benchmarks.exact_resume --model=base64_500m --steps=60 --both=False

The command trains the quick start several times (or, on the same digits, base64_500m with one
block per level, in bfloat16 with cuDNN's attention), each time in a process of its own and without
a cache of compiled programs. The first run is not interrupted. The second one is killed after the
checkpoint in the middle, and continued. The third one is another uninterrupted run, for which XLA
chooses kernels anew. All of this is done with the settings that make resume exact on GPUs
(diffusion_jax/train/autotuning.py), and then without them. The command prints lines of JSON: the
speed of each first run; how many parameters of the other runs differ from those of the first one,
and by how much; and for the quick start how many of 64 pictures are equal, to the last bit, if they
are drawn in batches of 1, 8 and 64.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
from absl import app, flags

from benchmarks import measure
from diffusion_jax import cli, runs
from diffusion_jax.logs import run_log
from diffusion_jax.weights import restore

flags.adopt_module_key_flags(measure)
_STEPS = flags.DEFINE_integer("steps", 300, "Steps of each run, an even number.", lower_bound=2)
_PICTURES = flags.DEFINE_integer("pictures", 64, "Pictures to draw.", lower_bound=1)
_MODEL = flags.DEFINE_enum("model", "quickstart", ["quickstart", "base64_500m"], "Model to train.")
_BOTH = flags.DEFINE_bool("both", True, "Also train without the settings for exact resume.")
_TINY = flags.DEFINE_bool("tiny", False, "Use a small model and cached programs, for a trial.")
_DRAW = flags.DEFINE_string("draw", "", "Only draw, with the model in this workdir.")
_TIMEOUT_S = 600  # Of one training process.
_LARGE = (
    "--config.unet.num_res_blocks=1",
    "--config.unet.attention_impl=cudnn",
    "--config.batch_size=32",
    "--config.data.source=diffusion_jax.examples.digits",
    "--config.data.path=",
    "--config.data.text=txt",
    "--config.text.encoder=hashed",
    "--config.text.width=256",
    "--config.prompts=()",
)
_TINY_LARGE = (
    "--config.unet.image_size=16",
    "--config.unet.channel_mult=(1,)",
    "--config.unet.head_dim=32",
    "--config.unet.attention_resolutions=()",
    "--config.unet.attention_impl=auto",
)


def main() -> None:
    """Train, kill, continue and draw; print one line of JSON for each result."""
    if _STEPS.value % 2:
        raise app.UsageError(f"--steps={_STEPS.value}: give an even number of steps", 2)
    if not _DRAW.value:  # The device's memory is for the child processes.
        jax.config.update("jax_platforms", "cpu")
    cli.start(alone=True)
    if _DRAW.value:
        _draw(pathlib.Path(_DRAW.value))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        _compare(folder, exact=True)
        if _MODEL.value == "quickstart":
            drawing = ["--draw", folder / "whole_exact", f"--pictures={_PICTURES.value}"]
            command = [sys.executable, "-m", "benchmarks.exact_resume", *map(str, drawing)]
            drawn = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            print(drawn.stdout, end="", flush=True)
        if _BOTH.value:
            _compare(folder, exact=False)


def _compare(folder: pathlib.Path, exact: bool) -> None:
    """Train three runs, and print how the last two differ from the first one."""
    suffix = "exact" if exact else "default"
    whole, killed, again = (folder / f"{name}_{suffix}" for name in ("whole", "killed", "again"))
    seconds = _train(whole, exact)
    rows = run_log.read_metrics(whole / run_log.METRICS)
    measure.say(
        {
            "run": "whole",
            "exact": exact,
            "seconds": seconds,
            "images_per_second": rows[-1].get("images_per_second"),
            "loss": rows[-1].get("loss"),
        }
    )
    killed.mkdir()
    if exact:  # The killed run shall use the kernels of the first one.
        for file in whole.glob("autotuning_*"):
            shutil.copy(file, killed)
    _train(killed, exact, kill=True)
    if not exact:
        for file in killed.glob("autotuning_*"):
            file.unlink()
    _train(killed, exact)
    measure.say({"run": "killed and continued", "exact": exact, **_difference(killed, whole)})
    _train(again, exact)
    measure.say({"run": "whole, kernels chosen anew", "exact": exact, **_difference(again, whole)})


def _train(workdir: pathlib.Path, exact: bool, kill: bool = False) -> float:
    """Train the quick start to the end, or kill it after the checkpoint in the middle.

    Returns the seconds that the process took. Raises RuntimeError if the process fails.
    """
    steps, middle = int(_STEPS.value), int(_STEPS.value) // 2
    command = [
        sys.executable,
        "-m",
        "imagen_jax.train",
        f"--config=configs/{_MODEL.value}.py",
        f"--workdir={workdir}",
        f"--config.steps={steps}",
        f"--config.save_every={middle}",
        f"--config.log_every={middle}",
        "--config.sample_every=0",
        f"--config.deterministic={exact}",
        f"--config.optimizer.warmup={middle}",
    ]
    large = _MODEL.value == "base64_500m"
    command += _LARGE if large else ()
    environment = dict(os.environ)
    if _TINY.value:
        command += ["--config.unet.embed_dim=32", "--config.batch_size=4"]
        command += _TINY_LARGE if large else ()
    else:
        environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    start, output = time.time(), workdir.with_suffix(".log")
    saved = workdir / runs.CHECKPOINTS / str(middle)
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        while process.poll() is None and time.time() - start < _TIMEOUT_S:
            if kill and saved.exists():
                process.send_signal(signal.SIGKILL)
                process.wait()
                return time.time() - start
            time.sleep(0.02)
    if process.poll() is None:
        process.kill()
    if process.wait():
        raise RuntimeError(f"{' '.join(command)}\n{output.read_text()[-2000:]}")
    return time.time() - start


def _difference(workdir: pathlib.Path, whole: pathlib.Path) -> dict[str, Any]:
    theirs, ours = jax.tree.leaves(_params(whole)), jax.tree.leaves(_params(workdir))
    differing = sum(int((a != b).sum()) for a, b in zip(ours, theirs, strict=True))
    largest = max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
    total = sum(leaf.size for leaf in theirs)
    return {"parameters": total, "differing": differing, "largest_difference": largest}


def _params(workdir: pathlib.Path) -> Any:
    root, step = restore.absolute(workdir) / runs.CHECKPOINTS, int(_STEPS.value)
    shapes = restore.shapes(root / str(step), restore.items_of(root / str(step), "raw")[0])
    return jax.tree.map(np.asarray, restore.load_params(root, shapes, "raw", step))


def _draw(workdir: pathlib.Path) -> None:
    import imagen_jax

    model, count = imagen_jax.load(workdir), int(_PICTURES.value)
    prompts = ["a red seven on gray paper"] * count
    drawn = {
        size: np.concatenate(
            [
                model.draw(prompts[i : i + size], seeds=range(i, min(i + size, count))).images
                for i in range(0, count, size)
            ]
        )
        for size in dict.fromkeys((count, 8, 1))
    }
    whole = drawn[count]
    for size, images in drawn.items():
        equal = (images == whole).reshape(count, -1).all(1)
        difference = np.abs(images.astype(int) - whole.astype(int)).max()
        measure.say(
            {
                "pictures": count,
                "batch": size,
                "equal_share": float(equal.mean()),
                "largest_difference_in_grey_levels": int(difference),
            }
        )


if __name__ == "__main__":
    cli.run(main)
