"""A tiny published model, as a diffusers directory and as a single file."""

import shutil

import numpy as np
import pytest

from sd_jax.weights import checkpoints
from tests import shared
from tests.diffusion_jax.text import tiny_weights


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """A 1.x model that predicts v: d is its directory, a.npz and ldm.yaml are its file."""
    return shared.folder(tmp_path_factory, "published", _publish)


def _publish(folder):
    from tests.sd_jax.weights.test_checkpoints import YAML, compvis  # Importing it takes seconds.

    np.savez(folder / "a.npz", **compvis())
    vocabulary = tiny_weights.clip_folder(folder / "clip", "clip")
    (folder / "tokenizer").mkdir()
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(vocabulary / name, folder / "tokenizer" / name)
    (folder / "model_index.json").write_text('{"tokenizer": ["transformers", "CLIPTokenizer"]}')
    (folder / "ldm.yaml").write_text(YAML)
    read = checkpoints.load(folder / "a.npz", config=folder / "ldm.yaml")
    checkpoints.save_diffusers(read, folder / "d", "v", tokenizer=folder)
