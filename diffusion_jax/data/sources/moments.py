"""Read VAE moments, the means and log variances of an autoencoder's latents, from webdataset tars.

A member KEY.npy of a tar holds means followed by log variances: float [2 Z, h, w] for Z latent
channels, or [1, 2 Z, h, w] in MLPerf's files. If this project wrote the folder, it has a manifest
(moments.json), which records the settings that the moments were computed with.
"""

import functools
import io
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from diffusion_jax import files
from diffusion_jax.config import picture_fields
from diffusion_jax.config.settings import Data
from diffusion_jax.data import records
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.pictures import DecodedPictures, Pictures, TaskShapes
from diffusion_jax.data.sources.webdataset import open_tars
from diffusion_jax.files import settings_record, untrusted

MANIFEST = "moments.json"
SUFFIXES = ("npy",)
_BEFORE = ("flip", "crop", "resize", "min_size", "max_aspect")
"""Fields of the data group that apply to images before they are encoded."""


def open_source(data: Data, shapes: TaskShapes) -> Pictures:
    """Open a config's tars of VAE moments. If shapes.moments is None, only texts can be read."""
    path = records.path_of(data)
    # Other values cannot change encoded images, unless they were applied when encoding.
    stored = find_manifest(path)
    encoded = (stored or {}).get("data", {})
    values = {name: getattr(data, name) for name in _BEFORE}
    wrong = [
        f"data.{name}={value!r}"
        for name, value in values.items()
        if value not in (Data._field_defaults[name], encoded.get(name))
    ]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)} cannot change moments that are stored: leave it out, or train on "
            "the images themselves; resize, min_size and max_aspect also work in sd_jax.precache"
        )
    fields = picture_fields.read(data.fields)
    tars = open_tars(path, data.text, data.uncaptioned, data.max_broken, SUFFIXES, fields)
    side, _, channels = shapes.moments or (1, 1, 0)
    factor = shapes.size // side
    make = functools.partial(read, shape=(shapes.size, shapes.size), factor=factor, channels=channels)
    return DecodedPictures(tars, make, data, functools.partial(size_of, factor=factor))


def read(
    contents: bytes, place: tuple[float, float], *, shape: tuple[int, int], factor: int, channels: int
) -> Float[np.ndarray, "h w _"]:
    """Decode the contents of a file of VAE moments to float32 [h, w, 2 Z].

    Args:
        contents: the file's bytes.
        place: the crop position, which is ignored.
        shape: height and width in pixels that the image must have had when it was encoded.
        factor: the VAE's downsampling factor: the image's side divided by the moments' side.
        channels: the expected number of channels, 2 Z for Z latent channels.

    Raises:
        ValueError: the moments have another shape than the expected one.
        Unusable: with reason "broken_moments" if the file is damaged or a value is not finite.
    """
    del place
    try:
        array = untrusted.read_array(io.BytesIO(contents), len(contents))
    except Exception as error:  # Damaged files raise exceptions of many types.
        raise Unusable("broken_moments", f"{type(error).__name__}: {error}") from error
    height, width = (side // factor for side in shape)
    if array.shape not in ((channels, height, width), (1, channels, height, width)):
        raise ValueError(
            f"moments have shape {list(array.shape)}, but the config expects "
            f"{[channels, height, width]} (2 * vae.latent_channels channels; sides of "
            "latents.image_size / the VAE's downsampling factor): set the config to the data's "
            "shape, or compute moments of the expected shape"
        )
    array = array.reshape(channels, height, width).transpose(1, 2, 0).astype(np.float32)
    if not np.isfinite(array).all():
        raise Unusable("broken_moments", "a value is not finite")
    return array


def size_of(contents: bytes, *, factor: int) -> tuple[int, int]:
    """Return height and width in pixels of the image whose moments an .npy file holds.

    The size is (0, 0) if the file is damaged. `factor` is the VAE's downsampling factor.
    """
    try:
        *_, height, width = untrusted.read_array(io.BytesIO(contents), len(contents)).shape
    except Exception:  # Damaged files raise exceptions of many types.
        return 0, 0
    return height * factor, width * factor


def write(moments: Float[np.ndarray, "h w _"]) -> bytes:
    """Return the contents of an .npy file with these moments as float32 [2 Z, h, w]."""
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(moments.transpose(2, 0, 1), np.float32))
    return file.getvalue()


def find_manifest(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the manifest in the folder `path`, or beside the tar `path`; None if there is none.

    The manifest holds the settings that the VAE moments were computed with, and "finished", which
    is False if some moments are missing.
    """
    folder = files.path(path)
    file = (folder if folder.is_dir() else folder.parent) / MANIFEST
    return json.loads(file.read_text()) if file.is_file() else None


def check_manifest(path: str | os.PathLike[str], expected: Mapping[str, Any]) -> None:
    """Check that the VAE moments at `path` are complete, and were computed as `expected` says.

    `expected` maps names of settings to values. Other settings in the manifest are not compared.

    Moments without a manifest are accepted.

    Raises:
        ValueError: the moments are incomplete or were computed with other settings.
    """
    stored = find_manifest(path)
    if stored is None:
        return
    if different := settings_record.differences({name: stored.get(name) for name in expected}, expected):
        raise ValueError(
            f"the moments in {path} were computed with other settings ({different}): set the "
            "config to the stored settings, or compute moments in a new folder"
        )
    if not stored["finished"]:
        raise ValueError(
            f"the moments in {path} are incomplete: run the command that wrote them once more; it "
            "continues where it stopped"
        )
