"""Read, identify, convert and download the weights of the FID Inception."""

import hashlib
import os
import pathlib
import shutil
import urllib.request
from typing import NamedTuple

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from diffusion_jax import files
from diffusion_jax.files.user_cache import user_cache
from diffusion_jax.metrics import inception, inception_weights
from diffusion_jax.weights import torch_files

URL = "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth"
_SHA256 = "6726825d"  # The beginning of the public file's hash, which its name contains.
_SHA1 = "bd836944fd6db519dfd8d924aa457f5b3c8357ff"  # The public file's hash, as in MLPerf's code.


class InceptionWeights(NamedTuple):
    """The weights of the FID Inception, with their hash."""

    params: inception.InceptionParams
    digest: str
    """SHA-256 of array names and values. It does not depend on the file format."""
    official: bool
    """Whether the weights come from the public file that defines FID."""


def load(path: str | os.PathLike[str] = "") -> InceptionWeights:
    """Load the FID Inception's weights from a .pth, .safetensors or .npz file.

    The arrays must have the same names as in the public file.

    Args:
        path: the weight file. "" stands for the public file, which is downloaded if needed.

    Raises:
        FileNotFoundError: the file does not exist, or the download failed.
        ValueError: the file is damaged or holds the weights of another network.
    """
    path = pathlib.Path(os.path.expanduser(files.local(path))) if path else _download()
    state = torch_files.read_state_dict(path)
    digest = inception_weights.digest(state)
    return InceptionWeights(inception_weights.to_params(state), digest, _is_official(path, digest))


def convert(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> InceptionWeights:
    """Convert a weight file to the .safetensors file `out`, and return the weights.

    `out` records whether the weights come from the public file. Raises ValueError if the name `out`
    does not end in .safetensors.
    """
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
    """Return whether a file is the public file, or was converted from it by `convert`."""
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
    target = user_cache() / "imagen-sd-jax" / URL.rpartition("/")[2]
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with files.whole(target) as part:
            with urllib.request.urlopen(URL, timeout=30) as response, part.open("wb") as file:
                shutil.copyfileobj(response, file)
            if not _has_hashes(part):
                raise ValueError(
                    f"the file from {URL} is not the public file: its hash differs. Try again, or "
                    "download the file on another machine and name it (--weights=FILE in commands)"
                )
    except OSError as error:
        raise FileNotFoundError(
            f"the FID Inception's weights could not be downloaded ({error}): download {URL} on "
            "another machine and name the file (--weights=FILE in commands)"
        ) from error
    return target
