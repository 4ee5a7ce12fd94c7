"""Files of Inception weights: which are official, conversion, and failing downloads."""

import hashlib
import pathlib

import numpy as np
import pytest
import safetensors.numpy

from diffusion_jax.metrics import inception_weights, weights

LEGACY = pathlib.Path(__file__).parents[2] / "fixtures" / "legacy.pth"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Accept any state dict. test_inception.py tests the real table of names."""
    monkeypatch.setattr(inception_weights, "to_params", lambda state: {"n": len(state)})


def is_now_public(monkeypatch, path):
    """Replace the public file's hashes by those of this file."""
    data = path.read_bytes()
    monkeypatch.setattr(weights, "_SHA256", hashlib.sha256(data).hexdigest()[:8])
    monkeypatch.setattr(weights, "_SHA1", hashlib.sha1(data).hexdigest())


def test_only_a_file_with_the_public_hashes_is_official(monkeypatch):
    loaded = weights.load(LEGACY)
    assert not loaded.official and loaded.params == {"n": 7}
    is_now_public(monkeypatch, LEGACY)
    assert weights.load(LEGACY) == loaded._replace(official=True)


def test_a_converted_file_of_official_weights_is_official_until_a_value_changes(monkeypatch, tmp_path):
    is_now_public(monkeypatch, LEGACY)
    out = tmp_path / "fid.safetensors"
    converted = weights.convert(LEGACY, out)
    assert weights.load(out) == converted == weights.load(LEGACY)
    assert converted.official
    state = safetensors.numpy.load_file(out)
    name = next(name for name, array in state.items() if array.dtype == np.float32)
    state[name] = state[name] + 1  # The digest in the metadata no longer matches.
    note = {"sha1": weights._SHA1, "digest": converted.digest}
    safetensors.numpy.save_file(state, out, metadata=note)
    assert not weights.load(out).official


def test_a_converted_file_of_other_weights_is_not_official(tmp_path):
    weights.convert(LEGACY, tmp_path / "a.safetensors")
    assert not weights.load(tmp_path / "a.safetensors").official
    with pytest.raises(ValueError, match=r"a.npz: the name must end in .safetensors"):
        weights.convert(LEGACY, tmp_path / "a.npz")


def test_a_download_is_stored_only_if_its_hash_is_right(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "URL", LEGACY.as_uri())
    folder = tmp_path / "cache" / "imagen-sd-jax"
    with pytest.raises(ValueError, match="is not the public file: its hash differs"):
        weights.load()
    assert not list(folder.iterdir())
    is_now_public(monkeypatch, LEGACY)
    assert weights.load().official
    assert [path.name for path in folder.iterdir()] == ["legacy.pth"]
    monkeypatch.setattr(weights.urllib.request, "urlopen", None)  # No second download.
    assert weights.load().official


def test_a_failed_download_error_names_the_flag_weights(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(weights, "URL", (tmp_path / "nothing.pth").as_uri())
    with pytest.raises(FileNotFoundError, match=r"could not be downloaded .*--weights=FILE"):
        weights.load()
