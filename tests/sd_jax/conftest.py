"""A tiny published model, as a diffusers directory and as a single file."""

import functools
import shutil

import pytest

from diffusion_jax.text import clip
from sd_jax.weights import checkpoints, names
from tests import shared
from tests.diffusion_jax.text import tiny_weights


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """A 1.x model that predicts v: d is its directory, a.npz and ldm.yaml are its file."""
    return shared.folder(tmp_path_factory, "published", _publish)


def _publish(folder):
    from tests.sd_jax.weights.test_checkpoints import compvis, written  # Importing it takes seconds.

    file = written(folder / "a.npz", compvis())
    vocabulary = tiny_weights.clip_folder(folder / "clip", "clip")
    (folder / "tokenizer").mkdir()
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(vocabulary / name, folder / "tokenizer" / name)
    (folder / "model_index.json").write_text('{"tokenizer": ["transformers", "CLIPTokenizer"]}')
    read = checkpoints.load(file, config=folder / "ldm.yaml")
    checkpoints.save_diffusers(read, folder / "d", "v", tokenizer=folder)


@pytest.fixture(scope="session", autouse=True)
def _shapes_traced_once():
    """Trace the shapes of each network once, which takes most of the time to read tiny weights."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((names, "abstract_unet"), (names, "abstract_vae"), (clip, "abstract_params")):
            patch.setattr(module, name, functools.cache(getattr(module, name)))
        yield
