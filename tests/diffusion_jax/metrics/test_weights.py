"""Weights' files: what is official, what a conversion keeps, and downloads that go wrong."""

import hashlib
import pathlib

import numpy as np
import pytest
import safetensors.numpy

from diffusion_jax.metrics import inception_weights, weights

LEGACY = pathlib.Path(__file__).parents[2] / "fixtures" / "legacy.pth"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Params of any state dict; the real table is held in test_inception."""
    monkeypatch.setattr(inception_weights, "to_params", lambda state: {"n": len(state)})


def is_now_public(monkeypatch, path):
    """This file's hashes take the place of the public file's."""
    data = path.read_bytes()
    monkeypatch.setattr(weights, "_SHA256", hashlib.sha256(data).hexdigest()[:8])
    monkeypatch.setattr(weights, "_SHA1", hashlib.sha1(data).hexdigest())


def test_only_the_public_files_hashes_are_official(monkeypatch):
    found = weights.load(LEGACY)
    assert not found.official and found.params == {"n": 7}
    is_now_public(monkeypatch, LEGACY)
    assert weights.load(LEGACY) == found._replace(official=True)


def test_a_conversion_keeps_values_and_origin(monkeypatch, tmp_path):
    is_now_public(monkeypatch, LEGACY)
    out = tmp_path / "fid.safetensors"
    converted = weights.convert(LEGACY, out)
    assert weights.load(out) == converted == weights.load(LEGACY)
    assert converted.official
    state = safetensors.numpy.load_file(out)
    name = next(name for name, array in state.items() if array.dtype == np.float32)
    state[name] = state[name] + 1  # The note would be of other values.
    note = {"sha1": weights._SHA1, "digest": converted.digest}
    safetensors.numpy.save_file(state, out, metadata=note)
    assert not weights.load(out).official


def test_what_is_not_official_is_so_after_a_conversion_too(tmp_path):
    weights.convert(LEGACY, tmp_path / "a.safetensors")
    assert not weights.load(tmp_path / "a.safetensors").official
    with pytest.raises(ValueError, match=r"a.npz: the name must end in .safetensors"):
        weights.convert(LEGACY, tmp_path / "a.npz")


def test_a_download_is_kept_if_its_hash_is_right(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "URL", LEGACY.as_uri())
    folder = tmp_path / "cache" / "imagen-sd-jax"
    with pytest.raises(ValueError, match="is not the public file: its hash differs"):
        weights.load()
    assert not list(folder.iterdir())
    is_now_public(monkeypatch, LEGACY)
    assert weights.load().official
    assert [path.name for path in folder.iterdir()] == ["legacy.pth"]
    monkeypatch.setattr(weights.urllib.request, "urlopen", None)  # It is not asked for again.
    assert weights.load().official


def test_without_a_network_the_way_out_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(weights, "URL", (tmp_path / "nothing.pth").as_uri())
    with pytest.raises(FileNotFoundError, match=r"could not be downloaded .*--weights=FILE"):
        weights.load()
