"""The FID Inception's weights from a file: read safely, known by hash, downloaded if need be."""

import hashlib
import os
import pathlib
import shutil
import urllib.request
from typing import NamedTuple

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from diffusion_jax.machine import files
from diffusion_jax.metrics import inception, inception_weights
from diffusion_jax.weights import torch_files

URL = (
    "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/"
    "pt_inception-2015-12-05-6726825d.pth"
)
_SHA256 = "6726825d"  # What the public file's name says: the beginning.
_SHA1 = "bd836944fd6db519dfd8d924aa457f5b3c8357ff"  # What MLPerf checks.


class Weights(NamedTuple):
    """Read weights, and what they are."""

    params: inception.Params
    digest: str
    """sha256 of names and values, whatever file they are in."""
    official: bool
    """Whether they come from the public file that FID is defined with."""


def load(path: str | os.PathLike[str] = "") -> Weights:
    """Weights from a .pth, .safetensors or .npz file with the public names; "" downloads them.

    FileNotFoundError or ValueError that says what is wrong with the file.
    """
    path = files.local(path).expanduser() if path else _download()
    state = torch_files.read_state_dict(path)
    digest = inception_weights.digest(state)
    return Weights(inception_weights.to_params(state), digest, _is_official(path, digest))


def convert(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> Weights:
    """Writes a file's weights as safetensors to `out`, with a note of where they came from."""
    if pathlib.Path(out).suffix != ".safetensors":
        raise ValueError(f"cannot write {out}: the name must end in .safetensors")
    weights = load(path)
    state = {
        name: np.asarray(array, order="C")
        for name, array in torch_files.read_state_dict(path).items()
        if not name.endswith(".num_batches_tracked")
    }
    note = {"sha1": _SHA1, "digest": weights.digest} if weights.official else {}
    safetensors.numpy.save_file(state, out, metadata=note)
    return weights


def _is_official(path: pathlib.Path, digest: str) -> bool:
    """By the file's own hashes, or the note that `convert` made of them and of the values."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "numpy") as file:
                note = file.metadata() or {}
        except SafetensorError:
            return False
        return note.get("sha1") == _SHA1 and note.get("digest") == digest
    return _has_hashes(path)


def _has_hashes(path: pathlib.Path) -> bool:
    data = path.read_bytes()
    sha256, sha1 = hashlib.sha256(data).hexdigest(), hashlib.sha1(data).hexdigest()
    return sha256.startswith(_SHA256) and sha1 == _SHA1


def _download() -> pathlib.Path:
    """The public file in the user's cache; whole and with the right hashes, or not there at all."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    target = pathlib.Path(cache) / "imagen-sd-jax" / URL.rpartition("/")[2]
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with files.whole(target) as part:
            with urllib.request.urlopen(URL, timeout=30) as response, part.open("wb") as file:
                shutil.copyfileobj(response, file)
            if not _has_hashes(part):
                raise ValueError(f"what {URL} gave is not the public file: its hash is another")
    except OSError as error:
        raise FileNotFoundError(
            f"the FID Inception's weights could not be downloaded ({error}): get {URL} elsewhere "
            "and give the file with --weights=FILE"
        ) from error
    return target
