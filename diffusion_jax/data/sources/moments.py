"""Read VAE moments, the means and log variances of an autoencoder's latents.

They are stored as the contents of .npy files, which hold means followed by log variances: float
[2 Z, h, w] for Z latent channels, or [1, 2 Z, h, w] in MLPerf's tars. These are webdataset tars of
KEY.npy and KEY.txt. The moments that this project computed are a column (data/columns.py), whose
folder also holds the table of their texts; see precache/moments.py.
"""

import functools
import io
import os
import pathlib
from typing import Any

import numpy as np
from jaxtyping import Float

from diffusion_jax import files
from diffusion_jax.config import picture_fields
from diffusion_jax.config.settings import MOMENTS, Data
from diffusion_jax.data import columns, home, records, table
from diffusion_jax.data.columns import Identity
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.inventory import LeftOut
from diffusion_jax.data.pictures import DecodedPictures, Pictures, TaskShapes
from diffusion_jax.data.sources.webdataset import open_tars
from diffusion_jax.data.table import Table
from diffusion_jax.files import untrusted

KIND = columns.Kind("python -m sd_jax.precache --config=CONFIG --out={path}", "the config")
_EARLIER = "moments.json"  # Earlier versions wrote it beside tars of moments.
_SUFFIXES = ("npy",)
_CROPS = ("flip", "crop")
SETTINGS = ("resize", "min_size", "max_aspect", "loss_mask")
"""Fields of the data group that determine the moments of an image."""


def open_source(data: Data, shapes: TaskShapes) -> Pictures:
    """Open a config's VAE moments. If shapes.moments is None, only texts can be read."""
    opened, path = open_table(data), data.path
    identity = {name: getattr(data, name) for name in (*_CROPS, *SETTINGS)}
    stored = {**Data._field_defaults, **(found := find_identity(path) or {})}
    if found:
        chunks = [opened.path(name) for name, _ in opened.card["files"]]
        opened = home.of_run(opened, home.Source(path, chunks, opened.card["rule"], lambda _: iter(()), LeftOut(), {}))
        if outside := [name for name, _ in opened.card["files"] if os.path.basename(name) != name]:
            raise ValueError(f"the card of {path} names the file {outside[0]!r}: encode the images again")
        identity, stored = {**identity, **rule(data)}, {**stored, **opened.card["rule"]}
    columns.check_identity(path, stored, identity, KIND)
    side, _, channels = shapes.moments or (1, 1, 0)
    factor = shapes.size // side
    make = functools.partial(read, shape=(shapes.size, shapes.size), factor=factor, channels=channels)
    return DecodedPictures(opened, make, data, functools.partial(size_of, factor=factor))


def open_table(data: Data) -> Table:
    """Open the table of the pictures that have moments at a config's data.path."""
    path = records.path_of(data)
    if find_identity(path):
        return Table(path, os.fspath(path))
    fields = picture_fields.read(data.fields)
    return open_tars(path, data.text, data.uncaptioned, data.max_broken, _SUFFIXES, fields)


def rule(data: Data) -> dict[str, Any]:
    """Return the settings that the rows of a table of moments depend on."""
    return home.rule(MOMENTS, data.text, picture_fields.read(data.fields))


def find_identity(path: str | os.PathLike[str]) -> Identity | None:
    """Return the settings that moments were computed with, or None for tars of another program.

    Raises ValueError if the moments are unfinished or damaged, or an earlier version wrote them.
    """
    check_version(folder := files.path(path))
    if not (folder / columns.CARD).is_file():
        return None
    if not (folder / table.CARD).is_file():
        raise ValueError(f"{path} is unfinished: continue with{KIND.make(path)}")
    return columns.read_identity(folder, KIND)


def check_version(path: pathlib.Path) -> None:
    """Raise ValueError if an earlier version wrote the moments in a folder, or in a tar."""
    if ((path if path.is_dir() else path.parent) / _EARLIER).is_file():
        command = KIND.make("NEW_FOLDER")
        raise ValueError(f"an earlier version wrote the moments in {path}: encode the images again with{command}")


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
