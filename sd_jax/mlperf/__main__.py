"""Run MLPerf's text-to-image benchmark (Stable Diffusion v2, training 5.0.0) and write its log.

    python -m sd_jax.mlperf --config=configs/sd2_mlperf.py:512 --workdir=runs/mlperf/0 \\
        --config.data.path=laion/moments --config.vae.weights=512-base-ema.ckpt \\
        --config.text.weights=clip-vit-h-14 --config.evaluation.prompts=val2014_30k.tsv \\
        --config.evaluation.reference=val2014_30k_stats.npz \\
        --config.evaluation.inception=pt_inception-2015-12-05-6726825d.pth \\
        --config.evaluation.clip=clip-vit-h-14

The number after the config's name is the global batch size, which also sets the learning rate. The
model is evaluated after every 512,000 training images (config.evaluation.every, rounded up to whole
steps). The run ends when FID and CLIP score both meet their targets in one evaluation, or after
config.steps training steps.

All hosts must share the workdir. The command writes the files of sd_jax.train and the log
result.txt there. MLPerf's checkers read result.txt, and python -m sd_jax.rcp compares the result
with MLPerf's reference runs. If a run is killed, the same command continues it. docs/mlperf.md
describes all steps, from installation to a result.
"""

import pathlib
import time

from absl import flags, logging

from diffusion_jax import cli, files
from sd_jax.mlperf import mllog, run

_CONFIG = cli.define_config("configs/sd2_mlperf.py:BATCH_SIZE.")
_WORKDIR = flags.DEFINE_string("workdir", None, "The workdir, created if missing.", required=True)
_MODE = flags.DEFINE_enum(
    "mode",
    run.INLINE,
    run.MODES,
    "inline: train and evaluate in turn. train: only train, to the end, and keep the checkpoints. "
    "evaluate: score these checkpoints until one meets the targets. The clock of the result counts "
    "only training time.",
)
_SEED = flags.DEFINE_integer("seed", None, "Overrides the config's seed. Default: a random seed for each new run.")
_EVAL_BATCH = flags.DEFINE_integer("eval_batch", 8, "Images per device and batch in an evaluation.", lower_bound=1)
_DIVISION = flags.DEFINE_enum("division", "closed", ["closed", "open"], "The division of the submission.")
_ORG = flags.DEFINE_string("org", "none", "The name of the submitter.")
_PLATFORM = flags.DEFINE_string("platform", "none", "The name of the computer system.")
_STATUS = flags.DEFINE_enum(
    "status", "onprem", ["onprem", "cloud", "research"], "The availability of the computer system."
)
_CLEARED = flags.DEFINE_bool(
    "cache_cleared", False, "Log that you cleared the system's caches before this run, as MLPerf's rules require."
)


def main() -> None:
    """Run the benchmark that the flags describe, or continue it."""
    init_start = int(time.time() * 1000)
    cli.start()
    workdir = pathlib.Path(_WORKDIR.value)
    with cli.bad_input():
        if files.store_path(workdir):
            raise ValueError(
                f"--workdir={_WORKDIR.value} is in a bucket, but the benchmark appends to its log, "
                "and files in buckets cannot grow: name a local folder, and copy it to the bucket "
                "afterwards"
            )
    submission = run.Submission(_DIVISION.value, _ORG.value, _PLATFORM.value, _STATUS.value, _CLEARED.value)
    status = run.go(_CONFIG.value, workdir, _MODE.value, _SEED.value, _EVAL_BATCH.value, submission, init_start)
    logging.info("%s: %s", workdir / mllog.RESULT, status)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    cli.run(main)
