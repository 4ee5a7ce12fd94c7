"""Moments: the means and log variances that an autoencoder gives for images, in webdataset tars.

A member KEY.npy holds means, then log variances, float [2 Z, h, w] or [1, 2 Z, h, w] as MLPerf
publishes them. A folder that this project wrote has a manifest, which says by what they were made;
what others wrote has none.
"""

import functools
import io
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from diffusion_jax.config.settings import Data
from diffusion_jax.data import records
from diffusion_jax.data.pictures import Decoded, Pictures, Shapes
from diffusion_jax.data.sources.webdataset import WebDataset
from diffusion_jax.data.transforms import Unusable
from diffusion_jax.machine import claims, files, untrusted

MANIFEST = "moments.json"
SUFFIXES = ("npy",)


def open_source(data: Data, shapes: Shapes) -> Pictures:
    """The moments in a config's tars, in the place of pictures; without a shape, texts alone."""
    path = records.path_of(data)
    tars = WebDataset(path, data.text, data.uncaptioned, data.max_broken, SUFFIXES)
    return Decoded(tars, functools.partial(read, shape=shapes.moments or (0, 0, 0)), data)


def read(
    contents: bytes, place: tuple[float, float], *, shape: tuple[int, int, int]
) -> Float[np.ndarray, "h w _"]:
    """The moments [h, w, 2 Z] of a file; ValueError at once for another `shape` than this.

    Unusable("broken_moments") for what is no array, or not finite. `place` is for images.
    """
    del place
    try:
        array = untrusted.read_array(io.BytesIO(contents), len(contents))
    except Exception as error:  # Damaged files fail in ways of their own.
        raise Unusable("broken_moments", f"{type(error).__name__}: {error}") from error
    height, width, channels = shape
    if array.shape not in ((channels, height, width), (1, channels, height, width)):
        raise ValueError(
            f"moments of shape {list(array.shape)}, and the config's are {channels} x {height} x "
            f"{width} (vae.latent_channels twice, and latents.image_size by the VAE's factor): "
            "set it to what the data hold, or make moments of this size"
        )
    array = array.reshape(channels, height, width).transpose(1, 2, 0).astype(np.float32)
    if not np.isfinite(array).all():
        raise Unusable("broken_moments", "not finite")
    return array


def write(moments: Float[np.ndarray, "h w _"]) -> bytes:
    """A file for `read`, channels first, float32."""
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(moments.transpose(2, 0, 1), np.float32))
    return file.getvalue()


def find_manifest(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The manifest in the folder that tars lie in; None if there is none."""
    folder = files.path(path)
    file = (folder if folder.is_dir() else folder.parent) / MANIFEST
    return json.loads(file.read_text()) if file.is_file() else None


def check_manifest(path: str | os.PathLike[str], wanted: Mapping[str, Any]) -> None:
    """ValueError if moments have a manifest and are unfinished, or made in another way."""
    stored = find_manifest(path)
    if stored is None:
        return
    if different := claims.unlike({name: stored.get(name) for name in wanted}, wanted):
        raise ValueError(
            f"the moments in {path} were made in another way ({different}): set the "
            "config to what is there, or make others in a new folder"
        )
    if not stored["finished"]:
        raise ValueError(
            f"the moments in {path} are unfinished: the command that began them goes on"
        )
