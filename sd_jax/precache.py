"""Encodes the images of a data set once, for training that reads their moments.

    python -m sd_jax.precache --config=configs/sd1_512_v1_5.py --config.data.path=photos \\
        --config.vae.weights=weights/sd-v1-5 --out=moments
    python -m sd_jax.train --config=configs/sd1_512_v1_5.py --config.data.source=moments \\
        --config.data.path=moments --workdir=runs/sd1

The config and its changes are those of training. --out gets webdataset tars of KEY.npy, the means
and log variances of an image, and KEY.txt, its caption; training draws latents from them afresh
each time. The manifest beside them says which VAE made them of which pixels: training refuses those
of another one. Captions are encoded by python -m diffusion_jax.precache.

Killed at any moment, the same command goes on. To share the work between machines or processes, run
it in each with --workers=N and its own --worker=0 ... N-1, on a folder that all see; the work of
one that dies is done by the rest. Each uses all its devices. --engine=beam has Apache Beam's
workers do it (docs/data.md). --verify compares all that is there
with the checksums that the finished work left, and encodes again what is damaged.
"""

import pathlib
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from jaxtyping import Float, UInt8

from diffusion_jax import cli, engines
from diffusion_jax.data import sources
from diffusion_jax.machine import files, sharding
from diffusion_jax.machine.programs import announced
from diffusion_jax.precache import moments as encode_moments
from diffusion_jax.precache.moments import Work
from diffusion_jax.task import to_range
from sd_jax import task
from sd_jax.settings import Settings, read_settings, uses_moments
from sd_jax.train import made_by
from sd_jax.weights.initial import read_vae


def define_flags() -> None:
    """Defines the flags, of which other commands have some by the same names."""
    cli.define_config()
    flags.DEFINE_string("out", None, "The folder to write to; made if need be.", required=True)
    flags.DEFINE_integer(
        "shard_images", 1000, "Images of a tar, the unit that a kill may lose.", lower_bound=1
    )
    flags.DEFINE_integer("batch", 8, "Images that a device encodes at once.", lower_bound=1)
    flags.DEFINE_bool("verify", False, "Read all tars, and encode again what is damaged.")
    engines.define_flags()
    flags.mark_flag_as_required("config")


def main(argv: list[str]) -> None:
    """Checks everything, then encodes."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}", 2)
    cli.start()
    args = flags.FLAGS
    with cli.bad_input():
        out = files.path(args.out) if args.dry_run else files.folder(args.out, "--out")
        s = read_settings(args.config.to_dict())
        work = Work(args.shard_images, args.batch, engines.of(args), args.dry_run, args.verify)
        logging.info("%d tars are in %s", encode(s, out, work), out)


def encode(s: Settings, out: pathlib.Path, work: Work) -> int:
    """Writes the moments of a config's images; returns how many tars are there.

    `work.batch` is that of a device. ValueError or OSError for data that cannot be encoded so, or
    a folder of other moments.
    """
    if uses_moments(s.data) or s.data.source in ("mixture", "synthetic"):
        raise ValueError(
            f"data.source is {s.data.source!r}: name the source of the images, such as "
            "--config.data.source=webdataset; of a mixture, encode each part into its own folder"
        )
    if s.data.flip or s.data.crop != "center":
        raise ValueError(
            "data.flip or data.crop is set, and moments are of whole images as they are: set "
            "data.flip=False and data.crop=center"
        )
    encoder = Encoder(s)
    pictures = sources.open_pictures(s.data, s.latents.image_size)
    work = work._replace(batch=work.batch * jax.local_device_count())
    return encode_moments.run(pictures, encoder, out, encoder.identity, work)


class Encoder(engines.Portable):
    """`make_encode` on the devices of this process, with the weights of the config."""

    def __init__(self, s: Settings):
        """Reads the weights; `identity` is what moments depend on."""
        vae_params = read_vae(s.vae_weights, s.vae)
        self.identity = made_by(s, vae_params)
        mesh = sharding.make_mesh(1, -1, 1, jax.local_devices())
        self._encode = make_encode(s, vae_params, mesh)
        engines.made_by(self, Encoder, s)

    def __call__(self, images: UInt8[np.ndarray, "B H W 3"]) -> Float[np.ndarray, "B h w _"]:
        """The moments of images."""
        return self._encode(images)


def make_encode(s: Settings, vae_params: Any, mesh: sharding.Mesh) -> encode_moments.Encode:
    """Returns encode(images, uint8 [B, H, W, 3]) -> moments, on all devices of `mesh`."""
    where = sharding.batch_sharding(mesh)
    params = sharding.place_all(vae_params, mesh, task.RULES)

    @jax.jit
    def program(params, images):
        pixels = to_range(images, s.latents.pixels)
        return s.vae.apply(params, pixels, method="encode")

    run = announced(program, "the VAE's encoder")
    return lambda images: np.asarray(run(params, sharding.place(images, where)))


if __name__ == "__main__":
    define_flags()
    cli.run(main)
