"""Encodes the captions of a data set once, for training that looks them up.

    python -m diffusion_jax.precache --config=configs/base64_500m_online.py \\
        --config.data.path=photos --config.text.weights=weights/t5-11b-encoder \\
        --config.text.store=embeddings
    python -m imagen_jax.train --config=configs/base64_500m_online.py \\
        --config.data.path=photos --config.text.store=embeddings --workdir=runs/base64

The config and its changes are those of training: its `data` says where the captions are, its `text`
which encoder reads them, and text.store the folder of the store. The config's prompts are encoded
too. Each different caption is stored once, without padding, in 8 bits a channel.

First a table says what the store will take on disk and what encoding in training would cost
instead; --dry_run ends there. Killed at any moment, the same command goes on; on a store that is
finished it encodes only what the data have more. To share the work between machines or processes,
run the command in each with --workers=N and its own --worker=0 ... N-1 (where jax.distributed is
set up, it knows them), on a folder that all see; they may start, die and restart as they like.
--engine=beam has Apache Beam's workers do it (docs/data.md).
--verify reads all that is stored, and encodes again what is damaged.
"""

from absl import app, flags, logging

from diffusion_jax import cli, engines
from diffusion_jax.machine import files
from diffusion_jax.precache import fill, shards, store

_CONFIG = cli.define_config()
_FORMAT = flags.DEFINE_enum(
    "format", "int8", list(store.FORMATS), "What is stored: int8 errs by less than 1 %."
)
_CAPTIONS = flags.DEFINE_string("captions", None, "A file, one caption a line, not config.data.")
_SHARD = flags.DEFINE_integer(
    "shard_captions", 16384, "Captions of a shard, the unit that a kill may lose.", lower_bound=1
)
_BATCH = flags.DEFINE_integer(
    "batch_tokens", 8192, "Tokens that a device encodes at once.", lower_bound=1
)
_VERIFY = flags.DEFINE_bool("verify", False, "Read all that is stored, and mend what is damaged.")
engines.define_flags()


def main(argv: list[str]) -> None:
    """Checks everything, prints the table, then encodes."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    cli.start()
    with cli.bad_input():
        job = fill.open_job(_CONFIG.value.to_dict(), _CAPTIONS.value)
        engine = engines.of(flags.FLAGS)
        work = fill.Work(_FORMAT.value, _SHARD.value, _BATCH.value, _VERIFY.value, engine)
        path = files.path(job.text.store)
        if not flags.FLAGS.dry_run:
            files.check_writable(path, "text.store")
        print(fill.table(job, work.format), flush=True)
    if flags.FLAGS.dry_run:
        return
    with cli.bad_input():
        shards.start(path, job.identity, work.format)
    with cli.bad_input(usual=(OSError,), code=1):  # A full disk, mostly.
        manifest = fill.run(job, work)
    logging.info(
        "done: %s holds %s captions, %.0f bytes each; relative error %.2f %% on average, %.2f %% "
        "at most; least cosine %.6f",
        path, f"{manifest['captions']:,}", manifest["bytes_per_caption"],
        100 * manifest["mean_relative_error"], 100 * manifest["largest_relative_error"],
        manifest["least_cosine"],
    )  # fmt: skip


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    cli.run(main)
