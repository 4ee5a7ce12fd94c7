"""Encode the images of a data set as VAE moments, which training reads instead of the images.

    python -m sd_jax.precache --config=configs/sd1_512_v1_5.py --config.data.path=photos \\
        --config.vae.weights=weights/sd-v1-5 --out=moments
    python -m sd_jax.train --config=configs/sd1_512_v1_5.py --config.data.source=moments \\
        --config.data.path=moments --workdir=runs/sd1

Use the same config and overrides as for training. --out receives, for each image, the means and log
variances of its latents, and a table of the captions. Training needs the images no more. At each
step, it samples new latents from the moments. It refuses moments of another VAE, of another range
of pixels or of other settings. To precompute text embeddings, use python -m diffusion_jax.precache.

If images or captions have changed when the command runs again, it encodes the changed and added
images, and writes a new table. For other settings, choose another --out.

If the command is killed, run it again to continue. To share the work between N machines or
processes, run the command in each of them with the same --out on a shared disk, with --workers=N,
and with a different number from 0 to N-1 as --worker. If a worker dies, the others do its work.
Each worker uses all devices that it can see. --engine=beam runs the work on Apache Beam
(docs/data.md). --verify compares all moments with their checksums, and encodes the images of
damaged files again.
"""

import pathlib

import jax
import numpy as np
from absl import flags, logging
from jaxtyping import Float, UInt8

from diffusion_jax import cli, files
from diffusion_jax.data import aspect_buckets, engines, sources
from diffusion_jax.devices import sharding
from diffusion_jax.devices.programs import announced
from diffusion_jax.logs import progress
from diffusion_jax.precache import moments
from diffusion_jax.precache.moments import MomentOptions
from diffusion_jax.task import to_range
from sd_jax.settings import Settings, read_settings, uses_moments
from sd_jax.train import encoder_identity
from sd_jax.weights.opened import read_vae


def define_flags() -> None:
    """Define the flags of this command; some are shared with other commands."""
    cli.define_config()
    flags.DEFINE_string("out", None, "The folder to write to; created if needed.", required=True)
    flags.DEFINE_integer(
        "shard_images",
        1000,
        "Images per file. If the command is killed, it loses at most one file of work.",
        lower_bound=1,
    )
    flags.DEFINE_integer("batch", 8, "Images per device and batch.", lower_bound=1)
    flags.DEFINE_bool("verify", False, "Check all files, and encode the images of damaged files again.")
    engines.define_flags()
    flags.mark_flag_as_required("config")


def main() -> None:
    """Run the command: write the VAE moments of the config's images to the folder --out."""
    cli.start()
    args = flags.FLAGS
    with cli.bad_input():
        out = files.path(args.out) if args.dry_run else files.folder(args.out, "--out")
        s = read_settings(args.config.to_dict())
        work = MomentOptions(args.shard_images, args.batch, engines.of(args), args.dry_run, args.verify)
        number = encode(s, out, work)
        if not args.dry_run:
            logging.info("wrote the moments of %s to %s", progress.counted(number, "picture"), out)


def encode(s: Settings, out: pathlib.Path, work: MomentOptions) -> int:
    """Write the VAE moments of a config's images, and return how many pictures have moments.

    Args:
        s: The settings of a training config.
        out: The folder for the moments.
        work: How to divide the work; `work.batch` is the number of images per device.

    Raises:
        ValueError, OSError: The data cannot be encoded as moments, or `out` was started with other
            settings or another VAE.
    """
    if uses_moments(s.data) or s.data.source in ("mixture", "synthetic"):
        raise ValueError(
            f"data.source is {s.data.source!r}, but moments are encoded from one source of images: "
            "name it, as in --config.data.source=webdataset, and encode each part of a mixture "
            "into its own folder"
        )
    if s.data.flip or s.data.crop != "center":
        raise ValueError(
            f"data.flip is {s.data.flip} and data.crop is {s.data.crop!r}, but moments are encoded "
            "only once, so training cannot flip or crop at random: set data.flip=False and "
            "data.crop=center"
        )
    encoder = MomentEncoder(s)
    pictures = sources.open_pictures(s.data, s.latents.image_size)
    work = work._replace(
        batch=work.batch * jax.local_device_count(),
        buckets=aspect_buckets.sort(pictures, s.data.aspect_buckets) if s.data.aspect_buckets else None,
    )
    return moments.run(pictures, encoder, out, encoder.identity, work)


class MomentEncoder:
    """A function that encodes images as VAE moments, on all devices of this process."""

    def __init__(self, s: Settings):
        """Read the weights of a config's VAE, and set `identity` to that of the moments."""
        vae_params = read_vae(s.vae_weights, s.vae)
        self.identity = encoder_identity(s, vae_params)
        mesh = sharding.make_mesh(1, -1, 1, jax.local_devices())
        self._split = sharding.batch_sharding(mesh)
        self._params = sharding.place_all(vae_params, mesh, sharding.RULES)

        @jax.jit
        def program(params, images):
            pixels = to_range(images, s.latents.pixels)
            return s.vae.apply(params, pixels, method="encode")

        self._program = announced(program, "the VAE's encoder")
        engines.record_call(self, MomentEncoder, s)

    def __call__(self, images: UInt8[np.ndarray, "B H W 3"]) -> Float[np.ndarray, "B h w _"]:
        return np.asarray(self._program(self._params, sharding.place(images, self._split)))


if __name__ == "__main__":
    define_flags()
    cli.run(main)
