"""Encode the captions of a data set once, so that training can look up their embeddings.

    python -m diffusion_jax.precache --config=configs/base64_500m_online.py \\
        --config.data.path=photos --config.text.weights=weights/t5-11b-encoder \\
        --config.text.store=embeddings
    python -m imagen_jax.train --config=configs/base64_500m_online.py \\
        --config.data.path=photos --config.text.store=embeddings --workdir=runs/base64

The config and its overrides are those of training: its `data` group locates the captions, its
`text` group names the text encoder, and text.store is the folder of the store. The config's prompts
are encoded too. Each distinct caption is stored once, without padding, by default in 8 bits per
channel.

First the command prints an estimate of the store's size; --dry_run ends there. A killed command
continues when it runs again. On a finished store, only new captions are encoded. To share the work
between N machines or processes, run the command in each of them with --workers=N and --worker=I,
where I is a different number from 0 to N-1 in each. The store must be in a folder that all of them
share. With jax.distributed, these flags are set automatically. Workers may start, die and restart
at any time. --engine=beam hands the work to Apache Beam's workers (docs/data.md). --verify reads
the whole store, and encodes damaged shards again.
"""

from absl import flags, logging

from diffusion_jax import cli, files
from diffusion_jax.data import engines
from diffusion_jax.precache import fill, store

_CONFIG = cli.define_config()
_FORMAT = flags.DEFINE_enum(
    "format",
    "int8",
    list(store.FORMATS),
    "Number format of the stored embeddings; int8 has a relative error of less than 1 %.",
)
_CAPTIONS = flags.DEFINE_string(
    "captions", None, "A .txt file with one caption per line, a table or FILE::COLUMN, which replaces config.data."
)
_SHARD = flags.DEFINE_integer(
    "shard_captions", 16384, "Captions per shard. A killed worker loses at most one shard.", lower_bound=1
)
_BATCH = flags.DEFINE_integer("batch_tokens", 8192, "Tokens per device and batch.", lower_bound=1)
_VERIFY = flags.DEFINE_bool("verify", False, "Read the whole store, and encode damaged shards again.")
engines.define_flags()


def main() -> None:
    """Check the config, print an estimate of the store's size, and encode the captions."""
    cli.start()
    with cli.bad_input():
        job = fill.open_job(_CONFIG.value.to_dict(), _CAPTIONS.value)
        engine = engines.of(flags.FLAGS)
        work = fill.EncodingOptions(_FORMAT.value, _SHARD.value, _BATCH.value, _VERIFY.value, engine)
        path = files.path(job.text.store)
        if not flags.FLAGS.dry_run:
            files.check_writable(path, "text.store")
        print(fill.estimate(job, work.format), flush=True)
    if flags.FLAGS.dry_run:
        return
    with cli.bad_input():
        fill.start(job, work)
    # OSError: usually a full disk; ValueError: embeddings that are not finite.
    with cli.bad_input(usual=(OSError,), code=1), cli.bad_input(usual=(ValueError,)):
        summary = fill.run(job, work)
    logging.info(
        "done: %s holds %s captions, %.0f bytes each; relative error of the embeddings %.2f %% on "
        "average, %.2f %% at most; smallest cosine similarity %.6f",
        path,
        f"{summary['captions']:,}",
        summary["bytes_per_caption"],
        100 * summary["mean_relative_error"],
        100 * summary["largest_relative_error"],
        summary["least_cosine"],
    )


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    cli.run(main)
